"""What commands print: one JSON object with --json, otherwise lines for a reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from fedpriv import texts

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")]


def show(values: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print the values as one JSON object, in which null stands for infinity and NaN; or print the lines."""
    typer.echo(texts.strict_json(values) if as_json else "\n".join(lines))


def entries(values: Mapping[str, Any]) -> list[str]:
    """A line for each entry, with the values aligned; a nested mapping is indented below its name."""
    width = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = max((len(str(key)) for key in value), default=0)
            lines += [f"{name}:", *(f"  {key!s:<{inner}}  {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name:<{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return lines


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """The columns' names and a line for each row, aligned; a missing value leaves its cell empty."""
    lines = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

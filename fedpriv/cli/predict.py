"""`fedpriv predict`: what a saved model says of a text, or of every row of a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.options import ModelName, SavedModel, VariantName
from fedpriv.cli.output import AsJson, show
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.publishing.saved import LoadedVariant


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The texts, and for a table its columns, {name: values}."""

    texts: list[str]
    pairs: list[str] | None
    columns: dict[str, list[str]] | None = None


def predict(
    source: SavedModel,
    asked: Annotated[str, typer.Argument(metavar="TEXT|FILE", help="A text, or a .csv, .jsonl or .parquet file.")],
    text: Annotated[str, typer.Option(help="Column of a file with the texts.")] = "text",
    pair: Annotated[
        str, typer.Option(help="For a model of text pairs: the second text, or a file's column with it.")
    ] = "",
    variant: VariantName = "",
    model: ModelName = "",
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer of a language model; by default the run's.", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV to write instead of printing; must not exist.")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a run's model: classes with their probabilities, or a language model's answers.

    A file gives a CSV: its columns, and what was predicted. Each text is computed by itself, in float32, so that no
    other text changes its answer.

    Example: fedpriv predict results/20261121-042553-embedded 'a rash on the left knee'

    Example: fedpriv predict results/20261121-042553-embedded letters.csv --text letter --out answers.csv
    """
    from fedpriv.publishing import saved

    if out is not None and out.exists():
        raise InputError(f"out = {str(out)!r}: exists; name another file")
    found = saved.find(source, variant=variant, model=model)
    asking = _asked(asked, text, pair)
    if out is not None and asking.columns is None:
        raise InputError(f"out = {str(out)!r}: is for the answers to a file; a single text's are printed")
    new = _predicted(saved.load(found), asking, max_new_tokens)
    rows = [dict(zip(new, values, strict=True)) for values in zip(*new.values(), strict=True)]
    values: dict[str, Any] = {"variant": found.name, "task": found.task, "labels": list(found.labels)}
    if asking.columns is None:
        show(values | _as_object(rows[0], found.labels), _lines(rows[0], found.labels), as_json)
        return
    table = _csv({**asking.columns, **new})
    if out is not None:
        from fedpriv.files import write_new

        write_new(out, table.encode())
        values |= {"out": str(out), "num_texts": len(rows)}
        show(values, [f"{out}: {len(rows)} texts answered by {found.name}"], as_json)
        return
    show(values | {"predictions": [_as_object(row, found.labels) for row in rows]}, [table.rstrip("\n")], as_json)


def _asked(asked: str, text: str, pair: str) -> _Asked:
    """The texts of the command line, or of the file that it names."""
    from fedpriv.data import tables

    if "\n" in asked or not (tables.suffix_of(Path(asked)) in tables.FORMATS or _is_file(asked)):
        return _Asked(texts=[asked], pairs=[pair] if pair else None)
    table = tables.load_table(asked, key="FILE")
    for option, name in (("--text", text), *([("--pair", pair)] if pair else [])):
        if name not in table.column_names:
            raise InputError(f"{option} {name}: {asked} has the columns {', '.join(table.column_names)}")
    columns = {name: ["" if value is None else str(value) for value in table[name]] for name in table.column_names}
    return _Asked(texts=columns[text], pairs=columns[pair] if pair else None, columns=columns)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or no name at all
        return False


def _predicted(loaded: LoadedVariant, asking: _Asked, max_new_tokens: int | None) -> dict[str, list[Any]]:
    """{column: values} of what the model says; refuses columns that the table has already."""
    from fedpriv.publishing import prediction

    labels = loaded.saved.labels
    names = ["predicted_label", *(f"probability_{label}" for label in labels)] if labels else ["answer"]
    if taken := sorted(set(names) & set(asking.columns or {})):
        raise InputError(f"FILE: has a column {taken[0]} already; rename it, since the answers are written there")
    if not labels:
        if asking.pairs is not None:
            raise InputError(f"--pair: {loaded.saved.name} is a language model, which takes one prompt")
        return {"answer": prediction.generate(loaded, asking.texts, max_new_tokens=max_new_tokens)}
    found = prediction.classify(loaded, asking.texts, asking.pairs)
    best = [labels[max(range(len(labels)), key=row.__getitem__)] for row in found]
    return {names[0]: best, **dict(zip(names[1:], map(list, zip(*found, strict=True)), strict=True))}


def _as_object(row: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    if not labels:
        return row
    return {"label": row["predicted_label"], "probabilities": {label: row[f"probability_{label}"] for label in labels}}


def _lines(row: dict[str, Any], labels: Sequence[str]) -> list[str]:
    if not labels:
        return [_printable(row["answer"])]
    width = max(map(len, labels))
    ordered = sorted(labels, key=lambda label: -row[f"probability_{label}"])
    return [f"{_printable(label):<{width}}  {row[f'probability_{label}']:.4f}" for label in ordered]


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _csv(columns: dict[str, list[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()

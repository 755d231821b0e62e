"""The four papers row by row: what each reports, our command, and our figure: docs/papers/*.md, results/papers.md.

    fedpriv reproduce [PAPER [ROW]] [--data FOLDER] [--stored]
    python -m simulations.studies.reproduce run|tables

papers/PAPER.toml has a row for every algorithm, theorem, table, figure, scenario, baseline and headline of a paper, in
its order. A row's figure is made of stored lines: those of the study that its command runs, or in results/papers.jsonl
what its command of `fedpriv` prints. `run` makes the latter where they are missing, `tables` writes the pages.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from fedpriv.cli import main as cli
from fedpriv.errors import InputError
from fedpriv.runs import environment
from simulations.studies import public_data
from simulations.studies.harness import append, fill, is_asked, lines, parser, software, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
STATUSES = ("ok", "justified", "deviates", "not run", "missing")

_OWN = "papers"
_STUDY = "python -m simulations.studies."

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that a paper reports.

    Attributes:
        name: unique in its paper.
        item: what the paper calls it.
        theirs: its figure.
        command: ours, in a clone; FOLDER stands for the public data. Empty where nothing computes it.
        ours: format of our figure; its fields are those of the lines, by number where `lines` has several.
        lines: (study, pattern of keys); by default those that the command makes. Lines of a pattern are averaged.
        why: it differs.
        status: one of `STATUSES`.
    """

    paper: str
    name: str
    item: str
    theirs: str
    command: str = ""
    ours: str = ""
    lines: Sequence[Sequence[str]] = ()
    why: str = ""
    status: str = "ok"

    @property
    def key(self) -> str:
        """Unique among all rows."""
        return f"{self.paper}/{self.name}"

    @property
    def study(self) -> str:
        """The study that the command runs; empty for a command of `fedpriv`."""
        return self.command.removeprefix(_STUDY).split()[0] if self.command.startswith(_STUDY) else ""

    @property
    def places(self) -> Sequence[Sequence[str]]:
        """(study, pattern) of the lines that the figure is made of."""
        words = shlex.split(self.command)
        asked = [[self.study, words[at + 1]] for at, word in enumerate(words) if word == "--only"]
        return self.lines or (asked if self.study else [[_OWN, self.key]])

    def figure(self, folder: Path = RESULTS) -> str:
        """Ours, from the lines in a folder; `not run` where some are missing."""
        if "{" not in self.ours:
            return self.ours or "not run"
        known = [(_by_key(folder / f"{study}.jsonl"), pattern) for study, pattern in self.places]
        found = [[line for key, line in of.items() if is_asked(key, [pattern])] for of, pattern in known]
        averaged = [_mean(each) for each in found] if all(found) else []
        return self.ours.format(*averaged, **averaged[0]) if averaged else "not run"

    def run(self, data: Path, out: Path) -> None:
        """Run the command, which keeps its lines in a folder.

        Raises:
            InputError: it fails, or there is none.
        """
        if not self.command:
            raise InputError(f"{self.name}: nothing here computes it: {self.why}")
        words = [word.replace("FOLDER", str(data.absolute())) for word in shlex.split(self.command)]
        if self.study:
            kept, option = out.absolute() / f"{self.study}.jsonl", "--lines" if self.study == "dedup" else "--runs"
            words = [sys.executable, *words[1:], "--out", str(kept.with_suffix("")), option, str(kept)]
            if code := subprocess.run(words, cwd=ROOT, check=False).returncode:
                raise InputError(f"{self.name}: the command ended with {code}")
            return
        named = re.findall(r"{(\w+)", self.ours)
        values = _values(tuple(words[1:]), bool(named))
        if named:
            kept_values = {name: value for name, value in values.items() if name in named}
            append(out / f"{_OWN}.jsonl", {"key": self.key, **kept_values, "software": software(environment())})


@cache
def _values(words: tuple[str, ...], as_json: bool) -> dict[str, Any]:
    """The JSON that a command of `fedpriv` prints; without `as_json`, it prints for a reader."""
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed) if as_json else contextlib.nullcontext():
        try:
            cli.main([*words, *(["--json"] if as_json else [])])
        except SystemExit as end:
            if end.code:
                raise InputError(f"fedpriv {shlex.join(words)}: ended with {end.code}") from None
    found: dict[str, Any] = json.loads(printed.getvalue() or "{}")
    return found


@cache
def _by_key(path: Path) -> dict[str, dict[str, Any]]:
    return {str(line.get("key")): line for line in lines(path)}


def _mean(values: Sequence[Any]) -> Any:
    """The numbers of several lines averaged, wherever all have them; all else is the first one's."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values if key in value]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=False)]
    return mean(values) if all(isinstance(value, int | float) for value in values) else first


@cache
def papers() -> dict[str, dict[str, Row]]:
    """{paper: {name: row}}, each in its order."""
    files = sorted((Path(__file__).parent / "papers").glob("*.toml"))
    told = {file.stem: tomllib.loads(file.read_text(encoding="utf-8"))["rows"] for file in files}
    return {paper: {row["name"]: Row(paper=paper, **row) for row in rows} for paper, rows in told.items()}


def write(page: Path, folder: Path = RESULTS, docs: Path = ROOT / "docs" / "papers") -> None:
    """Write the rows of the papers' pages in `docs`, and on a page of results their counts and the public tables."""
    headers = ("their table or figure", "our command", "their figure", "ours", "why it differs")
    for name, rows in papers().items():
        cells = ([each.replace("|", "\\|") for each in _cells(row, folder)] for row in rows.values())
        fill(docs / f"{name}.md", {"rows": table(headers, cells)})
    by_status = [(f"[{name}](../docs/papers/{name}.md)", *counts(rows.values())) for name, rows in papers().items()]
    every = counts(row for rows in papers().values() for row in rows.values())
    counted = table(("paper", "rows", *STATUSES), [*by_status, ("all", *every)])
    fill(page, {"counts": counted, "data": public_data.listed()})


def _cells(row: Row, folder: Path) -> Iterator[str]:
    why = ": ".join(filter(None, (f"*{row.status}*" * (row.status != "ok"), row.why)))
    yield from (row.item, f"`{row.command}`" * bool(row.command), row.theirs, row.figure(folder), why)


def counts(rows: Iterable[Row]) -> list[int]:
    """How many rows there are, and how many have each of `STATUSES`."""
    found = Counter(row.status for row in rows)
    return [found.total(), *(found[status] for status in STATUSES)]


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="[PAPER|data]", help="Without one, all are listed.")] = "",
    row: Annotated[str, typer.Argument(metavar="[ROW|FOLDER]", help="Without one, the paper's are listed.")] = "",
    data: Annotated[Path, typer.Option(help="Folder of the public data.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder for the lines of what is run.")] = Path("reproduced"),
    stored: Annotated[bool, typer.Option("--stored", help="Run nothing: print the figure that is kept.")] = False,
) -> None:
    """Run a row of a paper on this machine, and print the paper's figure and ours.

    `fedpriv reproduce data FOLDER` makes the tables that studies read of the raw public files in a folder, and names
    what is missing.

    Example: fedpriv reproduce integral-privacy table-2-adult-dnn-1 --data data
    """
    if paper == "data":
        print(*public_data.prepare(Path(row or data)), sep="\n")
    elif not paper:
        for name, rows in papers().items():
            total, *each = counts(rows.values())
            told = (f"{number} {status}" for number, status in zip(each, STATUSES, strict=True))
            print(f"{name}: {total} rows: {', '.join(told)}")
    elif not row:
        for one in _known("PAPER", paper, papers()).values():
            print(f"{one.name} ({one.status}): {one.item}\n    theirs: {one.theirs}\n    ours: {one.figure()}")
    else:
        asked: Row = _known("ROW", row, _known("PAPER", paper, papers()))
        print(asked.item, asked.command, sep="\n", flush=True)
        if not stored:
            asked.run(data, out)
        print(f"theirs: {asked.theirs}\nours: {asked.figure(RESULTS if stored else out)}")
        print(": ".join(filter(None, (asked.status, asked.why))))


def _known(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if name in known:
        return known[name]
    raise InputError(f"{what} = {name!r}: must be one of {', '.join(known)}")


def main() -> None:
    """Make the lines of the commands of `fedpriv` that have none, or write the pages."""
    arguments = parser(__doc__, _OWN).parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs.parent)
        return
    known = {line["key"] for line in lines(arguments.runs)}
    for row in (row for rows in papers().values() for row in rows.values()):
        makes_line = "{" in row.ours and [[_OWN, row.key]] == list(row.places)
        if makes_line and row.key not in known and is_asked(row.key, arguments.only):
            print(f"{row.key}: {row.command}", flush=True)
            row.run(arguments.data, arguments.runs.parent)


if __name__ == "__main__":
    main()

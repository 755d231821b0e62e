"""One harness for every study: cells, a line of results for each, estimates with their errors, and Markdown tables.

A cell is a frozen dataclass of plain values. Running it gives a line of results, which is appended to a file of JSON
lines together with the cell and the versions that made it. A cell that has a line is not run again, so an interrupted
study goes on where it ended. Tables are made from lines alone.

>>> print(table(("", "accuracy"), [("head", Estimate.of([0.8, 0.7, 0.75]).text())]))
|  | accuracy |
| --- | --- |
| head | 0.750 ± 0.029 |
"""

from __future__ import annotations

import argparse
import fcntl
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from math import sqrt
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev
from textwrap import wrap
from typing import Any, Protocol, TypeVar

import torch

from fedpriv.errors import InputError
from fedpriv.runs import environment

Line = Mapping[str, Any]
"""The results of one cell."""

_WIDTH = 120

_SOFTWARE = ("fedpriv", "commit", "python", "torch", "flwr", "gpu")


class Cell(Protocol):
    """One unit of a study: a frozen dataclass of plain values."""

    @property
    def key(self) -> str:
        """Unique among the study's cells."""


C = TypeVar("C", bound=Cell)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none if the file is missing."""
    if not path.is_file():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def append(path: Path, line: Line) -> None:
    """Append a line, after removing the fragment of one that an interrupted writer may have left.

    Raises:
        InputError: the file ends in something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # else what another process is writing looks like a fragment
        file.seek(0)
        content = file.read()
        end = content.rfind(b"\n") + 1
        if not b'{"'.startswith(content[end : end + 2]):
            raise InputError(f"{path}: ends in what is no line of a study; name another file")
        file.truncate(end)
        file.write(json.dumps(line).encode() + b"\n")


def run_missing(
    path: Path,
    cells: Iterable[C],
    run: Callable[[C], Line],
    tell: Callable[[Line], str],
    *,
    key: Callable[[Line], str] = itemgetter("key"),
    jobs: int = 1,
    until: float | None = None,
    only: Sequence[str] = (),
) -> None:
    """Run every cell that has no line in the file yet, append its line, and print what there is to tell of it.

    If all have lines, these are told instead.

    Args:
        path: file of the lines.
        cells: in the order in which they are run.
        run: gives a cell's results. The line holds them with `key` and `cell`, and with `seconds` and `software`
            unless they have their own.
        tell: a line in words.
        key: of a line; studies whose older lines hold no `key` derive it.
        jobs: processes, one thread each; `run` is pickled if there are several.
        until: `time.time()` after which no cell is begun, by one process.
        only: patterns of the keys of the cells that count; all by default.
    """
    known = {key(line): line for line in lines(path)}
    asked = [cell for cell in cells if is_asked(cell.key, only)]
    left = [cell for cell in asked if cell.key not in known]
    if asked and not left:
        told = (f"{cell.key}: {tell(known[cell.key])}" for cell in asked)
        print(f"{path}: has a line for each of the cells, {len(asked)}; none is run again", *told, sep="\n", flush=True)
    begun = left if until is None else takewhile(lambda _: time.time() <= until, left)
    for number, line in enumerate(in_processes(partial(_line, run), begun, jobs), start=1):
        append(path, line)
        print(f"{number} of {len(left)}, {line['key']}: {tell(line)}, {line['seconds']:.0f} s", flush=True)


def is_asked(key: str, only: Sequence[str]) -> bool:
    """Whether a cell's key has one of the patterns; if there are none, every key has."""
    return not only or any(fnmatchcase(key, pattern) for pattern in only)


def _line(run: Callable[[C], Line], cell: C) -> Line:
    began = time.perf_counter()
    results = run(cell)
    values = asdict(cell)  # type: ignore[call-overload]
    seconds = time.perf_counter() - began
    return {"key": cell.key, "cell": values, "seconds": seconds, "software": software(environment()), **results}


def software(known: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment that lines keep: the versions and the GPU that made them."""
    return {name: value for name, value in known.items() if name in _SOFTWARE}


def in_processes(function: Callable[[_Item], _Result], items: Iterable[_Item], jobs: int) -> Iterator[_Result]:
    """The results as they come, from at most so many processes of one thread; with one, from this one, in order."""
    if jobs == 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(function, item) for item in items]):
            yield future.result()


@dataclass(frozen=True)
class Estimate:
    """The mean over runs, and its standard error; None for a single run."""

    mean: float
    standard_error: float | None
    num_runs: int

    @staticmethod
    def of(values: Iterable[float]) -> Estimate | None:
        """The mean and its error of one value for each run; None if there are none."""
        known = list(values)
        if not known:
            return None
        error = stdev(known) / sqrt(len(known)) if len(known) > 1 else None
        return Estimate(mean(known), error, len(known))

    def text(self, *, sign: bool = False, digits: int = 3, usual: int = 3) -> str:
        """For a table; a single seed is marked as such, and so is any number of runs but the usual one."""
        value = f"{self.mean:{'+' * sign}.{digits}f}"
        if self.standard_error is None:
            return f"{value} (one seed)"
        others = f" ({self.num_runs} runs)" if self.num_runs != usual else ""
        return f"{value} ± {self.standard_error:.{digits}f}{others}"


def difference(ones: Mapping[int, float], others: Mapping[int, float]) -> Estimate | None:
    """One less the other, seed by seed: both have the same records, split and test set."""
    return Estimate.of(ones[seed] - others[seed] for seed in sorted(ones.keys() & others.keys()))


class Results:
    """The lines of all cells that were run, by key."""

    def __init__(self, found: Iterable[Line]) -> None:
        self._lines = {line["key"]: line for line in found}

    @staticmethod
    def read(path: Path) -> Results:
        """From a file of lines."""
        return Results(lines(path))

    def __contains__(self, cell: Cell) -> bool:
        return cell.key in self._lines

    def by_seed(self, cell: Cell, seeds: Iterable[int] = range(100), *, figure: str = "accuracy") -> dict[int, Any]:
        """{seed: the figure, mostly a number} of the seeds with which the cell was run.

        Args:
            cell: has a field `seed`.
            seeds: those that count.
            figure: a key of the lines.
        """
        keys = {seed: replace(cell, seed=seed).key for seed in seeds}  # type: ignore[type-var]
        return {seed: self._lines[key][figure] for seed, key in keys.items() if key in self._lines}

    def missing(self, planned: Iterable[C], kind: Callable[[C], Sequence[str]]) -> str:
        """A sentence on the kinds of planned cells of which some have no line, and how many of each."""
        cells = [(", ".join(kind(cell)), cell in self) for cell in planned]
        counts, done = Counter(kind for kind, _ in cells), Counter(kind for kind, is_done in cells if is_done)
        left = [f"{kind}, {num - done[kind]} of {num}" for kind, num in counts.items() if done[kind] < num]
        return f"Not run: {'; '.join(left)}." if left else "Every cell was run."


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; each row has one cell for each header. Without rows it says that nothing was run."""
    body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(headers)} |", "|" + " --- |" * len(headers), *body]) if body else "Not run."


def shown(found: Estimate | None, *, sign: bool = False, usual: int = 3) -> str:
    """An estimate as a table's cell; `not run` for none."""
    return found.text(sign=sign, usual=usual) if found else "not run"


def bare(found: Estimate | None, *, usual: int = 3) -> str:
    """An estimate as a table's cell without its error, which `errors` bounds; empty for none, marked if of few runs."""
    if found is None:
        return ""
    few = "" if found.num_runs >= usual else f" ({found.num_runs} runs)" if found.num_runs > 1 else " (one seed)"
    return f"{found.mean:.3f}{few}"


def errors(found: Iterable[Estimate | None]) -> str:
    """A sentence that bounds the standard errors of a table's bare estimates."""
    known = [each.standard_error for each in found if each and each.standard_error is not None]
    return f"Standard errors are at most {max(known):.3f}." if known else "No standard error is known."


def with_target(found: Estimate | None, target: str, met: Callable[[Estimate], bool], *, sign: bool = True) -> str:
    """An estimate as a table's cell, with its target in brackets, which `**not**` precedes where it is missed."""
    return "not run" if found is None else f"{found.text(sign=sign)} ({'' if met(found) else '**not** '}{target})"


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Rewrite what stands between the markers `<!-- NAME:begin -->` and `<!-- NAME:end -->` of a page.

    All else is the author's. A page that is missing is made of the blocks alone. Long lines of text are broken.

    Args:
        page: the Markdown file.
        blocks: {NAME: Markdown}.

    Raises:
        InputError: the page has not each marker once, in order; then it stays as it is.
    """
    markers = {name: (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in blocks}
    text = page.read_text() if page.is_file() else "\n".join(f"{begin}\n{end}\n" for begin, end in markers.values())
    for name, (begin, end) in markers.items():
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise InputError(f"{page}: must hold {begin} and after it {end}, each once")
        before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
        text = f"{before}\n\n{_wrapped(blocks[name].strip())}\n\n{after}"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)


def _wrapped(block: str) -> str:
    """The block with its text in lines of a page's width; tables, links and code stay as they are."""
    found, in_code = list[str](), False
    for line in block.splitlines():
        in_code ^= line.startswith("```")
        if in_code or line.startswith(("|", "```")) or "](" in line:
            found.append(line)
            continue
        indent = "  " if line.startswith("- ") else ""
        broken = wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        found += broken or [""]
    return "\n".join(found)


def parser(text: str | None, study: str = "") -> argparse.ArgumentParser:
    """The parser of a study's command line, whose help is the study's own text.

    Args:
        text: of the study's module.
        study: the name of one that runs cells of federations and writes tables from their lines, for which the steps
            and the places of its files are added; empty for any other.
    """
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if study:
        made.add_argument("step", choices=("run", "tables"))
        made.add_argument("--data", type=Path, default=Path("data"), help="folder of the public files")
        made.add_argument("--runs", type=Path, default=Path(f"results/{study}.jsonl"), help="a line for each cell")
        made.add_argument("--out", type=Path, default=Path(f"results/studies/{study}"), help="records and features")
        made.add_argument("--page", type=Path, default=Path(f"results/{study}.md"))
        made.add_argument("--only", action="append", default=[], help="pattern of the keys of cells; may be repeated")
        made.add_argument("--minutes", dest="until", type=_deadline, help="begin no cell after so long")
    return made


def _deadline(minutes: str) -> float:
    """The time after so many minutes from now, in seconds since the epoch."""
    return time.time() + 60 * float(minutes)


def listed(separator: str) -> Callable[[str], list[str]]:
    """A type of argument: values with a separator between them."""
    return lambda given: given.split(separator)

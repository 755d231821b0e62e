"""A sweep as its folder shows it: the state and the figures of each run, and what all of them spent.

`watch` shows a run or a sweep in the terminal, read again and again from its folder until it has ended.
"""

import io
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedpriv.errors import InputError
from fedpriv.runs import RunFolder, RunStatus, figures, files, is_alive, status_of
from fedpriv.runs.show._tables import TextTable
from fedpriv.runs.show._terminal import page_line, plain_table, show_status
from fedpriv.runs.show._tracker import run_name
from fedpriv.texts import printable

STATES = ("running", "waiting", "finished", "failed", "interrupted", "unknown")
"""The states of a sweep's runs, those that go on first."""

_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """A run of a sweep, by the name of its folder; `waiting`, `failed` or in one of `RunStatus.state`."""

    key: str
    varied: Mapping[str, Any]
    state: str
    status: RunStatus | None
    perplexity: float | None


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The most that any record has spent, over all runs and earlier attempts, on the `local` view.

    Attributes:
        composed: whether the sweep's own table has composed the events; else the runs' figures are added.
    """

    epsilon: float
    delta: float
    num_runs: int
    composed: bool


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """A sweep."""

    title: str
    runs: tuple[SweepRun, ...]
    spending: Spending


def is_sweep(folder: Path) -> bool:
    """Whether the folder is that of a sweep."""
    return (folder / files.SWEEP_PLAN).is_file()


def read_sweep(folder: Path, *, now: float) -> SweepStatus:
    """The sweep in a folder, whose runs may be writing to it, at seconds since the epoch; InputError for a bad plan."""
    title, planned = _planned(folder)
    runs = tuple(_run(folder, key, varied, now) for key, varied in planned.items())
    earlier = (_status(RunFolder(path, now=now)) for path in sorted((folder / files.UNFINISHED).glob("*")))
    spending = _composed(folder) or _added([*(run.status for run in runs), *earlier])
    return SweepStatus(title=title, runs=runs, spending=spending)


def sweep_table(sweep: SweepStatus) -> TextTable:
    """A row for each run: its state, and its figures so far."""
    has_perplexity = any(run.perplexity is not None for run in sweep.runs)
    return TextTable(
        caption="ε on the local view at the row's δ: by rdp while a run goes on, final once it is finished",
        headers=(
            *("run", "state", "rounds", "accuracy"),
            *(["perplexity"] if has_perplexity else []),
            *("ε local", "δ", "time"),
        ),
        rows=tuple(_cells(run, has_perplexity=has_perplexity) for run in sweep.runs),
    )


def _cells(run: SweepRun, *, has_perplexity: bool) -> tuple[str, ...]:
    name, status = printable(run_name(run.varied)), run.status
    if status is None:
        return (name, run.state, *[""] * (6 if has_perplexity else 5))
    planned = "" if status.num_rounds_planned is None else f" of {status.num_rounds_planned}"
    return (
        *(name, run.state, f"{status.num_rounds}{planned}", figures.format_percent(status.test_accuracy)),
        *([figures.format_number(run.perplexity)] if has_perplexity else []),
        figures.MISSING if status.epsilon_local_max is None else figures.format_bound(status.epsilon_local_max),
        *(figures.format_delta(status.delta_max), figures.format_seconds(status.seconds)),
    )


def _planned(folder: Path) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Title and {key: what varies}."""
    values = files.read_values(folder / files.SWEEP_PLAN)
    try:
        runs: dict[str, Mapping[str, Any]] = {str(run["key"]): dict(run["varied"]) for run in values["runs"]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / files.SWEEP_PLAN}: what it says about its runs is damaged ({error!r})") from None
    # A key names a folder, and must name one in this one.
    if wrong := next((key for key in runs if not files.SWEEP_KEY.fullmatch(key)), None):
        raise InputError(
            f"{folder / files.SWEEP_PLAN}: key = {wrong!r}: must be the name of a run, such as rank-4-1a2b3c4d"
        )
    return str(values.get("title", folder.name)), runs


def _run(folder: Path, key: str, varied: Mapping[str, Any], now: float) -> SweepRun:
    look = RunFolder(folder / key, now=now)
    status = _status(look)
    if status is None:
        return SweepRun(key=key, varied=varied, state="waiting", status=None, perplexity=None)
    failed = status.state == "interrupted" and (folder / f"{key}.txt").exists()
    state = "failed" if failed else status.state
    return SweepRun(key=key, varied=varied, state=state, status=status, perplexity=_perplexity(look))


def _status(look: RunFolder) -> RunStatus | None:
    """None if the run does not exist yet, has just begun or was just moved away."""
    try:
        return status_of(look)
    except (InputError, OSError):
        return None


def _perplexity(look: RunFolder) -> float | None:
    try:
        rows = look.round_rows(("test_perplexity",))
    except (InputError, OSError):
        return None
    return next((row["test_perplexity"] for row in reversed(rows) if row.get("test_perplexity") is not None), None)


def _composed(folder: Path) -> Spending | None:
    """The sum in the sweep's table; None if there is none, or a run has written something since."""
    table = folder / files.SWEEP_TABLE
    try:
        written = table.stat().st_mtime
        if any(path.stat().st_mtime > written for path in folder.glob(f"*/{files.ROUNDS}")):
            return None
        row = pd.read_csv(table, nrows=1).iloc[0]
        epsilon = float(row["epsilon_sum"])
        return Spending(
            epsilon=math.inf if math.isnan(epsilon) else epsilon,
            delta=float(row["delta_sum"]),
            num_runs=int(row["num_runs_in_sum"]),
            composed=True,
        )
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _added(statuses: Sequence[RunStatus | None]) -> Spending:
    """Basic composition: the largest epsilons and deltas of all runs, each added up."""
    begun = [status for status in statuses if status is not None and status.num_rounds]
    largest = (math.inf if status.epsilon_local_max is None else status.epsilon_local_max for status in begun)
    return Spending(
        epsilon=sum(largest),
        delta=min(1.0, sum(status.delta_max or 0.0 for status in begun)),
        num_runs=len(begun),
        composed=False,
    )


def watch(path: Path, console: Console) -> dict[str, Any]:
    """Show a run or a sweep until it has ended or Ctrl-C; the last look stays on the screen, and is returned.

    Args:
        path: of its folder, which may not be there yet.
        console: where to; one on which nothing can be rewritten gets the last look alone.

    Raises:
        InputError: the folder is neither there nor within one, or what has ended in it is damaged.
    """
    if not path.is_dir() and not path.absolute().parent.is_dir():
        raise InputError(f"folder = {str(path)!r}: must be the folder of a run or a sweep, or be in a folder")
    values: dict[str, Any] = {}
    text, has_ended = "", False
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not has_ended:
                text, values, has_ended = _look(path, console)
                live.update(Text.from_ansi(text), refresh=True)
                if not has_ended:
                    time.sleep(_PAUSE_SECONDS)
    except KeyboardInterrupt:
        pass
    console.print(Text.from_ansi(text), soft_wrap=True)
    return values


def _look(path: Path, console: Console) -> tuple[str, dict[str, Any], bool]:
    """The folder as the console would show it now, its values, and whether what is in it has ended."""
    paper = Console(
        file=io.StringIO(),
        force_terminal=console.is_terminal,
        color_system="standard" if console.is_terminal else None,
        width=console.width,
        highlight=False,
    )
    values, has_ended = dict[str, Any](), False
    try:
        if (path / files.CONFIG).is_file():
            folder = RunFolder(path)
            show_status(folder, paper)
            values = status_of(folder).as_dict()
            has_ended = values["state"] in ("finished", "interrupted")
        elif is_sweep(path):
            values, has_ended = _show_sweep(path, paper)
        else:
            paper.print(f"no run has begun in {path}", markup=False, soft_wrap=True)
    except (InputError, OSError) as error:
        if files.is_finished(path) or is_alive(path) is False:
            raise
        # A run may just be writing what this look found; the next one may see it whole.
        paper.print(f"cannot be read now: {error}", markup=False, soft_wrap=True)
    assert isinstance(paper.file, io.StringIO)
    return paper.file.getvalue().rstrip("\n"), values, has_ended


def _show_sweep(path: Path, console: Console) -> tuple[dict[str, Any], bool]:
    """Print a sweep; returns its values, and whether it has ended."""
    sweep, alive = read_sweep(path, now=time.time()), is_alive(path)
    spent = sweep.spending
    console.print(plain_table(sweep_table(sweep)))
    how = "composed" if spent.composed else "added up, never too small"
    epsilon = figures.format_epsilon(spent.epsilon, spent.delta)
    console.print(f"\nall {spent.num_runs} runs together: {epsilon}, local view, {how}", soft_wrap=True)
    console.print(page_line(path), soft_wrap=True, markup=False)
    is_done = all(run.state in ("finished", "failed") for run in sweep.runs)
    return asdict(sweep), alive is False or (alive is None and is_done)

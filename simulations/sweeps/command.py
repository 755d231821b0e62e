"""A sweep from its plan to its tables and plots, and the live table of its runs in the terminal."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from fedpriv.errors import InputError
from fedpriv.models.variants import stored_in
from fedpriv.runs import RoundRow, files, marked_alive, read_rows
from fedpriv.runs.figures import format_bound
from fedpriv.runs.files import write_json
from fedpriv.runs.plan import preflight
from fedpriv.runs.show import TRACKERS, SweepTeller, run_name, tracked
from simulations.sweeps.plan import Metric, PlannedRun, Sweep, metric_of

if TYPE_CHECKING:
    import pandas as pd

    from simulations.sweeps.result import FinishedSweep


def sweep(planned: Sweep, out: Path, *, max_parallel: int | None, console: Console) -> FinishedSweep:
    """Run the sweep, write its tables, and return them.

    When interrupted, it still writes the tables of the finished runs.

    Raises:
        InputError: an option or the machine cannot be used, or another process runs the sweep or a run of it; before
            anything is run.
    """
    at_once = max_parallel if max_parallel is not None else min(os.cpu_count() or 1, len(planned.chosen))
    if at_once < 1:
        raise InputError(f"max_parallel = {at_once}: must be >= 1")
    if at_once > 1 and any(run.config.engine == "ray" for run in planned.chosen):
        raise InputError("engine = ray: each run takes all cores; use --max-parallel 1, or another engine")
    for problem in preflight.problems(run.config for run in planned.chosen if not files.is_finished(out / run.key)):
        raise InputError(problem)
    out.mkdir(parents=True, exist_ok=True)
    with marked_alive(out):
        return _swept(planned, out, at_once, console)


def _swept(planned: Sweep, out: Path, at_once: int, console: Console) -> FinishedSweep:
    """Run the sweep in a folder that this process holds."""
    # Deferred until everything that can be told without them is told: they take seconds.
    from fedpriv.runs.show import PageWriter, sweep_page
    from simulations.engines import flower_private
    from simulations.sweeps.runner import run_all

    flower_private.leave_output_to_display()
    write_json(out / files.SWEEP_PLAN, planned.as_dict())
    errors, notices = dict[str, str](), list[str]()  # notices follow the table, which is redrawn until then
    page = PageWriter(out, sweep_page, max(run.config.round_seconds for run in planned.runs))
    try:
        with tracked(planned.track, out, partial(_teller, planned, out), notices.append) as follow:
            try:
                with _SweepDisplay(console, planned, out) as display:

                    def tell(states: Mapping[str, str]) -> None:
                        for look in (partial(display.update, states), page.update, follow):
                            look()

                    errors = run_all(planned, out, at_once=at_once, on_change=tell, on_progress=display.progressed)
            finally:
                finished = _written(planned, out, errors)
                page.end()
                _show(finished, planned, console)
    finally:
        for text in notices:
            console.print(f"[bold yellow]note[/] {escape(text)}", highlight=False, soft_wrap=True)
    return finished


def _teller(planned: Sweep, out: Path) -> SweepTeller:
    """Tells the sweep's tracker of it."""
    names = {run.key: run_name(run.varied) for run in planned.runs}
    tracker, keys = TRACKERS[planned.track], list(planned.keys)
    return SweepTeller(tracker, planned.track, out, title=planned.title, keys=keys, names=names, stored_in=stored_in)


def _written(planned: Sweep, out: Path, errors: dict[str, str]) -> FinishedSweep:
    """Write tables and plots."""
    from simulations.sweeps import plots, result  # deferred, as above
    from simulations.sweeps.runner import attempts

    spent = result.total(attempts(planned, out))
    frame = result.tidy(planned, out, errors, spent)
    pivoted = result.pivot(frame, planned)
    result.write_tables(frame, pivoted, out)
    drawn = tuple(plots.write(frame, planned, out))
    return result.FinishedSweep(
        folder=out,
        title=planned.title,
        plots=drawn,
        spending=spent,
        errors=errors,
        is_finished=all(files.is_finished(out / run.key) for run in planned.chosen),
        _table=frame,
        _pivot=pivoted,
        _figures=partial(plots.figures_of, frame, planned),
    )


def _show(finished: FinishedSweep, planned: Sweep, console: Console) -> None:
    """The closing lines."""
    from simulations.display import from_here  # deferred, as above

    if (pivoted := finished.pivot) is not None:
        console.print(_pivot_table(pivoted, metric_of(planned)))
    for key, error in finished.errors.items():
        console.print(f"[bold red]failed[/] {key}: {escape(error)}", soft_wrap=True, highlight=False)
    spent = finished.spending
    console.print(
        f"all {spent.num_runs} runs together: epsilon {spent.epsilon:.4g} at delta {spent.delta:.3g}, local view; "
        "this, not a run's own epsilon, covers choosing the best of them",
        soft_wrap=True,
    )
    for what, path in (
        ("results", finished.folder / files.SWEEP_TABLE),
        *(("plot", path) for path in finished.plots),
        ("report", finished.folder / files.REPORT),
    ):
        console.print(f"{what:<8} {from_here(path)}", soft_wrap=True, markup=False)


_STYLES = {"waiting": "dim", "running": "bold", "done": "green", "failed": "bold red", "left out": "dim"}

# A pipe gets a line of the run under way no more often.
_PIPE_SECONDS = 8.0


class _SweepDisplay:
    """Follows a sweep; a context manager. Without a terminal it prints a line where a run begins, goes on or ends.

    Args:
        console: where to.
        sweep: the plan.
        out: the sweep's folder; the runs' tables in it show their progress.
    """

    def __init__(self, console: Console, sweep: Sweep, out: Path) -> None:
        self._console, self._sweep, self._out = console, sweep, out
        self._states: dict[str, str] = {}
        self._started = self._printed = time.monotonic()
        self._now = ""
        self._live = Live(console=console, refresh_per_second=1, get_renderable=self._table)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.refresh()
            self._live.stop()

    def update(self, states: Mapping[str, str]) -> None:
        """Show the runs' states."""
        before, self._states, self._now = self._states, dict(states), ""
        if self._console.is_terminal:
            self._live.refresh()
            return
        for run in self._sweep.runs:
            state = states[run.key]
            if state in ("running", "done", "failed") and before.get(run.key) != state:
                self._print(run, "was finished before" if not before else state)
            elif state == "running" and time.monotonic() - self._printed >= _PIPE_SECONDS:
                self._print(run, _so_far(self._out / run.key, run.config.rounds))

    def progressed(self, run: PlannedRun, what: str) -> None:
        """Show what the run under way does just now."""
        self._now = f"{run_name(run.varied)}: {what}"
        if not self._console.is_terminal and time.monotonic() - self._printed >= _PIPE_SECONDS:
            self._print(run, f"{_so_far(self._out / run.key, run.config.rounds)}, {what}")

    def _print(self, run: PlannedRun, what: str) -> None:
        self._printed = time.monotonic()
        place = f"run {self._sweep.runs.index(run) + 1}/{len(self._sweep.runs)}"
        self._console.print(f"{place} {run_name(run.varied)}: {what}", soft_wrap=True, markup=False, highlight=False)

    def _table(self) -> RenderableType:
        numbers = {state: list(self._states.values()).count(state) for state in _STYLES}
        counts = [f"{number} {state}" for state, number in numbers.items() if number or state != "left out"]
        elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._started))
        title = f"{self._sweep.title}: {', '.join(counts)}, {elapsed}"
        table = Table(title=escape(title), caption=escape(self._now), box=box.SIMPLE_HEAD, pad_edge=False)
        for header in ("run", "state", "round", "accuracy", "ε local"):
            table.add_column(header, justify="left" if header in ("run", "state") else "right", no_wrap=True)
        for run in self._visible():
            state = self._states.get(run.key, "waiting")
            round_, accuracy, epsilon = _progress(self._out / run.key)
            table.add_row(
                escape(run_name(run.varied)),
                f"[{_STYLES[state]}]{state}[/]",
                f"{round_}/{run.config.rounds}",
                accuracy,
                epsilon,
            )
        return table

    def _visible(self) -> list[PlannedRun]:
        """The first runs, as many as the terminal has lines for, running ones first."""
        num_lines = max(3, self._console.height - 7)
        order = {"running": 0, "failed": 1, "waiting": 2, "done": 3, "left out": 4}
        if len(self._sweep.runs) <= num_lines:
            return list(self._sweep.runs)
        return sorted(self._sweep.runs, key=lambda run: order[self._states.get(run.key, "waiting")])[:num_lines]


def _pivot_table(pivoted: pd.DataFrame, metric: Metric) -> Table:
    """The pivot's means with their spread over seeds."""
    table = Table(title=f"{metric.label}, mean ± standard deviation over seeds", box=box.SIMPLE_HEAD, pad_edge=False)
    two_keys = pivoted.columns.nlevels > 1
    columns = list(dict.fromkeys(pivoted.columns.get_level_values(1))) if two_keys else [None]
    table.add_column(escape(str(pivoted.index.name)))
    for column in columns:
        header = f"{pivoted.columns.names[1]} = {column}" if two_keys else metric.name
        table.add_column(escape(header), justify="right")
    # The pivot's columns are all means, then all standard deviations, then all counts.
    values = pivoted.to_numpy(dtype=float).reshape(len(pivoted), 3, len(columns))
    for index, row in zip(pivoted.index, values, strict=True):
        table.add_row(escape(str(index)), *(_cell(mean, std, count) for mean, std, count in row.T))
    return table


def _cell(mean: float, std: float, count: float) -> str:
    if math.isnan(mean):
        return ""
    return f"{mean:.4f}" if count == 1 else f"{mean:.4f} ± {std:.4f} ({count:g})"


def _progress(folder: Path) -> tuple[int, str, str]:
    """A run's last written round, with accuracy and epsilon; of a finished run, the final epsilon."""
    if files.is_finished(folder):
        summary = files.read_values(folder / files.SUMMARY)
        return summary["num_rounds"], _accuracy(summary["accuracy"]), format_bound(summary["epsilon_local_max"])
    try:
        rounds = read_rows(folder / files.ROUNDS, RoundRow, ("round", "test_accuracy", "epsilon_local_max"))
    except FileNotFoundError:  # not begun
        return 0, "", ""
    if not rounds:
        return 0, "", ""
    last = rounds[-1]
    return last["round"], _accuracy(last["test_accuracy"]), format_bound(last["epsilon_local_max"])


def _so_far(folder: Path, num_rounds: int) -> str:
    """A run's progress in a line: its last round, with accuracy and epsilon as far as they are known."""
    round_, accuracy, epsilon = _progress(folder)
    figures = [f"accuracy {accuracy}" if accuracy else "", f"ε ≤ {epsilon}" if round_ and epsilon else ""]
    return ", ".join(filter(None, (f"round {round_} of {num_rounds}", *figures)))


def _accuracy(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.4f}"

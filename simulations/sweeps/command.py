"""A sweep from its plan to its tables and plots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedpriv.errors import InputError
from fedpriv.plan import preflight
from fedpriv.runs import files
from fedpriv.runs.files import write_json
from fedpriv.runs.sweeps import PLAN
from fedpriv.tracking.following import following
from fedpriv.tracking.logged import run_name
from fedpriv.tracking.process import Job
from simulations.paths import from_here
from simulations.sweeps.metrics import metric_of
from simulations.sweeps.plan import Sweep
from simulations.sweeps.spending import total

if TYPE_CHECKING:
    from simulations.sweeps.result import FinishedSweep


def sweep(planned: Sweep, out: Path, *, max_parallel: int | None, console: Console) -> FinishedSweep:
    """Run the sweep, write its tables, and return them.

    When interrupted, it still writes the tables of the finished runs.

    Raises:
        InputError: an option or the machine cannot be used; before anything is run.
    """
    at_once = max_parallel if max_parallel is not None else min(os.cpu_count() or 1, len(planned.runs))
    if at_once < 1:
        raise InputError(f"max_parallel = {at_once}: must be >= 1")
    if at_once > 1 and any(run.config.engine == "ray" for run in planned.runs):
        raise InputError("engine = ray: each run takes all cores; use --max-parallel 1, or another engine")
    for problem in preflight.problems(run.config for run in planned.runs if not files.is_finished(out / run.key)):
        raise InputError(problem)
    # Deferred until everything that can be told without them is told: they take seconds.
    from simulations.engines import logs
    from simulations.sweeps.display import SweepDisplay
    from simulations.sweeps.runner import run_all

    logs.leave_output_to_display()
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / PLAN, planned.as_dict())
    errors: dict[str, str] = {}
    notices: list[str] = []  # shown after the table, which is redrawn until then
    try:
        with following(_job(planned, out), notices.append):
            try:
                with SweepDisplay(console, planned, out) as display:
                    errors = run_all(planned, out, at_once=at_once, on_change=display.update)
            finally:
                finished = _written(planned, out, errors)
                _show(finished, planned, console)
    finally:
        for text in notices:
            console.print(f"[bold yellow]note[/] {escape(text)}", highlight=False, soft_wrap=True)
    return finished


def _job(planned: Sweep, out: Path) -> Job | None:
    """What a tracker is told of the sweep; None without one."""
    if planned.track == "none":
        return None
    names = {run.key: run_name(run.varied) for run in planned.runs}
    return Job(tracker=planned.track, folder=str(out), title=planned.title, keys=list(planned.keys), names=names)


def _written(planned: Sweep, out: Path, errors: dict[str, str]) -> FinishedSweep:
    """Write tables and plots."""
    from simulations.sweeps import plots, table  # deferred, as above
    from simulations.sweeps.result import FinishedSweep
    from simulations.sweeps.runner import attempts

    spent = total(attempts(planned, out))
    frame = table.tidy(planned, out, errors, spent)
    pivoted = table.pivot(frame, planned)
    table.write(frame, pivoted, out)
    drawn = tuple(plots.write(frame, planned, out))
    return FinishedSweep(
        folder=out, title=planned.title, plots=drawn, spending=spent, errors=errors, _table=frame, _pivot=pivoted
    )


def _show(finished: FinishedSweep, planned: Sweep, console: Console) -> None:
    """The closing lines."""
    from simulations.sweeps.display import pivot_table  # deferred, as above

    if (pivoted := finished.pivot) is not None:
        console.print(pivot_table(pivoted, metric_of(planned)))
    for key, error in finished.errors.items():
        console.print(f"[bold red]failed[/] {key}: {escape(error)}", soft_wrap=True, highlight=False)
    spent = finished.spending
    console.print(
        f"all {spent.num_runs} runs together: epsilon {spent.epsilon:.4g} at delta {spent.delta:.3g}, local view; "
        "this, not a run's own epsilon, covers choosing the best of them",
        soft_wrap=True,
    )
    drawn = (f"\nplot     {from_here(path)}" for path in finished.plots)
    console.print(f"results  {from_here(finished.folder)}/sweep.csv", *drawn, soft_wrap=True, sep="", markup=False)

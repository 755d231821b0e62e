"""A sweep from its file to its tables and plots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpriv.errors import InputError
from fedpriv.runs.sweeps import PLAN
from fedpriv.runs.writer import write_json
from simulations.sweeps import table
from simulations.sweeps.display import SweepDisplay, pivot_table
from simulations.sweeps.metrics import metric_of
from simulations.sweeps.plan import Sweep, read
from simulations.sweeps.runner import attempts, run_all
from simulations.sweeps.spending import total


def sweep(path: Path, out: Path, *, overrides: Mapping[str, Any], max_parallel: int | None, console: Console) -> bool:
    """Run the file's sweep, write its tables, and return whether all runs are finished.

    When interrupted, it still writes the tables of the finished runs.

    Raises:
        InputError: the file, an option or the machine cannot be used; before anything is run.
    """
    planned = read(path, overrides)
    at_once = max_parallel if max_parallel is not None else min(os.cpu_count() or 1, len(planned.runs))
    if at_once < 1:
        raise InputError(f"max_parallel = {at_once}: must be >= 1")
    if at_once > 1 and any(run.config.engine == "ray" for run in planned.runs):
        raise InputError("engine = ray: each run takes all cores; use --max-parallel 1, or another engine")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / PLAN, planned.as_dict())
    errors: dict[str, str] = {}
    try:
        with SweepDisplay(console, planned, out) as display:
            errors = run_all(planned, out, at_once=at_once, on_change=display.update)
    finally:
        finished = _write(planned, out, errors, console)
    return finished == len(planned.runs)


def _write(planned: Sweep, out: Path, errors: dict[str, str], console: Console) -> int:
    """Write tables and plots, and return how many runs are finished."""
    spent = total(attempts(planned, out))
    frame = table.tidy(planned, out, errors, spent)
    pivoted = table.pivot(frame, planned)
    table.write(frame, pivoted, out)
    from simulations.sweeps import plots  # deferred: matplotlib is needed at the end alone

    drawn = plots.write(frame, planned, out)
    if pivoted is not None:
        console.print(pivot_table(pivoted, metric_of(planned)))
    for key, error in errors.items():
        console.print(f"[bold red]failed[/] {key}: {error}", soft_wrap=True, highlight=False)
    console.print(
        f"all {spent.num_runs} runs together: epsilon {spent.epsilon:.4g} at delta {spent.delta:.3g}, local view; "
        "this, not a run's own epsilon, covers choosing the best of them",
        soft_wrap=True,
    )
    console.print(f"results  {out}/sweep.csv", *(f"\nplot     {path}" for path in drawn), soft_wrap=True, sep="")
    return int((frame["status"] == "done").sum())

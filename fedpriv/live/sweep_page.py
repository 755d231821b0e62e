"""The pieces of a sweep's page, from its folder alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedpriv.live.templating import rendered
from fedpriv.runs.show import tables
from fedpriv.runs.sweeps import SweepRun, read_sweep

# Of the pieces, in the order of the page.
_SWEEP_PIECES = ("head", "spending", "runs")

_STATES = ("running", "waiting", "finished", "failed", "interrupted", "unknown")


def sweep_pieces(folder: Path, *, now: float) -> dict[str, str]:
    """{name: HTML} of the pieces of a sweep's page; all text from the folder is escaped.

    Args:
        folder: of a sweep, whose runs may be writing to it.
        now: seconds since the epoch.

    Raises:
        InputError: the sweep's plan is damaged.
    """
    sweep = read_sweep(folder, now=now)
    counts = Counter(run.state for run in sweep.runs)
    return rendered(
        "sweep.html.j2",
        _SWEEP_PIECES,
        sweep=sweep,
        counts=", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state]),
        num_done=counts["finished"] + counts["failed"],
        all_runs=[(name_of(run), run) for run in sweep.runs],
        has_perplexity=any(run.perplexity is not None for run in sweep.runs),
        spent=tables.format_epsilon(sweep.spending.epsilon, sweep.spending.delta),
        bound=tables.format_bound,
        delta=tables.format_delta,
    )


def name_of(run: SweepRun) -> str:
    """What sets a run apart from the others."""
    return ", ".join(f"{key} {value}" for key, value in run.varied.items() if value is not None) or run.key

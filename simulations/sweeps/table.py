"""A sweep as tables: one tidy row per run, and a pivot of its metric's mean over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pandas as pd

from fedpriv.runs import files
from fedpriv.runs.folder import LANGUAGE_KEYS
from simulations.sweeps.metrics import metric_of
from simulations.sweeps.plan import Sweep
from simulations.sweeps.spending import Total

# Keys that decide how private a run is; the finished run's epsilon stands for them.
PRIVACY_KEYS = ("target_epsilon", "noise_multiplier", "budget_epsilon")

# Of them, a run that was not tested has chance alone.
_ACCURACIES = ("accuracy", "accuracy_initial", "accuracy_non_private", "chance_accuracy")
# What older runs of a sweep that is continued do not have.
_QUALITY = (
    *("accuracy_standard_error", "macro_f1", "majority_accuracy", "probe_accuracy", "tfidf_accuracy"),
    *LANGUAGE_KEYS,
)
_FIGURES = (
    *_ACCURACIES,
    *("epsilon_local_max", "epsilon_rho_max", "delta_max", "noise_source", "private", "num_clients", "num_rounds"),
    *("bytes_up", "bytes_down", "seconds"),
)


def tidy(sweep: Sweep, out: Path, errors: Mapping[str, str], spent: Total) -> pd.DataFrame:
    """One row per run: the varied keys, how it ended, its figures, and what the whole sweep spent.

    Args:
        sweep: the plan.
        out: the sweep's folder.
        errors: {run's key: why it failed}.
        spent: the cost of all runs together, the same in every row.
    """
    rows = []
    for run in sweep.runs:
        folder = out / run.key
        row: dict[str, Any] = dict(run.varied)
        if files.is_finished(folder):
            summary = files.read_values(folder / files.SUMMARY)
            resolved = files.read_values(folder / files.CONFIG)
            row |= {"status": "done", **{name: summary[name] for name in _FIGURES}}
            row |= {name: summary.get(name) for name in _QUALITY} | {"num_warnings": len(summary.get("warnings", ()))}
            row |= {"noise_multiplier": resolved["noise_multiplier"], "batch_size": resolved["batch_size"]}
        else:
            row["status"] = "failed" if run.key in errors else "not run"
        row |= {"epsilon_sum": spent.epsilon, "delta_sum": spent.delta, "num_runs_in_sum": spent.num_runs}
        row |= {"folder": run.key, "error": errors.get(run.key, "")}
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.astype({name: float for name in (*_ACCURACIES, *_QUALITY) if name in frame})


def settings(frame: pd.DataFrame, sweep: Sweep) -> tuple[pd.DataFrame, list[str]]:
    """The table with the keys in which runs differ, other than the seed; several keys of privacy become one.

    That one is called `privacy`, with values such as `epsilon 2`, `z 1.5` or `no noise`.
    """
    keys = [key for key in sweep.keys if key != "seed"]
    private = [key for key in keys if key in PRIVACY_KEYS]
    if len(private) < 2:
        return frame, keys
    keys = ["privacy" if key == private[0] else key for key in keys if key not in private[1:]]
    return frame.assign(privacy=[_privacy(row) for _, row in frame.iterrows()]), keys


def _privacy(row: Any) -> str:
    if row["noise_multiplier"] == 0:
        return "no noise"
    if pd.notna(target := row.get("target_epsilon")) and target:
        return f"epsilon {target:g}"
    return f"z {row['noise_multiplier']:.3g}"


def pivot(frame: pd.DataFrame, sweep: Sweep) -> pd.DataFrame | None:
    """The metric's mean, its standard deviation over seeds and the number of runs, by the first two settings.

    None if only the seed varies, or no run is done.
    """
    frame, keys = settings(frame, sweep)
    keys = keys[:2]
    done = frame[frame["status"] == "done"]
    if not keys or done.empty:
        return None
    cells = done.groupby(keys, dropna=False)[metric_of(sweep).name].agg(["mean", "std", "count"])
    # Unstacking gives a series only for an index of one level.
    return cast(pd.DataFrame, cells.unstack(keys[1])) if len(keys) == 2 else cells


def write(frame: pd.DataFrame, pivoted: pd.DataFrame | None, out: Path) -> None:
    """sweep.csv, sweep.parquet and pivot.csv."""
    frame.to_csv(out / "sweep.csv", index=False)
    # A key may hold a number in one run and a list or nothing in another; Parquet needs one type per column.
    mixed = {name: str for name in frame.columns if frame[name].map(type).nunique() > 1 and frame[name].dtype == object}
    frame.astype(mixed).to_parquet(out / "sweep.parquet", index=False)
    if pivoted is not None:
        pivoted.to_csv(out / "pivot.csv")

"""Weights & Biases, with everything switched off that its client would collect of itself."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpriv.runs.show._tracker import EXPERIMENT, Ending, MetricPoint, Parameter, Place

_EXIT_CODES: Mapping[Ending, int] = {"finished": 0, "failed": 1}

# Code, commit, console, machine, user, statistics of the system and the list of installed packages stay here.
_NOTHING_ELSE: Mapping[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "host": "",
    "program": "",
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}

_INIT_SECONDS = 30.0


class WandbRun:
    """A run in the project of WANDB_PROJECT, or `fedpriv`."""

    def __init__(self, run: Any, place: Place) -> None:
        self._run, self._place = run, place

    @property
    def id(self) -> str:
        """The run's id within its project."""
        return str(self._run.id)

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Log the run's configuration."""
        self._run.config.update(dict(values), allow_val_change=True)

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Log values with the round as the axis; W&B's own steps could not go back to the comparison's first round."""
        by_round: dict[int, dict[str, float]] = {}
        for point in points:
            by_round.setdefault(point.round, {})[point.metric] = point.value
        for round_, values in by_round.items():
            self._run.log(values | {"round": round_})

    def log_final(self, figures: Mapping[str, float], facts: Mapping[str, str], round_: int) -> None:
        """Write the run's summary."""
        self._run.summary.update({**figures, **facts})

    def log_files(self, folder: Path) -> None:
        """Send one artifact, a model."""
        import wandb

        artifact = wandb.Artifact(f"run-{self._run.id}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def end(self, ending: Ending) -> None:
        """Wait until everything is written or sent."""
        self._run.finish(exit_code=_EXIT_CODES[ending])


def open_run(place: Place, known: str | None) -> WandbRun:
    """A run, grouped by its sweep."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # before the import: it would send tracebacks to W&B's makers
    import wandb

    run = wandb.init(
        dir=None if os.environ.get("WANDB_DIR") else place.home,
        project=os.environ.get("WANDB_PROJECT") or EXPERIMENT,
        name=place.name,
        group=os.environ.get("WANDB_RUN_GROUP") or place.sweep,
        id=known or secrets.token_hex(8),
        resume="allow",
        reinit="create_new",  # several runs of a sweep are open at a time
        settings=wandb.Settings(init_timeout=_INIT_SECONDS, **_NOTHING_ELSE),
    )
    run.define_metric("round")
    run.define_metric("*", step_metric="round")
    return WandbRun(run, place)


def open_sweep(title: str, folder: Path, keys: Sequence[str], known: str | None) -> None:
    """Nothing: runs of one group are shown together."""

"""Trackers of runs: MLflow, TensorBoard, and Weights & Biases; the package of each is loaded by its first run."""

import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedpriv.config import Track
from fedpriv.errors import InputError
from fedpriv.runs.show._tracker import EXPERIMENT, Ending, MetricPoint, Parameter, Place, Tracker

_MLFLOW_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED"}

# A server that does not answer is asked again later; MLflow's own patience would be 14 minutes.
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

# Standard output and standard error are the run's.
_MLFLOW_QUIET = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true", "MLFLOW_LOGGING_LEVEL": "ERROR"}

# Where runs are written together; transformers reads the same variable. Without it, a run's folder holds them.
FOLDER = "TENSORBOARD_LOGGING_DIR"

# What the table of runs shows first.
_KEY_FIGURES = (
    *("final/accuracy", "final/perplexity", "final/accuracy_non_private"),
    *("final/epsilon_local_max", "final/epsilon_rho_max", "final/epsilon_aggregate_max", "final/seconds"),
)

_WANDB_CODES: Mapping[Ending, int] = {"finished": 0, "failed": 1}

# Code, commit, console, machine, user, statistics of the system and the list of installed packages stay here.
_WANDB_SETTINGS: Mapping[str, Any] = {
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

_WANDB_SECONDS = 30.0


@dataclass(frozen=True)
class MlflowRun:
    """A run, by MLflow's id, on the server or in the file that MLFLOW_TRACKING_URI names."""

    client: Any
    id: str

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Log parameters; empty for a sweep."""
        from mlflow.entities import Param

        self.client.log_batch(self.id, params=[Param(key, str(value)) for key, value in values.items()])

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Log metrics with the round as step."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(point.metric, point.value, now, point.round) for point in points]
        self.client.log_batch(self.id, metrics=metrics)

    def log_final(self, figures: Mapping[str, float], facts: Mapping[str, str], round_: int) -> None:
        """Figures as metrics after the last round, words as tags."""
        from mlflow.entities import RunTag

        self.log_points([MetricPoint(metric=name, value=value, round=round_) for name, value in figures.items()])
        self.client.log_batch(self.id, tags=[RunTag(key, value) for key, value in facts.items()])

    def log_files(self, folder: Path) -> None:
        """Send artifacts, but none to a server elsewhere that names a folder here: any file could be overwritten."""
        uri = self.client.get_run(self.id).info.artifact_uri
        is_remote = urlsplit(self.client.tracking_uri).scheme in ("http", "https")
        if is_remote and urlsplit(uri).scheme in ("", "file"):
            raise InputError(
                f"the MLflow server keeps files at {uri!r}, which would be on this machine; start it with "
                "--serve-artifacts"
            )
        self.client.log_artifacts(self.id, str(folder))

    def end(self, ending: Ending) -> None:
        """End the run with MLflow's word for it."""
        self.client.set_terminated(self.id, _MLFLOW_STATUS[ending])


class Mlflow:
    """MLflow, through its client alone: `mlflow.start_run` would add the user's name, the program and the commit."""

    def open_run(self, place: Place, known: str | None) -> MlflowRun:
        """A run in the experiment of MLFLOW_EXPERIMENT_NAME, of the sweep's title, or `fedpriv`."""
        client = _mlflow_client(place.home)
        if known and _reopened(client, known):
            return MlflowRun(client, known)
        tags = {"mlflow.parentRunId": place.parent} if place.parent else {}
        is_at_home = place.home and client.tracking_uri == _mlflow_store(place.home)
        artifacts = (place.home / "mlruns").as_uri() if place.home and is_at_home else None
        run = client.create_run(_experiment(client, place.sweep, artifacts), run_name=place.name, tags=tags)
        return MlflowRun(client, run.info.run_id)

    def open_sweep(self, title: str, folder: Path, keys: Sequence[str], known: str | None) -> MlflowRun:
        """The parent of the sweep's runs."""
        client = _mlflow_client()
        if known and _reopened(client, known):
            return MlflowRun(client, known)
        run = client.create_run(_experiment(client, title), run_name=title, tags={"varies": ", ".join(keys)})
        return MlflowRun(client, run.info.run_id)


def _mlflow_client(home: Path | None = None) -> Any:
    for name, value in {**_MLFLOW_PATIENCE, **_MLFLOW_QUIET}.items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before the import: it asks a server of MLflow's makers
    from mlflow import MlflowClient

    return MlflowClient(_mlflow_store(home) if home and not os.environ.get("MLFLOW_TRACKING_URI") else None)


def _mlflow_store(home: Path) -> str:
    """The database that MLflow itself would make in that folder."""
    return f"sqlite:///{home}/mlflow.db"


def _reopened(client: Any, run_id: str) -> bool:
    """Whether the run is there, and is running again; else a new one is made, as in another store."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return True


def _experiment(client: Any, sweep: str | None, artifacts: str | None = None) -> str:
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or sweep or EXPERIMENT
    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name, artifacts))
    except MlflowException as error:  # another run has made it in the meantime
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return str(client.get_experiment_by_name(name).experiment_id)


@dataclass(frozen=True)
class TensorboardRun:
    """A folder of event files, one of each process; its id counts from the run's: a run may be moved and resumed."""

    folder: Path
    name: str
    id: str

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Log the parameters for the page HParams, and as a table among the texts."""
        from tensorboard.plugins.hparams import summary_v2
        from tensorboard.plugins.text.summary_v2 import text_pb

        rows = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in values.items()]
        table = "\n".join(["| key | value |", "| --- | --- |", *rows])
        self._write([summary_v2.hparams_pb(dict(values), trial_id=self.name), text_pb("configuration", table)])

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Write scalars, of 32 bits, with the round as step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for round_, told in groupby(points, attrgetter("round")):
            values = [Summary.Value(tag=point.metric, simple_value=point.value) for point in told]
            self._write([Summary(value=values)], step=round_)

    def log_final(self, figures: Mapping[str, float], facts: Mapping[str, str], round_: int) -> None:
        """Figures as scalars after the last round, words among the texts."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self.log_points([MetricPoint(metric=name, value=value, round=round_) for name, value in figures.items()])
        self._write([text_pb(f"final/{key}", value) for key, value in facts.items()], step=round_)

    def log_files(self, folder: Path) -> None:
        """Event files have no place for files; the run's own folder holds them."""

    def end(self, ending: Ending) -> None:
        """Write how the run ended, for the page HParams."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}[ending]
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        # As TensorBoard's own function for it does, which needs TensorFlow.
        about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=info))
        value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
        self._write([Summary(value=[value])])

    def _write(self, summaries: Iterable[Any], step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        _append(self._file, [Event(wall_time=time.time(), step=step, summary=s) for s in summaries])

    @cached_property
    def _file(self) -> Path:
        return _new_file(self.folder)


class Tensorboard:
    """TensorBoard's event files, written by its own encoder; torch's writer would put the machine's name in theirs."""

    def open_run(self, place: Place, known: str | None) -> TensorboardRun:
        """The folder RUN/tensorboard or SWEEP/tensorboard/NAME, or one by the run's name in TENSORBOARD_LOGGING_DIR."""
        if known:
            return TensorboardRun(place.folder / known, place.name, known)
        elsewhere = os.environ.get(FOLDER)
        if elsewhere:
            parent = Path(elsewhere).expanduser().absolute()
            folder = _unused(parent / _file_name(place.sweep) if place.sweep else parent, place.name)
        elif place.sweep_folder:
            folder = _unused(place.sweep_folder / "tensorboard", place.name)
        else:
            return TensorboardRun(place.folder / "tensorboard", place.name, "tensorboard")
        return TensorboardRun(folder, folder.name, str(folder))

    def open_sweep(self, title: str, folder: Path, keys: Sequence[str], known: str | None) -> None:
        """The columns that the page HParams begins with: what varies, and the figures that runs are compared by."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb

        elsewhere = os.environ.get(FOLDER)
        parent = Path(elsewhere).expanduser().absolute() / _file_name(title) if elsewhere else folder / "tensorboard"
        if parent.is_dir() and any(parent.glob("events.out.tfevents.*")):
            return
        metrics = [Metric(name, display_name=name.removeprefix("final/")) for name in _KEY_FIGURES]
        columns = hparams_config_pb([HParam(key) for key in keys], metrics)
        _append(_new_file(parent), [Event(wall_time=time.time(), summary=columns)])


def _new_file(folder: Path) -> Path:
    """A file that TensorBoard takes for its own, by its name."""
    from tensorboard.compat.proto.event_pb2 import Event

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"events.out.tfevents.{time.time_ns()}.fedpriv"
    _append(file, [Event(wall_time=time.time(), file_version="brain.Event:2")])
    return file


def _append(file: Path, events: Iterable[Any]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with file.open("ab") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())


def _unused(parent: Path, name: str) -> Path:
    """A folder of that name, or of NAME-2 and so on: an earlier attempt keeps its own."""
    plain = _file_name(name)
    folder, number = parent / plain, 1
    while folder.exists():
        number += 1
        folder = parent / f"{plain}-{number}"
    return folder


def _file_name(name: str) -> str:
    kept = "".join(c if c.isalnum() or c in " =,.+-_" else "_" for c in name)
    return kept.strip(" .")[:100] or "run"


class WandbRun:
    """A run in the project of WANDB_PROJECT, or `fedpriv`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The run's id within its project."""
        return str(self._run.id)

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Log the run's configuration."""
        self._run.config.update(dict(values), allow_val_change=True)

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Log values with the round as the axis; W&B's own steps could not go back to the comparison's first round."""
        for round_, told in groupby(points, attrgetter("round")):
            self._run.log({point.metric: point.value for point in told} | {"round": round_})

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
        self._run.finish(exit_code=_WANDB_CODES[ending])


class Wandb:
    """Weights & Biases, with everything switched off that its client would collect of itself."""

    def open_run(self, place: Place, known: str | None) -> WandbRun:
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
            settings=wandb.Settings(init_timeout=_WANDB_SECONDS, **_WANDB_SETTINGS),
        )
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        return WandbRun(run)

    def open_sweep(self, title: str, folder: Path, keys: Sequence[str], known: str | None) -> None:
        """Nothing: runs of one group are shown together."""


TRACKERS: Mapping[Track, Tracker] = {"mlflow": Mlflow(), "tensorboard": Tensorboard(), "wandb": Wandb()}
"""The tracker of each name, whose package is loaded by its first run."""

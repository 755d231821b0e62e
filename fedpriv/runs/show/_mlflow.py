"""MLflow, through its client alone: `mlflow.start_run` would add the user's name, the program and the commit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedpriv.errors import InputError
from fedpriv.runs.show._tracker import EXPERIMENT, Ending, MetricPoint, Parameter, Place

# What MLflow takes in one request.
_METRICS_AT_ONCE, _PARAMETERS_AT_ONCE = 1000, 100
_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED"}

# A server that does not answer is asked again later; MLflow's own patience would be 14 minutes.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

# Standard output and standard error are the run's.
_QUIET = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true", "MLFLOW_LOGGING_LEVEL": "ERROR"}


class MlflowRun:
    """A run on the server or in the file that MLFLOW_TRACKING_URI names."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._id = client, run_id

    @property
    def id(self) -> str:
        """MLflow's run id."""
        return self._id

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Log parameters; empty for a sweep."""
        from mlflow.entities import Param

        for part in _parts([Param(key, str(value)) for key, value in values.items()], _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=part)

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Log metrics with the round as step."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(point.metric, point.value, now, point.round) for point in points]
        for part in _parts(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=part)

    def log_final(self, figures: Mapping[str, float], facts: Mapping[str, str], round_: int) -> None:
        """Figures as metrics after the last round, words as tags."""
        from mlflow.entities import RunTag

        self.log_points([MetricPoint(metric=name, value=value, round=round_) for name, value in figures.items()])
        self._client.log_batch(self._id, tags=[RunTag(key, value) for key, value in facts.items()])

    def log_files(self, folder: Path) -> None:
        """Send artifacts.

        Raises:
            InputError: a server elsewhere names a folder of this machine; it could have any file here overwritten.
        """
        uri = self._client.get_run(self._id).info.artifact_uri
        if _is_remote(self._client.tracking_uri) and urlsplit(uri).scheme in ("", "file"):
            raise InputError(
                f"the MLflow server keeps files at {uri!r}, which would be on this machine; start it with "
                "--serve-artifacts"
            )
        self._client.log_artifacts(self._id, str(folder))

    def end(self, ending: Ending) -> None:
        """End the run with MLflow's word for it."""
        self._client.set_terminated(self._id, _STATUS[ending])


def open_run(place: Place, known: str | None) -> MlflowRun:
    """A run in the experiment of MLFLOW_EXPERIMENT_NAME, of the sweep's title, or `fedpriv`."""
    client = _client(place.home)
    if known and _reopened(client, known):
        return MlflowRun(client, known)
    tags = {"mlflow.parentRunId": place.parent} if place.parent else {}
    artifacts = (place.home / "mlruns").as_uri() if place.home and client.tracking_uri == _store(place.home) else None
    run = client.create_run(_experiment(client, place.sweep, artifacts), run_name=place.name, tags=tags)
    return MlflowRun(client, run.info.run_id)


def open_sweep(title: str, folder: Path, keys: Sequence[str], known: str | None) -> MlflowRun:
    """The parent of the sweep's runs."""
    client = _client()
    if known and _reopened(client, known):
        return MlflowRun(client, known)
    run = client.create_run(_experiment(client, title), run_name=title, tags={"varies": ", ".join(keys)})
    return MlflowRun(client, run.info.run_id)


def _client(home: Path | None = None) -> Any:
    for name, value in {**_PATIENCE, **_QUIET}.items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before the import: it asks a server of MLflow's makers
    from mlflow import MlflowClient

    return MlflowClient(_store(home) if home and not os.environ.get("MLFLOW_TRACKING_URI") else None)


def _store(home: Path) -> str:
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


def _is_remote(uri: str) -> bool:
    return urlsplit(uri).scheme in ("http", "https")


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))

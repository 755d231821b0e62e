"""Trackers: what each must do, and what it is told of a run.

What is told are pure functions of the tables, the summary and the configuration that the run wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

from fedpriv.config import Fact, RunConfig, Track
from fedpriv.errors import InputError
from fedpriv.runs.figures import ShownFigure
from fedpriv.runs.show._tables import ReadStored, nothing_stored

Ending = Literal["finished", "failed"]

# As an organisation's tracker shows it, unless a sweep or the tracker's own variable gives a name.
EXPERIMENT = "fedpriv"

Parameter = str | int | float | bool

ROUND_METRICS: Mapping[str, str] = {
    "test_accuracy": "test/accuracy",
    "test_loss": "test/loss",
    "test_perplexity": "test/perplexity",
    "epsilon_local_max": "epsilon/local_max",
    "epsilon_rho_max": "epsilon/rho_max",
    "epsilon_aggregate_max": "epsilon/aggregate_max",
    "epsilon_this_run_max": "epsilon/this_run_max",
    "epsilon_before_max": "epsilon/before_max",
    "bytes_up": "bytes/up",
    "bytes_down": "bytes/down",
    "seconds": "round/seconds",
    **{
        name: f"round/{name}"
        for name in ("num_selected", "num_replies", "num_silent", "num_failures", "num_late", "num_retired")
    },
}
"""{column of rounds.csv: its metric}. Trackers show the metrics of one word before the slash side by side."""

COMPARISON_METRICS: Mapping[str, str] = {
    "test_accuracy": "comparison/accuracy",
    "test_loss": "comparison/loss",
    "test_perplexity": "comparison/perplexity",
}
"""The same of the comparison run, which costs no epsilon."""

CLIENT_METRICS = ("epsilon_local", "epsilon_rho", "epsilon_aggregate")
"""The columns of clients.csv, and keys of a client in summary.json, that are logged for each client."""

MOST_CLIENTS = 100
"""The most clients that are logged each; with more, which no page could show, only the largest epsilons are."""

FACTS = (
    *("private", "caveat", "unit", "accountant", "noise_source", "stopped_early", "adapters_moved"),
    *("run_id", "configuration_digest", "ledger_head"),
)
"""The keys of summary.json that are words."""

LONGEST_TEXT = 500
"""Characters of a parameter; MLflow takes 6,000, but no table of runs shows as much."""

# Of environment.json, what does not name the machine.
_NO_VERSIONS = ("fedpriv_file", "commit", "platform", "cpu_count", "gpu")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a run in a tracker.

    Attributes:
        sweep: the title of the sweep that it belongs to; None for a run of its own.
        parent: the sweep's own id, in trackers that have one.
        home: where a tracker keeps files of its own unless it is told otherwise; None for where the run was started.
    """

    name: str
    folder: Path
    sweep: str | None = None
    sweep_folder: Path | None = None
    parent: str | None = None
    home: Path | None = None
    stored_in: ReadStored = nothing_stored


class TrackedRun(Protocol):
    """A run in a tracker; every method raises what the tracker raises."""

    @property
    def id(self) -> str:
        """The name by which the tracker can open the run again."""

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Log the configuration; repeating it does no harm."""

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Log values, in the order of rounds."""

    def log_final(self, figures: Mapping[str, float], facts: Mapping[str, str], round_: int) -> None:
        """Log the final figures, after the last round."""

    def log_files(self, folder: Path) -> None:
        """Send all files of a folder."""

    def end(self, ending: Ending) -> None:
        """Say that the run is over, or was broken off; it can be opened again."""


class Tracker(Protocol):
    """Opens runs in a tracker."""

    def open_run(self, place: Place, known: str | None) -> TrackedRun:
        """A new run, or the one with the id that is known."""

    def open_sweep(self, title: str, folder: Path, keys: Sequence[str], known: str | None) -> TrackedRun | None:
        """The run under which those of a sweep are shown; None where trackers group them by name."""


def check_installed(track: Track) -> None:
    """Refuse a tracker whose package is missing, with an InputError that names the extra to install."""
    if track != "none" and find_spec(track) is None:
        raise InputError(f"track = {track}: needs {track}; pip install 'fedpriv[{track}]', or use none")


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """One value of a metric, after a round."""

    metric: str
    value: float
    round: int


def exists_here(path: str) -> bool:
    """Whether the path leads to something on this machine."""
    try:
        return Path(path).exists()
    except OSError:  # too long to be a path
        return False


def without_folders(value: str, exists: Callable[[str], bool] = exists_here) -> str:
    """The last name of a path; a name such as `organisation/model` that is nothing on this machine stays as it is."""
    is_path = value.startswith(("/", "~", ".", "\\")) or PurePath(value).is_absolute()
    return PurePath(value).name if is_path or exists(value) else value


def configuration(values: Mapping[str, Any], exists: Callable[[str], bool] = exists_here) -> dict[str, Any]:
    """The values of config.toml, without paths and the names of machines."""
    hidden, paths = RunConfig.keys_with(Fact.HIDDEN), RunConfig.keys_with(Fact.PATH)
    kept = {key: value for key, value in values.items() if key not in hidden}
    return kept | {key: without_folders(kept[key], exists) for key in paths if isinstance(kept.get(key), str)}


def parameters(values: Mapping[str, Any]) -> dict[str, Parameter]:
    """`configuration` as parameters: lists as text, long texts cut, keys without a value left out."""
    return {key: plain_value(value) for key, value in values.items() if value not in ("", [], ())}


def plain_value(value: Any) -> Parameter:
    """A value of the configuration as trackers take it: lists as text, long texts cut."""
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return value[: LONGEST_TEXT - 1] + "…"
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def run_name(varied: Mapping[str, Any], exists: Callable[[str], bool] = exists_here) -> str:
    """The name of a run in a sweep: the keys that vary, with their values."""
    values = {key: without_folders(value, exists) if isinstance(value, str) else value for key, value in varied.items()}
    named = [f"{key}={plain_value(value)}" for key, value in values.items() if value is not None]
    return ", ".join(named) or "base"


def paths(values: Mapping[str, Any], exists: Callable[[str], bool] = exists_here) -> dict[str, str]:
    """{path in config.toml: what is said in its place}, longest first."""
    keys = (*RunConfig.keys_with(Fact.PATH), *RunConfig.keys_with(Fact.LOCATION))
    named = [str(values[key]) for key in keys if values.get(key)]
    found = {path: without_folders(path, exists) for path in named}
    return {path: found[path] for path in sorted(found, key=len, reverse=True) if found[path] != path}


def versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The versions in environment.json, without what it says of the machine."""
    return {key: value for key, value in environment.items() if key not in _NO_VERSIONS}


def round_points(rows: Iterable[Mapping[str, Any]], metrics: Mapping[str, str] = ROUND_METRICS) -> list[MetricPoint]:
    """The points of rows of rounds.csv, which leave out what is empty or infinite."""
    return [
        MetricPoint(metric=metric, value=float(row[column]), round=row["round"])
        for row in rows
        for column, metric in metrics.items()
        if _is_finite(row.get(column))
    ]


def client_points(rows: Iterable[Mapping[str, Any]]) -> list[MetricPoint]:
    """The points of rows of clients.csv, for a run of at most MOST_CLIENTS clients."""
    return [
        MetricPoint(metric=f"{column}/{client_name(row['client'])}", value=float(row[column]), round=row["round"])
        for row in rows
        for column in CLIENT_METRICS
        if _is_finite(row.get(column))
    ]


def client_name(client: int) -> str:
    """A client in the name of a metric, such that a list of names is in the order of partition ids."""
    return f"client_{client:02}"


def final_figures(summary: Mapping[str, Any], shown: Iterable[ShownFigure] = ()) -> dict[str, float]:
    """The numbers of summary.json and of its audit, each client's final epsilons, and numbers among other figures."""
    figures = {f"final/{figure.key}": figure.value for figure in shown if _is_finite(figure.value)}
    figures |= {f"final/{key}": value for key, value in summary.items() if _is_finite(value)}
    audit = summary.get("audit") or {}
    figures |= {f"final/audit_{key}": value for key, value in audit.items() if _is_finite(value)}
    clients = summary.get("clients", ())
    if len(clients) <= MOST_CLIENTS:
        figures |= {
            f"final_{key}/{client_name(client['client'])}": client[key]
            for client in clients
            for key in CLIENT_METRICS
            if _is_finite(client.get(key))
        }
    return {name: float(value) for name, value in figures.items()}


def facts(summary: Mapping[str, Any]) -> dict[str, str]:
    """The words in summary.json; a key without a value is left out."""
    said = {key: summary.get(key) for key in FACTS}
    known = {key: value for key, value in said.items() if value not in (None, "")}
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in known.items()}


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

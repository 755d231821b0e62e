"""Plans a sweep: a TOML file of ordinary run keys, a `[grid]` and a list of `[[runs]]`, as one run each.

Runs are compared by accuracy, or by the perplexity of a language model that answers freely.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedpriv import config as configuration
from fedpriv.config import RunConfig, SweepPoint, Track
from fedpriv.learning.data import federated
from fedpriv.runs.show import check_installed, run_name

# The largest batch size that follows the smallest client.
_LARGEST_AUTO = 64

# Of what varies, in the name of a folder.
_LONGEST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        key: names the run's folder: what varies, and a digest of the configuration as written.
        varied: {configuration key: value} of the keys that differ between runs.
        config: of the run, without a folder; an `auto` batch size is 1 here.
        auto_batch: whether the batch size follows the smallest client.
        is_chosen: whether it is to be run now.
    """

    key: str
    varied: dict[str, Any]
    config: RunConfig
    auto_batch: bool
    is_chosen: bool = True

    def placed(self, folder: Path) -> RunConfig:
        """The configuration to run, with its folder and batch size.

        Raises:
            InputError: the data cannot be loaded.
        """
        config = replace(self.config, out=str(folder.absolute()))
        if not self.auto_batch:
            return config
        smallest = min(client.num_units for client in federated.load(config).clients)
        return replace(config, batch_size=max(1, min(_LARGEST_AUTO, smallest // 4)))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All runs of a sweep.

    Attributes:
        title: for plots.
        keys: what varies, in the file's order.
        runs: without repeats, in the order of the grid, the last key varying fastest.
        track: where the sweep's figures go; it tracks its runs, which do not know of it.
    """

    title: str
    keys: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    track: Track = "none"

    @property
    def chosen(self) -> tuple[PlannedRun, ...]:
        """The runs that are to be run now."""
        return tuple(run for run in self.runs if run.is_chosen)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, from which `fedpriv watch` shows runs that have not begun."""
        return {"title": self.title, "runs": [{"key": run.key, "varied": run.varied} for run in self.runs]}


def read(path: Path, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep that a file describes; see `expand`.

    Raises:
        InputError: one line that names the key, the value and what would be right.
    """
    return expand(configuration.read(path), source=str(path), title=path.stem, overrides=overrides)


def expand(values: Mapping[str, Any], *, source: str, title: str, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep that values describe; arguments as in `sweep_values.points`, and one `track` for all runs.

    Raises:
        InputError: one line that names the key, the value and what would be right.
    """
    base, changes = dict(values), dict(overrides or {})
    given = base.pop("track", "none")
    track = _track(changes.pop("track", given))
    title, keys, points = configuration.sweep_points(base, source=source, title=title, overrides=changes)
    runs: dict[str, PlannedRun] = {}
    for point in points:
        planned = _planned(point, keys)
        runs.setdefault(planned.key, planned)
    return Sweep(title=title, keys=keys, runs=tuple(runs.values()), track=track)


def _track(value: Any) -> Track:
    """The tracker of the whole sweep.

    Raises:
        InputError: it is unknown, or not installed.
    """
    track = configuration.parse({"track": value}).track
    check_installed(track)
    return track


def _planned(point: SweepPoint, keys: tuple[str, ...]) -> PlannedRun:
    config = configuration.parse(point.values)
    written = json.dumps([asdict(config), point.auto_batch], sort_keys=True)
    # A key that only other runs name has the value of the base, or the default.
    complete = {name: point.varied.get(name, getattr(config, name)) for name in keys}
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", run_name(complete, lambda _: True))[:_LONGEST_NAME].strip("-.")
    key = f"{name}-{hashlib.sha256(written.encode()).hexdigest()[:8]}"
    return PlannedRun(key=key, varied=complete, config=config, auto_batch=point.auto_batch, is_chosen=point.is_chosen)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a run's summary.

    Attributes:
        name: its column.
        label: for axes and tables.
        text: a value as plots write it.
        references: (column, label, line style) of what runs are compared with.
        far: how far from the runs, in units of the metric, a reference is only named instead of drawn.
    """

    name: str
    label: str
    text: Callable[[float], str]
    references: tuple[tuple[str, str, str], ...]
    far: float


_ACCURACY = Metric(
    name="accuracy",
    label="test accuracy",
    text=lambda value: f"{100 * value:.0f} %",
    references=(
        ("accuracy_non_private", "z = 0, clipping kept", "--"),
        ("probe_accuracy", "linear probe", "-."),
        ("majority_accuracy", "largest class", ":"),
        ("chance_accuracy", "chance", ":"),
    ),
    far=0.05,
)

_PERPLEXITY = Metric(
    name="perplexity",
    label="test perplexity",
    text=lambda value: f"{value:.3g}",
    references=(
        ("perplexity_non_private", "z = 0, clipping kept", "--"),
        ("perplexity_initial", "untrained", ":"),
    ),
    far=0.5,
)


def metric_of(sweep: Sweep) -> Metric:
    """Perplexity if every run's model answers freely; accuracy wherever there are classes or allowed answers."""
    free = all(run.config.task == "CAUSAL_LM" and not run.config.answers for run in sweep.runs)
    return _PERPLEXITY if free else _ACCURACY

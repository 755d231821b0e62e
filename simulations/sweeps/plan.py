"""What a sweep runs: a TOML file of ordinary run keys, a `[grid]` and a list of `[[runs]]`, as one run each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedpriv import config as configuration
from fedpriv.config import RunConfig
from fedpriv.data import federated
from fedpriv.errors import InputError

# In a sweep's file `batch_size = "auto"` is B = min(64, N_k / 4) of the smallest client, and at least 1, so that runs
# with different numbers of clients can be compared.
AUTO = "auto"
_LARGEST_AUTO = 64

# Keys that the sweep sets for every run.
_SET_BY_SWEEP = ("out", "ledger")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        key: digest of the configuration as written, which names the run's folder.
        varied: {configuration key: value} of the keys that differ between runs.
        config: of the run, without a folder; an `auto` batch size is 1 here.
        auto_batch: whether the batch size follows the smallest client.
    """

    key: str
    varied: dict[str, Any]
    config: RunConfig
    auto_batch: bool

    def placed(self, folder: Path) -> RunConfig:
        """The configuration to run, with its folder and batch size.

        Raises:
            InputError: the data cannot be loaded.
        """
        config = replace(self.config, out=str(folder.absolute()))
        if not self.auto_batch:
            return config
        smallest = min(map(len, federated.load(config).clients))
        return replace(config, batch_size=max(1, min(_LARGEST_AUTO, smallest // 4)))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All runs of a sweep.

    Attributes:
        title: for plots.
        keys: what varies, in the file's order.
        runs: without repeats, in the order of the grid, the last key varying fastest.
    """

    title: str
    keys: tuple[str, ...]
    runs: tuple[PlannedRun, ...]

    def as_dict(self) -> dict[str, Any]:
        """What `fedpriv watch` shows of runs that have not begun: plain values."""
        return {"title": self.title, "runs": [{"key": run.key, "varied": run.varied} for run in self.runs]}


def read(path: Path, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep that a file describes; `overrides` change its base, or the engine.

    Raises:
        InputError: one line that names the key, the value and what would be right.
    """
    values = configuration.read(path)
    title = values.pop("title", path.stem)
    grid, listed = values.pop("grid", {}), values.pop("runs", [{}])
    _check(path, grid, listed)
    keys = tuple(dict.fromkeys([*(key for run in listed for key in run), *grid]))
    for key in set(keys) & set(overrides or ()) - {"engine"}:
        raise InputError(f"-c {key}: {path} has runs of several values of it; change them there")
    runs: dict[str, PlannedRun] = {}
    for run in listed:
        for point in product(*grid.values()):
            varied = {**run, **dict(zip(grid, point, strict=True))}
            planned = _planned({**values, **varied, **(overrides or {})}, varied, keys)
            runs.setdefault(planned.key, planned)
    return Sweep(title=str(title), keys=keys, runs=tuple(runs.values()))


def _check(path: Path, grid: Any, listed: Any) -> None:
    if not isinstance(grid, dict):
        raise InputError(f"{path}: grid = {grid!r}: must be a table of lists, for instance rank = [4, 8]")
    for key, options in grid.items():
        if not isinstance(options, list) or not options:
            raise InputError(f"{path}: grid.{key} = {options!r}: must be a list of at least one value")
    if not isinstance(listed, list) or not listed or not all(isinstance(run, dict) for run in listed):
        raise InputError(f"{path}: runs = {listed!r}: must be tables, each under [[runs]]")


def _planned(values: dict[str, Any], varied: dict[str, Any], keys: tuple[str, ...]) -> PlannedRun:
    for key in _SET_BY_SWEEP:
        if values.get(key):
            raise InputError(f"{key} = {values[key]!r}: the sweep sets it for every run; leave it out")
    auto = values.get("batch_size") == AUTO
    config = configuration.parse({**values, "batch_size": 1} if auto else values)
    written = json.dumps([asdict(config), auto], sort_keys=True)
    key = hashlib.sha256(written.encode()).hexdigest()[:16]
    # A key that only other runs name has the value of the base, or the default.
    complete = {name: varied.get(name, getattr(config, name)) for name in keys}
    return PlannedRun(key=key, varied=complete, config=config, auto_batch=auto)

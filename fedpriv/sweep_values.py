"""The values of every run of a sweep's file: ordinary run keys, a `[grid]` and a list of `[[runs]]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fedpriv.config_values import with_overrides
from fedpriv.errors import InputError

# In a sweep's file `batch_size = "auto"` is B = min(64, N_k / 4) of the smallest client, and at least 1, so that runs
# with different numbers of clients can be compared.
AUTO = "auto"

# Keys that the sweep sets for every run.
_SET_BY_SWEEP = ("out", "ledger")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run, its values not yet checked.

    Attributes:
        varied: {key: value} of what the file lets vary.
        values: {key: value} of all that are given; a batch size that follows the smallest client is 1.
        auto_batch: whether it does.
    """

    varied: Mapping[str, Any]
    values: Mapping[str, Any]
    auto_batch: bool


def is_sweep(values: Mapping[str, Any]) -> bool:
    """Whether the values are a sweep's and not a run's."""
    return "grid" in values or "runs" in values


def points(
    values: Mapping[str, Any], *, source: str, title: str, overrides: Mapping[str, Any] | None = None
) -> tuple[str, tuple[str, ...], list[Point]]:
    """The title, the keys that vary in the values' order, and every run, the grid's last key varying fastest.

    Args:
        values: run keys, and perhaps a `title`, a `grid` and `runs`.
        source: where they come from, for errors.
        title: where the values have none.
        overrides: change the keys of every run; of those that vary, the engine alone.

    Raises:
        InputError: the grid or the runs have another form, or a key must not be there.
    """
    base = dict(values)
    title = base.pop("title", title)
    grid, listed = base.pop("grid", {}), base.pop("runs", [{}])
    _check(source, grid, listed)
    keys = tuple(dict.fromkeys([*(key for run in listed for key in run), *grid]))
    for key in set(keys) & set(overrides or ()) - {"engine"}:
        raise InputError(f"{key}: {source} has runs of several values of it; change them there")
    found = []
    for run in listed:
        for options in product(*grid.values()):
            varied = {**run, **dict(zip(grid, options, strict=True))}
            found.append(_point(with_overrides(base, {**varied, **(overrides or {})}), varied))
    return str(title), keys, found


def _check(source: str, grid: Any, listed: Any) -> None:
    if not isinstance(grid, dict):
        raise InputError(f"{source}: grid = {grid!r}: must be a table of lists, for instance rank = [4, 8]")
    for key, options in grid.items():
        if not isinstance(options, list) or not options:
            raise InputError(f"{source}: grid.{key} = {options!r}: must be a list of at least one value")
    if not isinstance(listed, list) or not listed or not all(isinstance(run, dict) for run in listed):
        raise InputError(f"{source}: runs = {listed!r}: must be tables, each under [[runs]]")


def _point(values: dict[str, Any], varied: dict[str, Any]) -> Point:
    for key in _SET_BY_SWEEP:
        if values.get(key):
            raise InputError(f"{key} = {values[key]!r}: the sweep sets it for every run; leave it out")
    if "track" in varied:
        raise InputError(f"track = {varied['track']!r}: one tracker shows the whole sweep; give it outside of the grid")
    auto = values.get("batch_size") == AUTO
    return Point(varied=varied, values={**values, "batch_size": 1} if auto else values, auto_batch=auto)

"""Values of a configuration before they are checked: from a file, after `-c`, or of every run of a sweep.

A sweep's file holds ordinary run keys, a `[grid]` and a list of `[[runs]]`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedpriv.config._recipes import BY_RECIPE
from fedpriv.errors import InputError

LOCATION_KEYS = ("out", "ledger", "node_keys", "resume")
"""Keys that only say where a run's files are."""

OUTSIDE_KEYS = (*LOCATION_KEYS, "track")
"""Keys that do not affect a run's results, so its digest leaves them out: where files are and figures are shown."""

# In a sweep's file `batch_size = "auto"` is B = min(64, N_k / 4) of the smallest client, and at least 1, so that runs
# with different numbers of clients can be compared.
_AUTO = "auto"

# Keys that the sweep sets for every run.
_SET_BY_SWEEP = ("out", "ledger")


def is_resolved(values: Mapping[str, Any]) -> bool:
    """Whether fedpriv wrote the values, such as a run's config.toml: nobody else names all of `LOCATION_KEYS`.

    Flower's project file does, but leaves keys to the recipe.
    """
    return set(LOCATION_KEYS) <= values.keys() and BY_RECIPE not in values.values()


def two_noises(values: Mapping[str, Any]) -> list[str]:
    """A line if values that somebody chose hold both a noise multiplier and the target that would derive it."""
    noise, target = (values.get(key, BY_RECIPE) for key in ("noise_multiplier", "target_epsilon"))
    if BY_RECIPE in (noise, target) or target in ("", None):
        return []
    return [
        f"noise_multiplier = {noise!r}: target_epsilon = {target!r} says how much noise there is; give one of the two "
        f"(-c target_epsilon= or -c 'noise_multiplier={BY_RECIPE}' leaves out a file's)"
    ]


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A file's values with the overrides in their place.

    In a run's own config.toml the noise is what its target came to, which is derived again.

    Raises:
        InputError: together they give both a noise multiplier and a target.
    """
    merged = {**values, **overrides}
    has_target = merged.get("target_epsilon", BY_RECIPE) not in ("", None, BY_RECIPE)
    if is_resolved(values) and has_target and "noise_multiplier" not in overrides:
        merged.pop("noise_multiplier", None)
    for problem in two_noises(merged):
        raise InputError(problem)
    return merged


def read(path: Path) -> dict[str, Any]:
    """The key-value pairs of a TOML file, not yet checked.

    Raises:
        InputError: the file is missing, cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` pairs as given after `-c`; a value that is not TOML is text.

    Raises:
        InputError: a pair has no `=`.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise InputError(f"-c {pair}: must be key=value, for instance rounds=5")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text.strip()
    return values


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One run of a sweep, its values not yet checked.

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


def sweep_points(
    values: Mapping[str, Any], *, source: str, title: str, overrides: Mapping[str, Any] | None = None
) -> tuple[str, tuple[str, ...], list[SweepPoint]]:
    """The sweep's title, the keys that vary in the values' order, and every run; the grid's last key varies fastest.

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
    _check_sweep(source, grid, listed)
    keys = tuple(dict.fromkeys([*(key for run in listed for key in run), *grid]))
    for key in set(keys) & set(overrides or ()) - {"engine"}:
        raise InputError(f"{key}: {source} has runs of several values of it; change them there")
    found = []
    for run in listed:
        for options in product(*grid.values()):
            varied = {**run, **dict(zip(grid, options, strict=True))}
            found.append(_point(with_overrides(base, {**varied, **(overrides or {})}), varied))
    return str(title), keys, found


def _check_sweep(source: str, grid: Any, listed: Any) -> None:
    if not isinstance(grid, dict):
        raise InputError(f"{source}: grid = {grid!r}: must be a table of lists, for instance rank = [4, 8]")
    for key, options in grid.items():
        if not isinstance(options, list) or not options:
            raise InputError(f"{source}: grid.{key} = {options!r}: must be a list of at least one value")
    if not isinstance(listed, list) or not listed or not all(isinstance(run, dict) for run in listed):
        raise InputError(f"{source}: runs = {listed!r}: must be tables, each under [[runs]]")


def _point(values: dict[str, Any], varied: dict[str, Any]) -> SweepPoint:
    for key in _SET_BY_SWEEP:
        if values.get(key):
            raise InputError(f"{key} = {values[key]!r}: the sweep sets it for every run; leave it out")
    if "track" in varied:
        raise InputError(f"track = {varied['track']!r}: one tracker shows the whole sweep; give it outside of the grid")
    auto = values.get("batch_size") == _AUTO
    return SweepPoint(varied=varied, values={**values, "batch_size": 1} if auto else values, auto_batch=auto)

"""Values of a configuration: from a file, after `-c`, or of every run of a sweep; how they are checked, and written.

A sweep's file holds ordinary run keys, a `[grid]` and a list of `[[runs]]`.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedpriv.config._model_and_data import OWN_MODEL
from fedpriv.config._recipes import BY_RECIPE
from fedpriv.config._run_config import RunConfig
from fedpriv.config._section import Fact, split
from fedpriv.errors import InputError
from fedpriv.files import read_text
from fedpriv.privacy.mechanisms.registry import MECHANISMS

KEYS = tuple(field.name for field in fields(RunConfig))
"""The keys of a run's configuration, in their order."""

Scalar = str | int | float | bool
"""A value in Flower's run configuration."""

# In a sweep's file `batch_size = "auto"` is B = min(64, N_k / 4) of the smallest client, and at least 1, so that runs
# with different numbers of clients can be compared.
_AUTO = "auto"


def is_resolved(values: Mapping[str, Any]) -> bool:
    """Whether fedpriv wrote the values, such as a run's config.toml: nobody else names all keys.

    Flower's project file does, but leaves keys to the recipe.
    """
    return set(KEYS) <= values.keys() and BY_RECIPE not in values.values()


def two_noises(values: Mapping[str, Any]) -> list[str]:
    """A line for each target in values that somebody chose, beside the noise multiplier that it would derive."""
    noise = values.get("noise_multiplier", BY_RECIPE)
    if noise == BY_RECIPE:
        return []
    return [
        f"noise_multiplier = {noise!r}: {key} = {values[key]!r} says how much noise there is; give one of the two "
        f"(-c {key}= or -c 'noise_multiplier={BY_RECIPE}' leaves out a file's)"
        for key in _targets_of(values)
    ]


_TARGETS = ("target_epsilon", "target_risk", "target_epsilon_published")


def _targets_of(values: Mapping[str, Any]) -> list[str]:
    """The keys of targets that somebody chose."""
    return [key for key in _TARGETS if values.get(key) not in ("", None, BY_RECIPE)]


def foreign_to_own_models(values: Mapping[str, Any]) -> list[str]:
    """A line for each key that somebody chose and that a run of a program's own model does not read."""
    if not str(values.get("model", "")).startswith(OWN_MODEL):
        return []
    foreign = RunConfig.keys_with(Fact.TEXTS)
    return [
        f"{key} = {value!r}: is for language models; leave it out with a model of your own"
        for key, value in values.items()
        if key in foreign and value != BY_RECIPE
    ]


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A file's values with the overrides in their place; InputError for both a noise multiplier and a target.

    In a run's own config.toml the noise is what its target came to, which is derived again.
    """
    merged = {**values, **overrides}
    if is_resolved(values) and _targets_of(merged) and "noise_multiplier" not in overrides:
        merged.pop("noise_multiplier", None)
    for problem in two_noises(merged):
        raise InputError(problem)
    return merged


def read(path: Path) -> dict[str, Any]:
    """The key-value pairs of a TOML file, not yet checked; InputError if it is missing, unreadable or not TOML."""
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not a TOML file ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` pairs as given after `-c`; one that is not TOML is text. InputError without `=`."""
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
        is_chosen: whether it has the values that were asked for of keys that vary.
    """

    varied: Mapping[str, Any]
    values: Mapping[str, Any]
    auto_batch: bool
    is_chosen: bool


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
        overrides: change the keys of every run. Of a key that varies, other than the engine, they choose the runs that
            have this value.

    Raises:
        InputError: the grid or the runs have another form, a key must not be there, or no run has the values.
    """
    base = dict(values)
    title = base.pop("title", title)
    grid, listed = base.pop("grid", {}), base.pop("runs", [{}])
    _check_sweep(source, grid, listed)
    keys = tuple(dict.fromkeys([*(key for run in listed for key in run), *grid]))
    given = dict(overrides or {})
    chosen = {key: given.pop(key) for key in keys if key in given and key != "engine"}
    found = []
    for run in listed:
        for options in product(*grid.values()):
            varied = {**run, **dict(zip(grid, options, strict=True))}
            own = {**base, **varied}
            is_chosen = all(own.get(key, getattr(RunConfig, key, None)) == value for key, value in chosen.items())
            found.append(_point(with_overrides(base, {**varied, **given}), varied, is_chosen=is_chosen))
    if not any(point.is_chosen for point in found):
        asked = ", ".join(f"{key} = {value!r}" for key, value in chosen.items())
        known = {key: list(dict.fromkeys(str(p.varied[key]) for p in found if key in p.varied)) for key in chosen}
        there = "; ".join(f"{key}: {', '.join(values)}" for key, values in known.items())
        raise InputError(f"{asked}: no run of {source} has it; there are {there}")
    return str(title), keys, found


def _check_sweep(source: str, grid: Any, listed: Any) -> None:
    if not isinstance(grid, dict):
        raise InputError(f"{source}: grid = {grid!r}: must be a table of lists, for instance rank = [4, 8]")
    for key, options in grid.items():
        if not isinstance(options, list) or not options:
            raise InputError(f"{source}: grid.{key} = {options!r}: must be a list of at least one value")
    if not isinstance(listed, list) or not listed or not all(isinstance(run, dict) for run in listed):
        raise InputError(f"{source}: runs = {listed!r}: must be tables, each under [[runs]]")


def _point(values: dict[str, Any], varied: dict[str, Any], *, is_chosen: bool) -> SweepPoint:
    for key in RunConfig.keys_with(Fact.BY_SWEEP):
        if values.get(key):
            raise InputError(f"{key} = {values[key]!r}: the sweep sets it for every run; leave it out")
    if "track" in varied:
        raise InputError(f"track = {varied['track']!r}: one tracker shows the whole sweep; give it outside of the grid")
    auto = values.get("batch_size") == _AUTO
    values = {**values, "batch_size": 1} if auto else values
    return SweepPoint(varied=varied, values=values, auto_batch=auto, is_chosen=is_chosen)


def parse(values: Mapping[str, Any]) -> RunConfig:
    """The configuration that the values describe; an InputError names the key, the value and what would be right."""
    config, problems = checked(values)
    if config is None:
        raise InputError(problems[0])
    return config


def checked(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """The configuration that the values describe, or None; and what is wrong with them, one line for each problem.

    Keys that do not fit together are found only once every single one is right.
    """
    problems = [_unknown(key) for key in values if key not in KEYS]
    if not is_resolved(values):
        problems += two_noises(values) + foreign_to_own_models(values)
    known = {key: value for key, value in values.items() if key in KEYS}
    try:
        config = RunConfig(**known)
    except ValidationError as error:
        return None, problems + _lines(error, known)
    return (None if problems else config), problems


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(KEYS)}"
    return f"{key}: unknown configuration key{hint}"


def _lines(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """One line for each key, or set of keys, that is wrong."""
    lines: dict[str, str] = {}
    for each in error.errors():
        message = each["msg"].removeprefix("Value error, ")
        if not each["loc"]:  # of all keys together: our own checks name them and their values
            cause = each.get("ctx", {}).get("error")
            return list(getattr(cause, "lines", None) or [" ".join(message.split())])
        key = str(each["loc"][0])
        value = values.get(key, each["input"])  # a recipe may derive it from a key that is wrong too
        lines.setdefault(key, f"{key} = {value!r}: {message[:1].lower()}{message[1:]}")
    return list(lines.values())


def to_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML; `parse` of it gives the same configuration."""
    return tomli_w.dumps({key: list(v) if isinstance(v, tuple) else v for key, v in _without_null(config)})


def to_flower(config: RunConfig) -> dict[str, Scalar]:
    """The configuration as Flower's run configuration, which holds scalars only."""
    return {key: _joined(v) if isinstance(v, tuple) else v for key, v in _without_null(config)}


def _joined(values: tuple[Any, ...]) -> str:
    """`a,b`, or a JSON list if `a,b` would be read as something else."""
    text = ",".join(map(str, values))
    return text if split(text) == tuple(map(str, values)) else json.dumps(list(values))


def _without_null(config: RunConfig) -> list[tuple[str, Any]]:
    """Keys and values, with the empty string for None."""
    return [(key, "" if value is None else value) for key, value in asdict(config).items()]


def with_mechanism_parameters(config: RunConfig) -> RunConfig:
    """The configuration with the mechanism's parameters in place of their file's name, or an InputError."""
    text = config.mechanism_parameters
    if config.mechanism_parameters_are_a_file:
        try:
            text = read_text(Path(text.strip()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise InputError(f"mechanism_parameters = {text!r}: cannot be read ({reason})") from None
    text = MECHANISMS.checked_parameters(config.mechanism, text, config.noise_multiplier)
    return config if text == config.mechanism_parameters else parse(asdict(config) | {"mechanism_parameters": text})

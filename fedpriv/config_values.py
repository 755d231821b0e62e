"""Values of a configuration before they are checked: from a file or after `-c`, and who chose them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.recipes import BY_RECIPE

# Keys that only say where a run's files are.
LOCATION_KEYS = ("out", "ledger", "node_keys", "resume")
# They and where its figures are shown do not affect a run's results, so its digest leaves them out.
OUTSIDE_KEYS = (*LOCATION_KEYS, "track")


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

    In a run's own config.toml the noise is what its target came to, which is derived anew.

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

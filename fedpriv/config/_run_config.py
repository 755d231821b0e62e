"""The configuration of a run: one flat, frozen list of keys, the same in TOML, after `-c` and with `flwr run`."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ConfigDict, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from fedpriv.config._checks import check_fit
from fedpriv.config._keys import ConfigValues, split
from fedpriv.config._recipes import with_recipe
from fedpriv.config._values import OUTSIDE_KEYS, is_resolved, two_noises
from fedpriv.errors import InputError
from fedpriv.mechanisms.registry import MECHANISMS, with_current_keys

Scalar = str | int | float | bool
"""A value in Flower's run configuration."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RunConfig(ConfigValues):
    """Everything that a run depends on, except its data. docs/configuration.md explains each key.

    Raises:
        pydantic.ValidationError: a value has the wrong type or is out of range; `parse` turns it into one line.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, given: ArgsKwargs) -> dict[str, Any]:
        return with_recipe(given.kwargs or {})

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        check_fit(self)
        return self

    @property
    def without_noise(self) -> RunConfig:
        """The configuration of the comparison run: z = 0, clipping kept, since clipping is part of the optimiser."""
        return replace(
            self,
            noise_multiplier=0.0,
            start_noise_multiplier=0.0 if self.head_start else None,
            lora_noise_multiplier=None if self.lora_rounds is None else 0.0,
            mechanism="gaussian",
            mechanism_parameters="",
            target_epsilon=None,
            budget_epsilon=(),
            privacy_view="local",
            secure_aggregation=False,
            secure_masks=None,
            client_weights="records" if self.weighs_records else self.client_weights,
            comparison=False,
            baselines=False,
            variant_rounds=(),
            dedup="",
            integral_epsilon=None,
            track="none",
            ledger="",
            out="",
            resume="",
        )

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all keys except `OUTSIDE_KEYS`."""
        values = {key: value for key, value in asdict(self).items() if key not in OUTSIDE_KEYS}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


KEYS = tuple(field.name for field in fields(RunConfig))
"""The keys of a run's configuration, in their order."""


def parse(values: Mapping[str, Any]) -> RunConfig:
    """The configuration that the values describe.

    Raises:
        InputError: one line that names the key, the value and what would be right.
    """
    config, problems = checked(values)
    if config is None:
        raise InputError(problems[0])
    return config


def checked(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """The configuration that the values describe, or None; and what is wrong with them, one line for each problem.

    Keys that do not fit together are found only once every single one is right.

    Raises:
        InputError: a key of an earlier version has no current form.
    """
    values = with_current_keys(values)
    problems = [_unknown(key) for key in values if key not in KEYS]
    if not is_resolved(values):
        problems += two_noises(values)
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
    """The configuration with the mechanism's parameters in place of their file's name, as one canonical line.

    Raises:
        InputError: there is no such file, or it holds none that the mechanism takes.
    """
    text = config.mechanism_parameters
    if config.mechanism_parameters_are_a_file:
        try:
            text = Path(text.strip()).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise InputError(f"mechanism_parameters = {text!r}: cannot be read ({reason})") from None
    text = MECHANISMS.checked_parameters(config.mechanism, text, config.noise_multiplier)
    return config if text == config.mechanism_parameters else parse(asdict(config) | {"mechanism_parameters": text})

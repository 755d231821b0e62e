"""The parameters of a run's noise mechanism, from the file that its configuration names."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.mechanisms.registry import MECHANISMS


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

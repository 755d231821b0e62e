"""The noise that a run's configuration asks for: its parameters from their file, its scale for a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.calibration import Schedule, calibrate_all
from fedpriv.accounting.events import Event
from fedpriv.accounting.views import default_delta
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.mechanisms.registry import MECHANISMS
from fedpriv.training.local_update import UpdateSpec, planned_event
from fedpriv.training.private_evaluation import EvaluationSpec
from fedpriv.training.private_evaluation import planned_event as planned_evaluation


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


def calibrated(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> RunConfig:
    """The configuration with the noise multiplier that its `target_epsilon` needs, if it has one.

    A client is assumed to take part in every round, and in the evaluation on its records if there is one. On the `rho`
    view the worst case over who may drop out counts: rho_bar of n participants is never below 1 / sqrt(n).

    Raises:
        InputError: no noise meets the target.
    """
    target = config.target_epsilon
    if target is None:
        return config
    selected = min(config.clients_per_round or len(sizes), len(sizes))
    scale = 1 / math.sqrt(selected) if config.privacy_view == "rho" else 1.0
    schedules = [
        (_schedule(config, min(1.0, config.batch_size / size), initial, scale), config.delta or default_delta(size))
        for size in sizes
    ]
    evaluation = EvaluationSpec.of(config)
    fixed = [planned_evaluation(evaluation)] if evaluation else []
    cost = epsilon_of(fixed, min(delta for _, delta in schedules)).epsilon
    if cost >= target:
        raise InputError(
            f"evaluation_noise_multiplier = {config.evaluation_noise_multiplier}: the evaluation alone costs epsilon "
            f"{cost:.4g} of target_epsilon = {target}; use more noise for it"
        )
    try:
        return replace(config, noise_multiplier=calibrate_all(schedules, target, fixed=fixed))
    except ValueError as error:
        raise InputError(f"target_epsilon = {target}: {error}") from None


def _schedule(config: RunConfig, sampling_probability: float, initial: Adapter, scale: float) -> Schedule:
    """All releases of a client in every round, by the noise multiplier, with the noise that the view counts."""
    spec = UpdateSpec.of(config)

    def schedule(noise_multiplier: float) -> Event:
        event = planned_event(replace(spec, noise_multiplier=noise_multiplier), sampling_probability, initial)
        return event.with_count(config.rounds * event.count).with_noise(scale)

    return schedule

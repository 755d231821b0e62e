"""The noise that a run's configuration asks for: its parameters from their file, its scale for a target epsilon."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedpriv.accounting.calibration import lmo_multiplier_for_all, noise_multiplier_for_all
from fedpriv.accounting.events import Event, SubsampledGaussian, SubsampledLmo
from fedpriv.accounting.lmo import parameters as lmo_parameters
from fedpriv.accounting.views import default_delta
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.training.local_update import UpdateSpec, planned_event


def with_lmo_parameters(config: RunConfig) -> RunConfig:
    """The configuration with the parameters of its LMO noise themselves, where it names a file that has them.

    Raises:
        InputError: there is no such file, or it holds none.
    """
    if config.mechanism != "lmo":
        return config
    text = config.lmo_parameters.strip()
    if not text.startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise InputError(f"lmo_parameters = {config.lmo_parameters!r}: cannot be read ({reason})") from None
    return replace(config, lmo_parameters=json.dumps(lmo_parameters.to_dict(lmo_parameters.from_json(text))))


def calibrated(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> RunConfig:
    """The configuration with the noise multiplier that its `target_epsilon` needs, if it has one.

    A client is assumed to take part in every round. On the `rho` view the worst case over who may drop out counts:
    rho_bar of n participants is never below 1 / sqrt(n).

    Raises:
        InputError: no noise meets the target.
    """
    target = config.target_epsilon
    if target is None:
        return config
    selected = min(config.clients_per_round or len(sizes), len(sizes))
    view = 1 / math.sqrt(selected) if config.privacy_view == "rho" else 1.0
    spec = replace(UpdateSpec.of(config), noise_multiplier=1.0)
    clients = [
        (planned_event(spec, min(1.0, config.batch_size / size), initial), config.delta or default_delta(size))
        for size in sizes
    ]
    try:
        return replace(config, noise_multiplier=_multiplier(target, clients, config.rounds, view))
    except ValueError as error:
        raise InputError(f"target_epsilon = {target}: {error}") from None


def _multiplier(target: float, clients: Sequence[tuple[Event, float]], rounds: int, view: float) -> float:
    gaussians = [(event, delta) for event, delta in clients if isinstance(event, SubsampledGaussian)]
    if gaussians:
        return noise_multiplier_for_all(
            target,
            [(event.sampling_probability, delta) for event, delta in gaussians],
            steps=rounds * gaussians[0][0].count,
            scale=view * gaussians[0][0].noise_multiplier,
        )
    # LMO noise times rho_bar is the same noise for a sensitivity divided by it.
    lmo = [
        (replace(event, count=rounds * event.count, sensitivity=event.sensitivity / view), delta)
        for event, delta in clients
        if isinstance(event, SubsampledLmo)
    ]
    return lmo_multiplier_for_all(target, lmo)

"""DP-SGD on all weights of a small network, and the events that pay for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedpriv.accounting.events import Event
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training.noised_sum import noised_sum
from fedpriv.training.sampling import PoissonSampler
from simulations.studies.dedup.digits import Digits

# Per-sample gradients held in memory at once.
_ROWS = 128

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a network is trained under differential privacy.

    Attributes:
        steps: noisy steps, >= 1.
        expected_batch_size: B of Poisson sampling.
        learning_rate: of the optimizer, applied to the noised sum over B.
        optimizer: `sgd` or `adam`; it is post-processing.
        clip_norm: C, gradient units.
    """

    steps: int
    expected_batch_size: int
    learning_rate: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip_norm: float = 1.0


def per_sample_rows(model: nn.Module, parameters: Mapping[str, Tensor], records: Digits) -> Tensor:
    """The gradient of each record's loss by all weights, [records, values], in the order of the parameters."""

    def loss(values: Mapping[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, dict(values), (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(dict(parameters), records.images, records.labels)
    return torch.cat([gradients[name].flatten(1) for name in parameters], dim=1)


def train_privately(
    model: nn.Module,
    records: Digits,
    schedule: Schedule,
    *,
    noise_multiplier: float,
    source: RandomSource,
) -> list[Event]:
    """Train all weights in place, and return one event for each step.

    Guarantee: each step is one Gaussian mechanism on a Poisson sample, with the rate and the noise that its event
    states; everything else is post-processing. With a seeded source it protects nobody.

    Args:
        model: has no layer that mixes records.
        records: registered number and data, at least one.
        schedule: see there.
        noise_multiplier: z >= 0.
        source: of sampling and noise.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    flat = torch.cat([value.flatten() for value in parameters.values()])
    sampler = PoissonSampler(
        num_registered=len(records), expected_batch_size=schedule.expected_batch_size, source=source
    )
    optimizer = OPTIMIZERS[schedule.optimizer]([flat], lr=schedule.learning_rate)
    average, events = torch.zeros_like(flat), []
    for step in range(schedule.steps):
        chosen = sampler.draw(len(records))
        pieces = [chosen[begin : begin + _ROWS] for begin in range(0, len(chosen), _ROWS)]
        noised, event = noised_sum(
            (per_sample_rows(model, parameters, Digits(records.images[few], records.labels[few])) for few in pieces),
            flat,
            clip_norm=schedule.clip_norm,
            noise_multiplier=noise_multiplier,
            sampling_probability=sampler.sampling_probability,
            source=source,
        )
        events.append(event)
        flat.grad = noised / schedule.expected_batch_size
        optimizer.step()
        parameters = _pieces(flat, parameters)
        if step >= schedule.steps // 2:
            average += flat / (schedule.steps - schedule.steps // 2)
    model.load_state_dict(_pieces(average, parameters))
    return events


def _pieces(flat: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values under the parameters' names and in their shapes."""
    pieces = flat.split([value.numel() for value in parameters.values()])
    return {name: piece.view_as(parameters[name]) for name, piece in zip(parameters, pieces, strict=True)}


def train_publicly(model: nn.Module, records: Digits, *, steps: int, learning_rate: float = 1e-3) -> None:
    """Train all weights in place by Adam on public records, with all records in every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(records.images), records.labels).backward()
        optimizer.step()

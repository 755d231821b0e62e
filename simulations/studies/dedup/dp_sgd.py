"""DP-SGD on all weights of a network, and the events that pay for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv.accounting.events import Event
from fedpriv.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training import PoissonSampler
from simulations.studies.dedup.full_dp import add_clipped_gradients
from simulations.studies.dedup.records import Pass, StudyRecords

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@dataclass(frozen=True, kw_only=True)
class DpSgdSchedule:
    """How a network is trained under differential privacy.

    Attributes:
        steps: noisy steps, >= 1.
        expected_batch_size: B of Poisson sampling.
        learning_rate: of the optimizer, applied to the noised sum over B.
        optimizer: `sgd` or `adam`; it is post-processing.
        clip_norm: C, gradient units.
        averaged: share of the iterates, the last ones, whose mean is the model, in (0, 1].
    """

    steps: int
    expected_batch_size: int
    learning_rate: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip_norm: float = 1.0
    averaged: float = 0.5


def train_privately(
    model: nn.Module,
    records: StudyRecords,
    schedule: DpSgdSchedule,
    *,
    noise_multiplier: float,
    source: RandomSource,
) -> list[Event]:
    """Train all weights in place, and return one event for each step.

    Guarantee: each step is one Gaussian mechanism on a Poisson sample, with the rate and the noise that its event
    states; everything else is post-processing. With a seeded source it protects nobody.

    Args:
        model: has no layer that mixes records; see `add_clipped_gradients`.
        records: registered number and data, at least one.
        schedule: see there.
        noise_multiplier: z >= 0.
        source: of sampling and noise.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    parameters = dict(model.named_parameters())
    flat = torch.cat([value.detach().flatten().float() for value in parameters.values()])
    sampler = PoissonSampler(
        num_registered=len(records), expected_batch_size=schedule.expected_batch_size, source=source
    )
    optimizer = OPTIMIZERS[schedule.optimizer]([flat], lr=schedule.learning_rate)
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=schedule.clip_norm,
        dimension=len(flat),
        sampling_probabilities=(sampler.sampling_probability,),
    )
    num_averaged = max(1, round(schedule.averaged * schedule.steps))
    average, events = torch.zeros_like(flat), []
    for step in range(schedule.steps):
        total = clipped_sum(model, records, sampler.draw(len(records)), schedule.clip_norm)
        noised, (event,) = MECHANISMS["gaussian"].add_noise(total.double().unsqueeze(0), request, [source])
        events.append(event)
        flat.grad = noised[0].float() / schedule.expected_batch_size
        optimizer.step()
        _put(model, flat)
        if step >= schedule.steps - num_averaged:
            average += flat / num_averaged
    _put(model, average)
    return events


def clipped_sum(model: nn.Module, records: StudyRecords, chosen: list[int], clip_norm: float) -> Tensor:
    """The sum of the chosen records' clipped gradients by all weights, float32 [values], in the parameters' order."""
    parameters = dict(model.named_parameters())
    total = torch.zeros(sum(value.numel() for value in parameters.values()))
    views = _pieces(total, parameters)
    for one in records.passes(chosen):
        add_clipped_gradients(views, model, lambda one=one: losses(model, one), clip_norm)  # type: ignore[misc]
    return total


def losses(model: nn.Module, one: Pass) -> Tensor:
    """The cross-entropy of each record of a pass, float32 [rows]."""
    inputs, labels = one
    return F.cross_entropy(model(inputs), labels, reduction="none")


def _pieces(flat: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values under the parameters' names and in their shapes."""
    pieces = flat.split([value.numel() for value in parameters.values()])
    return {name: piece.view_as(parameters[name]) for name, piece in zip(parameters, pieces, strict=True)}


@torch.no_grad()
def _put(model: nn.Module, flat: Tensor) -> None:
    """Give the model these weights, in the types that its own have."""
    parameters = dict(model.named_parameters())
    for name, piece in _pieces(flat, parameters).items():
        parameters[name].copy_(piece)


def train_publicly(
    model: nn.Module, records: StudyRecords, *, epochs: int = 1, batch_size: int = 64, learning_rate: float = 1e-3
) -> None:
    """Train the weights that need a gradient in place by Adam on public records, at a rate that falls to zero."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    batches = [batch for seed in range(epochs) for batch in _order(len(records), seed).split(batch_size)]
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - step / len(batches))
        optimizer.zero_grad()
        for one in records.passes(batch.tolist()):
            (losses(model, one).sum() / len(batch)).backward()
        optimizer.step()


def _order(num_records: int, seed: int) -> Tensor:
    return torch.randperm(num_records, generator=torch.Generator().manual_seed(seed))

"""DP-SGD on all weights of a small network, the baseline for integrally private models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedpriv.accounting.events import Event
from fedpriv.integral.networks import from_vectors, to_vector
from fedpriv.integral.subsamples import Indices
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training.clipping import add_clipped
from fedpriv.training.sampling import PoissonSampler
from fedpriv.training.summing import noised_sum

# How many values of per-sample gradients are held in memory at once.
_VALUES_AT_ONCE = 2**23


@dataclass(frozen=True, kw_only=True)
class PrivateSchedule:
    """How a network is trained under differential privacy.

    Attributes:
        steps: noisy steps, >= 1.
        expected_batch_size: B of Poisson sampling.
        learning_rate: of plain SGD on the noised sum divided by B.
        clip_norm: C, gradient units.
    """

    steps: int = 50
    expected_batch_size: int
    learning_rate: float = 0.5
    clip_norm: float = 1.0


def train_privately(
    network: nn.Module,
    features: Tensor,
    labels: Tensor,
    schedule: PrivateSchedule,
    *,
    noise_multiplier: float,
    source: RandomSource,
) -> tuple[Tensor, list[Event]]:
    """The weights after training, [values], and one event for each step.

    Guarantee: under add-or-remove adjacency, each step is one Gaussian mechanism on a Poisson sample with the sampling
    probability and noise multiplier of its event; everything else is post-processing. A seeded source gives no
    privacy.

    Args:
        network: with the initial weights; no layer may mix records.
        features: [records, ...]; their number is the registered one.
        labels: int64 [records].
        schedule: see `PrivateSchedule`.
        noise_multiplier: z >= 0.
        source: of sampling and noise.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    vector = to_vector(network).to(features)
    size = schedule.expected_batch_size
    sampler = PoissonSampler(num_registered=len(labels), expected_batch_size=size, source=source)
    events = []
    for _ in range(schedule.steps):
        chosen = torch.tensor(sampler.draw(len(labels)), dtype=torch.int64)
        pieces = torch.split(chosen, max(1, _VALUES_AT_ONCE // len(vector)))
        noised, event = noised_sum(
            (
                _per_sample(network, vector.unsqueeze(0), features[piece].unsqueeze(0), labels[piece].unsqueeze(0))[0]
                for piece in pieces
            ),
            vector,
            clip_norm=schedule.clip_norm,
            noise_multiplier=noise_multiplier,
            sampling_probability=sampler.sampling_probability,
            source=source,
        )
        events.append(event)
        vector = vector - schedule.learning_rate * noised / size
    return vector, events


def train_clipped_stacked(
    network: nn.Module, features: Tensor, labels: Tensor, records: Indices, schedule: PrivateSchedule
) -> Tensor:
    """The weights, [networks, values], that `train_privately` would give without noise and sampling.

    An intruder compares a private model with these: every step uses all records and clips each gradient.

    Args:
        network, features, labels, schedule: as for `train_privately`.
        records: int64 [networks, size], the rows of the data on which each network is trained.
    """
    rows = torch.from_numpy(records)
    start = to_vector(network).to(features)
    at_once = max(1, _VALUES_AT_ONCE // (len(start) * records.shape[1]))
    return torch.cat(
        [_clipped(network, start, features[chunk], labels[chunk], schedule) for chunk in torch.split(rows, at_once)]
    )


def _clipped(network: nn.Module, start: Tensor, features: Tensor, labels: Tensor, schedule: PrivateSchedule) -> Tensor:
    """Clipped gradient descent of several networks; features [networks, size, ...], labels [networks, size]."""
    vectors = start.repeat(len(labels), 1)
    owners = torch.arange(len(labels)).repeat_interleave(labels.shape[1])
    for _ in range(schedule.steps):
        gradients = _per_sample(network, vectors, features, labels)
        totals = torch.zeros_like(vectors, dtype=torch.float64)
        add_clipped(totals, gradients.flatten(0, 1), owners, schedule.clip_norm, (slice(0, vectors.shape[1]),))
        vectors = vectors - schedule.learning_rate * totals.to(vectors.dtype) / labels.shape[1]
    return vectors


def _per_sample(network: nn.Module, vectors: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Per-sample gradients with respect to each network's weights, [networks, records, values]."""

    def loss(weights: Mapping[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, dict(weights), (record.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    of_records = vmap(grad(loss), in_dims=(None, 0, 0))
    gradients = vmap(of_records)(from_vectors(network, vectors), features, labels)
    return torch.cat([part.flatten(2) for part in gradients.values()], dim=2)

"""Training of many small networks at once: parameters are stacked along a first dimension, one step updates all.

DP-SGD on all weights is the baseline for integrally private models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.learning.training import PoissonSampler
from fedpriv.learning.training.private_sums import add_clipped, clipped_sums, noised_sum
from fedpriv.methods.integral._networks import from_vectors, is_perceptron, to_vector
from fedpriv.methods.integral._subsamples import Indices
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.mechanisms.sources import RandomSource

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
"""Optimizers by name, each at PyTorch's defaults."""

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Logits, [networks, batch, classes], from stacked weights and their batches, [networks, batch, ...]."""


@dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """How each network is trained.

    Attributes:
        epochs: passes over its records, >= 1.
        batch_size: records per step, >= 1; the last batch of an epoch may be smaller.
        learning_rate: > 0.
        optimizer: `sgd` or `adam`, with PyTorch's defaults.
    """

    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 0.1
    optimizer: Literal["sgd", "adam"] = "sgd"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise InputError(f"epochs = {self.epochs}, batch_size = {self.batch_size}: must be >= 1")
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(f"learning_rate = {self.learning_rate}: must be finite and > 0")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer = {self.optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")


def batch_order(size: int, schedule: TrainingSchedule, seed: int) -> list[list[Tensor]]:
    """The batches of each epoch, as indices into a subsample: one order for all networks.

    Any two networks then differ only by their records.
    """
    generator = np.random.default_rng(seed)
    epochs = [torch.from_numpy(generator.permutation(size)) for _ in range(schedule.epochs)]
    return [list(torch.split(order, schedule.batch_size)) for order in epochs]


def train_stacked(
    network: nn.Module,
    features: Tensor,
    labels: Tensor,
    records: Indices,
    schedule: TrainingSchedule,
    *,
    seed: int,
    keep: Collection[int] = (),
) -> dict[int, Tensor]:
    """{epoch: weights of all networks, [networks, values]}, all trained from the weights of `network`.

    Guarantee: each network's weights are, up to rounding, those of a plain training loop over its own records.

    Args:
        network: logits [batch, classes] of features [batch, ...]; no buffers, and no random layers.
        features: [records, ...].
        labels: int64 [records], classes from 0.
        records: int64 [networks, size], the rows of the data on which each network is trained.
        schedule: see `Schedule`; the loss is the mean cross-entropy of a batch.
        seed: of the order of the batches.
        keep: epochs to return in addition to the last.

    Raises:
        InputError: the network has buffers, which a joint pass would mix.
    """
    if any(True for _ in network.buffers()):
        raise InputError("network: has buffers, such as those of batch normalisation; use a module without them")
    # On the device and in the dtype of the data, so that the caller chooses both.
    start = to_vector(network).to(features)
    values = start.repeat(len(records), 1)
    weights = {name: part.clone().requires_grad_() for name, part in from_vectors(network, values).items()}
    optimizer = OPTIMIZERS[schedule.optimizer](list(weights.values()), lr=schedule.learning_rate)
    rows = torch.from_numpy(records).to(features.device)
    forward = _forward(network, features)
    kept: dict[int, Tensor] = {}
    for epoch, batches in enumerate(batch_order(records.shape[1], schedule, seed), start=1):
        for batch_indices in batches:
            chosen = rows[:, batch_indices]
            # Several times as fast as features[chosen].
            batch = features.index_select(0, chosen.flatten()).view(*chosen.shape, *features.shape[1:])
            logits = forward(weights, batch)
            # The networks share no weights, so the gradient of the sum is each network's own.
            loss = F.cross_entropy(logits.flatten(0, 1), labels[chosen].flatten(), reduction="sum")
            loss = loss / len(batch_indices)
            for part, gradient in zip(weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True):
                part.grad = gradient
            optimizer.step()
        if epoch in keep or epoch == schedule.epochs:
            kept[epoch] = torch.cat([part.detach().flatten(1) for part in weights.values()], dim=1)
    return kept


def _forward(network: nn.Module, features: Tensor) -> Forward:
    """One forward pass of all networks: by plain products for perceptrons, and by the slower vmap for other modules."""
    if not is_perceptron(network) or features.dim() != 2:
        mapped: Forward = vmap(lambda own, batch: functional_call(network, dict(own), (batch,)))
        return mapped

    def forward(weights: Mapping[str, Tensor], batch: Tensor) -> Tensor:
        # Features first: this order makes backward passes through small products several times as fast.
        hidden = batch.mT
        for name, module in network.named_children():
            if not isinstance(module, nn.Linear):
                hidden = module(hidden)
            elif f"{name}.bias" in weights:
                hidden = torch.baddbmm(weights[f"{name}.bias"].unsqueeze(2), weights[f"{name}.weight"], hidden)
            else:
                hidden = torch.bmm(weights[f"{name}.weight"], hidden)
        return hidden.mT

    return forward


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
        totals = torch.zeros_like(vectors, dtype=torch.int64)
        add_clipped(totals, gradients.flatten(0, 1), owners, schedule.clip_norm, (slice(0, vectors.shape[1]),))
        sums = clipped_sums(totals, schedule.clip_norm).to(vectors.dtype)
        vectors = vectors - schedule.learning_rate * sums / labels.shape[1]
    return vectors


def _per_sample(network: nn.Module, vectors: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Per-sample gradients with respect to each network's weights, [networks, records, values]."""

    def loss(weights: Mapping[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, dict(weights), (record.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    of_records = vmap(grad(loss), in_dims=(None, 0, 0))
    gradients = vmap(of_records)(from_vectors(network, vectors), features, labels)
    return torch.cat([part.flatten(2) for part in gradients.values()], dim=2)

"""Many small networks trained at once: parameters stacked along a first dimension, one step for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.integral.networks import from_vectors, is_perceptron, to_vector
from fedpriv.integral.subsamples import Indices

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Logits, [networks, batch, classes], of stacked weights and their batches, [networks, batch, ...]."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How each network is trained.

    Attributes:
        epochs: passes over its records, >= 1.
        batch_size: records of a step, >= 1; the last batch of an epoch may hold fewer.
        learning_rate: > 0.
        optimizer: `sgd` or `adam`, at PyTorch's defaults.
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


def batch_order(size: int, schedule: Schedule, seed: int) -> list[list[Tensor]]:
    """For each epoch its batches, as places within a subsample: one order for all networks.

    Two networks then differ by their records alone.
    """
    generator = np.random.default_rng(seed)
    epochs = [torch.from_numpy(generator.permutation(size)) for _ in range(schedule.epochs)]
    return [list(torch.split(places, schedule.batch_size)) for places in epochs]


def train_stacked(
    network: nn.Module,
    features: Tensor,
    labels: Tensor,
    records: Indices,
    schedule: Schedule,
    *,
    seed: int,
    keep: Collection[int] = (),
) -> dict[int, Tensor]:
    """{epoch: weights of all networks, [networks, values]}, all trained from the weights that `network` has.

    Guarantee: each network's weights are, up to rounding, those that a plain loop over its own records gives.

    Args:
        network: logits [batch, classes] of features [batch, ...]; no buffers, and no layer that draws at random.
        features: [records, ...].
        labels: int64 [records], classes from 0.
        records: int64 [networks, size], rows of the data that each network is trained on.
        schedule: see there; the loss is the mean cross-entropy of a batch.
        seed: of the order of the batches.
        keep: epochs to return, beside the last.

    Raises:
        InputError: the network has buffers, which one pass for all would mix.
    """
    if any(True for _ in network.buffers()):
        raise InputError("network: has buffers, such as those of batch normalisation; use a module without them")
    # In the device and the type of the data, so that the caller chooses both.
    start = to_vector(network).to(features)
    values = start.repeat(len(records), 1)
    weights = {name: part.clone().requires_grad_() for name, part in from_vectors(network, values).items()}
    optimizer = OPTIMIZERS[schedule.optimizer](list(weights.values()), lr=schedule.learning_rate)  # type: ignore[call-arg]
    rows = torch.from_numpy(records).to(features.device)
    forward = _forward(network, features)
    found: dict[int, Tensor] = {}
    for epoch, batches in enumerate(batch_order(records.shape[1], schedule, seed), start=1):
        for places in batches:
            chosen = rows[:, places]
            # Several times as fast as features[chosen].
            batch = features.index_select(0, chosen.flatten()).view(*chosen.shape, *features.shape[1:])
            logits = forward(weights, batch)
            # The networks share no weight: the gradient of the sum is each network's own.
            loss = F.cross_entropy(logits.flatten(0, 1), labels[chosen].flatten(), reduction="sum") / len(places)
            for part, gradient in zip(weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True):
                part.grad = gradient
            optimizer.step()
        if epoch in keep or epoch == schedule.epochs:
            found[epoch] = torch.cat([part.detach().flatten(1) for part in weights.values()], dim=1)
    return found


def _forward(network: nn.Module, features: Tensor) -> Forward:
    """One pass of all networks: any module through vmap, and a perceptron, which that slows down, by plain products."""
    if not is_perceptron(network) or features.dim() != 2:
        found: Forward = vmap(lambda own, batch: functional_call(network, dict(own), (batch,)))
        return found

    def forward(weights: Mapping[str, Tensor], batch: Tensor) -> Tensor:
        # Features first: backward passes through small products are several times as fast in this order.
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

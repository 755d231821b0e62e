"""Training of many small networks at once: parameters are stacked along a first dimension, one step updates all."""

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

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Logits, [networks, batch, classes], from stacked weights and their batches, [networks, batch, ...]."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
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


def batch_order(size: int, schedule: Schedule, seed: int) -> list[list[Tensor]]:
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
    schedule: Schedule,
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

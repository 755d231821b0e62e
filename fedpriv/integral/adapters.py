"""Integral privacy in a federation: which clients' variants of one round recur.

Variants are compared by what they add to the model, the products B A, and by their heads: B and A are known only up to
a change of basis between them, so equal maps may have unequal factors. No further alignment is needed, since the frozen
base fixes the order of all neurons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import A_SUFFIX, B_SUFFIX, factors_of, non_lora_tensors
from fedpriv.errors import InputError
from fedpriv.integral.selection import Cluster, Linkage, Measure, Vectors, select

# Relative to a product's largest singular value: what float32 factors cannot tell from 0.
_NOISE_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurringVariants:
    """Clients whose variants are near each other, and their mean.

    Attributes:
        clients: members of the cluster.
        near_mean: clients whose variants are within epsilon of the mean; k counts them, each with records of its own.
        largest_difference: between any two members' maps.
        mean: an adapter whose products are the means of the members' products, of the rank that this takes.
    """

    clients: tuple[str, ...]
    near_mean: tuple[str, ...]
    largest_difference: float
    mean: Adapter

    @property
    def recurrence(self) -> int:
        """How many variants the cluster has."""
        return len(self.clients)

    @property
    def k(self) -> int:
        """Of k-anonymous epsilon-integral privacy of the mean; it holds for k >= 2."""
        return len(self.near_mean)


def recurring_adapters(
    adapters: Mapping[str, Mapping[str, Tensor]],
    epsilon: float,
    *,
    measure: Measure = "largest",
    clustering: Linkage = "first-member",
    scale: float = 1.0,
) -> list[RecurringVariants]:
    """The clusters of clients' variants by falling recurrence, each with its mean as an adapter.

    It is meant for variants of one round, that all started from one global model. Records of clients are taken to be
    disjoint. What it says is no differential privacy, and computing it from uploads costs none: it is post-processing.

    Args:
        adapters: {client: adapter}, tensors by peft's names; ranks may differ, if their scale is one.
        epsilon: finite, >= 0, units of weights of the model.
        measure: as for `select`, over the entries of scale * B A and of the head together.
        clustering: as for `select`.
        scale: LoRA's alpha / rank, which turns B A into what is added to the weights; > 0.

    Raises:
        InputError: no adapters, names or shapes that differ among them, or a value out of range.

    Source: Varshney and Torra 2023, Algorithm 1, with clients for subsamples (their section 5).
    """
    if not adapters:
        raise InputError("adapters: there are none")
    if not 0 < scale < float("inf"):
        raise InputError(f"scale = {scale}: must be finite and > 0")
    names = list(adapters)
    vectors = _vectors(adapters, scale)
    # Each client's records are one generator of their own.
    generators = [np.array([number]) for number in range(len(names))]
    found = select(vectors, generators, epsilon=epsilon, measure=measure, clustering=clustering)
    return [_variants(adapters, names, cluster) for cluster in found]


def mean_adapter(adapters: Mapping[str, Mapping[str, Tensor]]) -> Adapter:
    """An adapter whose products B A are the means of the adapters' products, and whose head is the mean of theirs.

    The mean of factors would be another map. The mean of k products of rank r has a rank of up to k r; all layers get
    the smallest rank that holds it exactly, up to float32, by zeros where a layer needs less. Save it with that rank
    and with the alpha that keeps alpha / rank.

    Args:
        adapters: {client: adapter} of equal names and shapes but for their ranks; at least one.
    """
    first, *_ = adapters.values()
    result = {
        name: torch.stack([adapter[name].double() for adapter in adapters.values()]).mean(dim=0).float()
        for name in non_lora_tensors(first)
    }
    pairs = {
        name: _mean_product([factors_of(adapter)[name] for adapter in adapters.values()]) for name in factors_of(first)
    }
    rank = max((left.shape[1] for left, _ in pairs.values()), default=0)
    for name, (left, right) in pairs.items():
        more = rank - left.shape[1]
        result[name + A_SUFFIX] = F.pad(right, (0, 0, 0, more))
        result[name + B_SUFFIX] = F.pad(left, (0, more))
    return {name: result[name] for name in first}


def _mean_product(factors: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(B, A) of the smallest rank >= 1 whose product is the mean of the products, by a QR of both sides and an SVD."""
    left = torch.cat([b.double() for b, _ in factors], dim=1) / len(factors)
    right = torch.cat([a.double() for _, a in factors], dim=0)
    outer, upper = torch.linalg.qr(left)
    inner, lower = torch.linalg.qr(right.T)
    u, sizes, v = torch.linalg.svd(upper @ lower.T)
    rank = max(1, int((sizes > _NOISE_FLOOR * sizes[0]).sum()))
    roots = sizes[:rank].sqrt()
    return (outer @ u[:, :rank] * roots).float(), (roots.unsqueeze(1) * (v[:rank] @ inner.T)).float()


def _vectors(adapters: Mapping[str, Mapping[str, Tensor]], scale: float) -> Vectors:
    """The maps and heads of all clients, float64 [clients, values]."""
    first_name, *_ = adapters
    shapes = _shapes(adapters[first_name])
    rows = []
    for client, adapter in adapters.items():
        if _shapes(adapter) != shapes:
            raise InputError(f"adapter of {client!r}: its layers or shapes are not those of {first_name!r}'s")
        products = [scale * (b.double() @ a.double()) for _, (b, a) in sorted(factors_of(adapter).items())]
        parts = [*products, *(non_lora_tensors(adapter)[name].double() for name in sorted(non_lora_tensors(adapter)))]
        rows.append(torch.cat([part.flatten() for part in parts]).numpy())
    return np.stack(rows)


def _shapes(adapter: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of the maps and of the head, by name."""
    maps = {name: (b.shape[0], a.shape[1]) for name, (b, a) in factors_of(adapter).items()}
    return maps | {name: tuple(tensor.shape) for name, tensor in non_lora_tensors(adapter).items()}


def _variants(adapters: Mapping[str, Mapping[str, Tensor]], names: list[str], cluster: Cluster) -> RecurringVariants:
    members = tuple(names[row] for row in cluster.members)
    return RecurringVariants(
        clients=members,
        near_mean=tuple(names[row] for row in cluster.near_mean),
        largest_difference=cluster.largest_difference,
        mean=mean_adapter({name: adapters[name] for name in members}),
    )

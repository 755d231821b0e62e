"""The weighted average of the uploaded tensors, tensor by tensor (Liu et al., Eq. 8), as it is or made ternary.

On A and B it is DP-LoRA's rule, which is inexact: the product of averages is not the average of products. On full
weights it is FedAvg, on B only, with A frozen and shared, FFA-LoRA, on B and A in turn, round by round, RoLoRA (Chen et
al. 2025, Algorithm 1), and on R between B and A, both frozen, Fed-SB (Singhal et al. 2025): these are exact, since the
model's weights are linear in what is averaged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedpriv.learning.adapters import Adapter, Merged

# Near the best threshold for normal and for uniform weights, in units of their mean magnitude (Li and Liu 2016); the
# paper has another.
_THRESHOLD = 0.7


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """The global model, as aggregation rules update it.

    Attributes:
        initial: the trained tensors before the first round, which every client can derive from the run's seed.
        adapter: the current trained tensors.
        merged: what has been added to the frozen weights.
        optimizer_state: {moment: {tensor: its value}} of the server's optimizer, float32; empty before its first step.
        last_update: how the last round changed `adapter`, if the rule uses it; empty before the first round.
    """

    initial: Adapter = field(repr=False)
    adapter: Adapter = field(repr=False)
    merged: Merged = field(default_factory=dict, repr=False)
    optimizer_state: Mapping[str, Adapter] = field(default_factory=dict, repr=False)
    last_update: Adapter = field(default_factory=dict, repr=False)


def weights_by_size(sizes: Mapping[int, float]) -> dict[int, float]:
    """rho_k = m_k / sum m_j over the given clients; the paper's N_k / N where sizes are numbers of records.

    Args:
        sizes: {client: m_k >= 1}, at least one client: registered N_k, or w_k N_k; never what a reply claims.

    Raises:
        ValueError: there is no client, or a size is below 1.
    """
    if not sizes:
        raise ValueError("sizes: weights need at least one client")
    for client, size in sizes.items():
        if size < 1:
            raise ValueError(f"size of client {client} = {size}: must be >= 1")
    total = math.fsum(sizes.values())
    return {client: size / total for client, size in sizes.items()}


def weighted_average(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """sum_k rho_k (A_k, B_k), tensor by tensor, accumulated in float64 and returned in float32.

    A and B are averaged separately, so the product of the averages is not the average of the products.

    Args:
        adapters: at least one, with equal names and shapes.
        weights: one for each adapter, summing to one.

    Raises:
        ValueError: names, shapes or counts differ, or the weights do not sum to one.

    Source: Liu et al., Eq. 8.
    """
    if len(adapters) != len(weights) or not adapters:
        raise ValueError(f"{len(adapters)} adapters and {len(weights)} weights: must be equally many, >= 1")
    if not math.isclose(math.fsum(weights), 1.0, rel_tol=1e-9):
        raise ValueError(f"weights sum to {math.fsum(weights)}: must sum to 1")
    shapes = {name: tensor.shape for name, tensor in adapters[0].items()}
    for adapter in adapters[1:]:
        if {name: tensor.shape for name, tensor in adapter.items()} != shapes:
            raise ValueError("adapters differ in names or shapes of their tensors")
    average = {}
    for name in shapes:
        total = torch.zeros(shapes[name], dtype=torch.float64)
        for adapter, weight in zip(adapters, weights, strict=True):
            total.add_(adapter[name].double(), alpha=weight)
        average[name] = total.float()
    return average


def average(model: GlobalModel, uploads: Sequence[Adapter], weights: Sequence[float]) -> GlobalModel:
    """The global model whose trained tensors are the weighted average of the uploads; see `weighted_average`."""
    return replace(model, adapter=weighted_average(uploads, weights))


def ternary_codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The signs of the values that are large in their row, zero for the rest, and the mean magnitude of the large ones.

    A row with only the values -s, 0 and s, not all zero, gives its signs and s.

    Args:
        rows: [rows, values].

    Returns:
        codes in {-1, 0, 1}, [rows, values], and scales >= 0, [rows, 1].
    """
    sizes = rows.abs()
    codes = rows.sign() * (sizes > _THRESHOLD * sizes.mean(dim=1, keepdim=True))
    coded = codes.abs().sum(dim=1, keepdim=True)
    return codes, (sizes * codes.abs()).sum(dim=1, keepdim=True) / coded.clamp(min=1)


def t_fedavg(model: GlobalModel, uploads: Sequence[Adapter], weights: Sequence[float]) -> GlobalModel:
    """The weighted average of the clients' ternary differences, quantised to ternary again, tensor by tensor.

    A pretrained model does not survive ternary weights, so here the difference to the pretrained ones is ternary, which
    all sides hold; with zeros in their place, it is the paper's scheme. Neither linear nor exact: quantising the
    average is biased.

    Source: Xu et al. 2020, Algorithm 2.
    """
    average = weighted_average(uploads, weights)
    return replace(model, adapter={name: _ternary(average[name], start) for name, start in model.initial.items()})


def _ternary(tensor: Tensor, start: Tensor) -> Tensor:
    codes, scale = ternary_codes((tensor.double() - start.double()).reshape(1, -1))
    return (start.double() + (codes * scale).view(start.shape)).to(torch.float32)

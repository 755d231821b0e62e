"""T-FedAvg (Xu et al. 2020): weights that are ternary on the wire, in both directions.

A pretrained model does not survive ternary weights. Here, the difference to the pretrained weights is ternary, and all
sides hold these; with zeros in their place, it is the paper's scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedpriv.learning.adapters import Adapter
from fedpriv.learning.aggregation._fedavg import GlobalModel, weighted_average

# Near the best threshold for normal and for uniform weights, in units of their mean magnitude (Li and Liu 2016); the
# paper has another.
_THRESHOLD = 0.7


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

    Neither linear nor exact: quantising the average is biased.

    Source: Xu et al. 2020, Algorithm 2.
    """
    average = weighted_average(uploads, weights)
    return replace(model, adapter={name: _ternary(average[name], start) for name, start in model.initial.items()})


def _ternary(tensor: Tensor, start: Tensor) -> Tensor:
    codes, scale = ternary_codes((tensor.double() - start.double()).reshape(1, -1))
    return (start.double() + (codes * scale).view(start.shape)).to(torch.float32)

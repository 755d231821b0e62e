"""T-FedAvg (Xu et al. 2020): weights that take three values on the wire in both directions.

A pretrained model does not survive three values for each weight. What is ternary here is the difference to the
pretrained weights, which all sides hold; with zeros in their place it is the paper's scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.aggregation.fedavg import weighted_average
from fedpriv.aggregation.global_model import GlobalModel

# Near the best threshold for normal and for uniform weights, in units of their mean size (Li and Liu 2016).
_THRESHOLD = 0.7


def ternary_codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of each value that is large in its row, zero for the others, and the mean size of the large ones.

    A row of three values -s, 0, s with at least one s gives its own signs and s.

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
    """The weighted average of the clients' ternary differences, made ternary again, tensor by tensor.

    Neither linear nor exact: making the average ternary again is biased.

    Args:
        model: before the round.
        uploads: of equal names and shapes.
        weights: summing to one.

    Raises:
        ValueError: as `weighted_average`.

    Source: Xu et al. 2020, Algorithm 2.
    """
    average = weighted_average(uploads, weights)
    return replace(model, adapter={name: _ternary(average[name], start) for name, start in model.initial.items()})


def _ternary(tensor: Tensor, start: Tensor) -> Tensor:
    codes, scale = ternary_codes((tensor.double() - start.double()).reshape(1, -1))
    return (start.double() + (codes * scale).view(start.shape)).to(torch.float32)

"""LoRA whose only trained part is a small matrix R between two frozen factors of the weight itself: B R A (LoRA-XS).

In the model, the module of B holds R and B one after the other, so whatever calls it gets B R. What is saved is
ordinary LoRA, with B R in the place of B. Nodes derive the factors from the same frozen weight by the same code, so R
alone travels. Two machines get the same singular vectors up to their signs, which are fixed here, and up to rotations
among those of equal singular values, which are refused. An R of a smaller rank is the leading block of a larger one
whose other entries are zero, and needs the factors' leading vectors alone.

Two papers do otherwise. LoRA-XS (Balazy et al. 2024) scales a factor by the singular values, so the same noise would
count more in some directions. Fed-SB (Singhal et al. 2025) takes the factors from gradients of records, which under
differential privacy would be a release.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.learning.adapters._arithmetic import A_SUFFIX, B_SUFFIX, INNER_SUFFIX, Adapter, Factors

OUTER_SUFFIX = ".lora_B.default.B.weight"  # see `INNER_SUFFIX`

# Two singular values that differ by less, relative to the largest one, leave their vectors to a machine's rounding. It
# moves vectors by its size over the difference: in float64, some 1e-13 for a large matrix, by no more than float32's.
_LEAST_GAP = 1e-6


@torch.no_grad()
def put_between(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Give LoRA layers of a peft model frozen factors, and a zero R between them.

    Args:
        model: whose parameters are on one device.
        factors: {layer: (B, A)}, float32 [out, n] and [k, in], for an R of [n, k].
    """
    for name, (left, right) in factors.items():
        layer: Any = model.get_submodule(name)
        inner = nn.Linear(right.shape[0], left.shape[1], bias=False)
        nn.init.zeros_(inner.weight)
        layer.lora_A["default"] = _linear(right)
        layer.lora_B["default"] = nn.Sequential(OrderedDict(R=inner, B=_linear(left)))


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.copy_(weight)
    return layer


def singular_factors(model: nn.Module) -> dict[str, Factors]:
    """{LoRA layer of a peft model: (B, A)}: singular vectors of its weight, as many as LoRA's rank, or as there are.

    Raises:
        InputError: a weight has no unique singular vectors; names its layer.
    """
    return {name: _of_weight(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def _of_weight(name: str, layer: Any) -> Factors:
    if "default" not in layer.lora_A:
        raise InputError(f"target_modules: {name} is no linear layer, and R lies between factors of a weight matrix")
    weight = layer.get_base_layer().weight
    try:
        return _singular_factors(weight.T if layer.fan_in_fan_out else weight, min(layer.r["default"], *weight.shape))
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None


def _singular_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(B, A) = (U, V^T) of a matrix's largest singular values: float32 [out, rank] and [rank, in], orthonormal.

    The largest entry of each row of A is positive.

    Args:
        weight: [out, in].
        rank: r >= 1, at most the number of rows and of columns.

    Raises:
        ValueError: singular values are too close to tell their vectors.

    Source: Balazy et al. 2024 (LoRA-XS), who scale one of the factors by the singular values.
    """
    u, values, v = torch.linalg.svd(weight.double().cpu(), full_matrices=False)
    bounded = torch.cat([values, values.new_zeros(1)])
    if not (bounded[:rank] - bounded[1 : rank + 1] > _LEAST_GAP * values[0]).all():
        raise ValueError(f"rank = {rank}: two of the weight's largest singular values are equal, so any basis would do")
    left, right = u[:, :rank], v[:rank]
    signs = right.gather(1, right.abs().argmax(dim=1, keepdim=True)).sign()
    return (left * signs.T).float(), (right * signs).float()


def as_ordinary(tensors: Mapping[str, Tensor]) -> Adapter:
    """An adapter's tensors by peft's names, with the product of R and a factor in its place; any other as it is.

    It is B R, or R A where R has fewer rows than columns, so that the rank is the smaller of the two.
    """
    result = dict(tensors)
    for name in tensors:
        if name.endswith(INNER_SUFFIX):
            stem = name.removesuffix(INNER_SUFFIX)
            inner = result.pop(name)
            rows, columns = inner.shape
            outer, first = result.pop(stem + OUTER_SUFFIX)[:, :rows], result[stem + A_SUFFIX][:columns]
            if rows < columns:
                first = (inner.double() @ first.double()).float()
            else:
                outer = (outer.double() @ inner.double()).float()
            result |= {stem + A_SUFFIX: first, stem + B_SUFFIX: outer}
    return result

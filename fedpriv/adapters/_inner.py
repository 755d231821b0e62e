"""LoRA whose only trained part is a small matrix R between two frozen factors of the weight itself: B R A (LoRA-XS).

In the model, the module of B holds R and B one after the other, so whatever calls it gets B R. What is saved is
ordinary LoRA, with B R in the place of B. Nodes derive the factors from the same frozen weight by the same code, so R
alone travels. Two machines get the same singular vectors up to their signs, which are fixed here, and up to rotations
among those of equal singular values, which are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from fedpriv.adapters._arithmetic import B_SUFFIX, INNER_SUFFIX, Adapter
from fedpriv.errors import InputError

OUTER_SUFFIX = ".lora_B.default.B.weight"  # see `INNER_SUFFIX`

# Two singular values that differ by less, relative to the largest one, leave their vectors to a machine's rounding. It
# moves vectors by its size over the difference: in float64, some 1e-13 for a large matrix, by no more than float32's.
_LEAST_GAP = 1e-6


def put_between(model: nn.Module) -> None:
    """Give every LoRA layer of a peft model frozen factors of its weight, and a zero R between them.

    Raises:
        InputError: a weight has fewer inputs or outputs than R, or no unique singular vectors; names its layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            _put_between(name, layer)


@torch.no_grad()
def _put_between(name: str, layer: Any) -> None:
    if "default" not in layer.lora_A:
        raise InputError(f"target_modules: {name} is no linear layer, and R lies between factors of a weight matrix")
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    weight = layer.get_base_layer().weight
    try:
        left, right = _singular_factors(weight.T if layer.fan_in_fan_out else weight, b.in_features)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None
    b.weight.copy_(left)
    a.weight.copy_(right)
    inner = nn.Linear(b.in_features, b.in_features, bias=False)
    nn.init.zeros_(inner.weight)
    layer.lora_B["default"] = nn.Sequential(OrderedDict(R=inner, B=b))


def _singular_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(B, A) = (U, V^T) of a matrix's largest singular values: float32 [out, rank] and [rank, in], orthonormal.

    The largest entry of each row of A is positive.

    Args:
        weight: [out, in].
        rank: r >= 1.

    Raises:
        ValueError: the matrix has fewer rows or columns, or singular values that are too close to tell their vectors.

    Source: Balazy et al. 2024 (LoRA-XS), who scale one of the factors by the singular values.
    """
    if rank > min(weight.shape):
        raise ValueError(f"rank = {rank}: a weight of shape {tuple(weight.shape)} has {min(weight.shape)} at most")
    u, values, v = torch.linalg.svd(weight.double().cpu(), full_matrices=False)
    bounded = torch.cat([values, values.new_zeros(1)])
    if not (bounded[:rank] - bounded[1 : rank + 1] > _LEAST_GAP * values[0]).all():
        raise ValueError(f"rank = {rank}: two of the weight's largest singular values are equal, so any basis would do")
    left, right = u[:, :rank], v[:rank]
    signs = right.gather(1, right.abs().argmax(dim=1, keepdim=True)).sign()
    return (left * signs.T).float(), (right * signs).float()


def as_ordinary(tensors: Mapping[str, Tensor]) -> Adapter:
    """An adapter's tensors by peft's names, with B R in the place of R and B; any other adapter as it is."""
    result = dict(tensors)
    for name in tensors:
        if name.endswith(INNER_SUFFIX):
            stem = name.removesuffix(INNER_SUFFIX)
            outer, inner = result.pop(stem + OUTER_SUFFIX), result.pop(name)
            result[stem + B_SUFFIX] = (outer.double() @ inner.double()).float()
    return result

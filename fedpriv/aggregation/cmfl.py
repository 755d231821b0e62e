"""CMFL (Luping et al. 2019): a client uploads only what points where the federation went last.

Relevance is computed from the noised update, so to stay silent is post-processing: it reveals nothing that was not
paid for, and saves nothing of the privacy charge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.adapters.arithmetic import Adapter, difference
from fedpriv.adapters.codecs import pack_ternary, unpack_ternary
from fedpriv.aggregation.fedavg import weighted_average
from fedpriv.aggregation.global_model import GlobalModel


def relevance(update: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> float:
    """The share of parameters whose sign agrees with that of the last global update, in [0, 1].

    Args:
        update: the client's tensors less those that it began with.
        signs: in {-1, 0, 1}, of the same names and shapes.

    Raises:
        ValueError: names differ, or there is no parameter.

    Source: Luping et al. 2019, Eq. 9.
    """
    if update.keys() != signs.keys():
        raise ValueError(f"signs: tensors {', '.join(sorted(update.keys() ^ signs.keys()))} are on one side only")
    total = sum(tensor.numel() for tensor in update.values())
    if not total:
        raise ValueError("update: relevance needs at least one parameter")
    return sum(int((update[name].sign() == signs[name]).sum()) for name in update) / total


def threshold(start: float, round_: int) -> float:
    """The relevance that an upload needs: v_0 / sqrt(t), falling as updates become smaller.

    Args:
        start: v_0 in [0, 1]; 0 lets everything pass.
        round_: t >= 1.

    Source: Luping et al. 2019, Section IV; convergence needs a threshold that falls to zero.
    """
    return start / math.sqrt(round_)


def cmfl(model: GlobalModel, uploads: Sequence[Adapter], weights: Sequence[float]) -> GlobalModel:
    """The weighted average of what was uploaded, and the update that clients will compare theirs with.

    Args:
        model: before the round.
        uploads: of equal names and shapes.
        weights: summing to one over those who uploaded.

    Raises:
        ValueError: as `weighted_average`.
    """
    adapter = weighted_average(uploads, weights)
    return replace(model, adapter=adapter, last_update=difference(adapter, model.adapter))


def pack_signs(update: Mapping[str, Tensor]) -> Tensor:
    """The signs of an update, five to a byte, uint8, in the order of the names."""
    signs = [update[name].sign().flatten().to(torch.int8).numpy() for name in sorted(update)]
    return torch.from_numpy(pack_ternary(np.concatenate(signs)))


def unpack_signs(packed: Tensor, like: Mapping[str, Tensor]) -> Adapter:
    """What `pack_signs` packed, float32, for tensors of these names and shapes.

    Raises:
        ValueError: another type or length, or bytes that hold no signs.
    """
    total = sum(tensor.numel() for tensor in like.values())
    if packed.dtype != torch.uint8 or packed.shape != (-(-total // 5),):
        raise ValueError(f"signs: {packed.dtype} {tuple(packed.shape)}, not uint8 ({-(-total // 5)},)")
    codes = torch.from_numpy(unpack_ternary(packed.numpy(), total)).float()
    parts = torch.split(codes, [like[name].numel() for name in sorted(like)])
    return {name: part.view(like[name].shape) for name, part in zip(sorted(like), parts, strict=True)}

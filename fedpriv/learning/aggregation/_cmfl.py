"""CMFL (Luping et al. 2019): a client uploads only an update that points the way of the last global update.

Relevance is computed from the noised update, so staying silent is post-processing: it reveals nothing beyond what was
paid for, and saves none of the privacy charge.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.learning.adapters import Adapter, difference
from fedpriv.learning.adapters.codecs import pack_ternary, unpack_ternary
from fedpriv.learning.aggregation._fedavg import GlobalModel, weighted_average


def relevance(update: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> float:
    """The share of parameters whose sign agrees with that of the last global update, in [0, 1].

    Args:
        update: the client's tensors minus those it started from.
        signs: in {-1, 0, 1}, with the same names and shapes.

    Raises:
        ValueError: the names differ, or there are no parameters.

    Source: Luping et al. 2019, Eq. 9.
    """
    if update.keys() != signs.keys():
        raise ValueError(f"signs: tensors {', '.join(sorted(update.keys() ^ signs.keys()))} are on one side only")
    total = sum(tensor.numel() for tensor in update.values())
    if not total:
        raise ValueError("update: relevance needs at least one parameter")
    return sum(int((update[name].sign() == signs[name]).sum()) for name in update) / total


def threshold(start: float, round_: int) -> float:
    """The relevance that an upload of round t >= 1 needs, v_0 / sqrt(t) with v_0 in [0, 1]; at 0 every client uploads.

    Source: Luping et al. 2019, Section IV; convergence needs a threshold that falls to zero.
    """
    return start / math.sqrt(round_)


def is_irrelevant(update: Mapping[str, Tensor], signs: Mapping[str, Tensor], start: float, round_: int) -> bool:
    """Whether a client stays silent, since its update's `relevance` is below the round's `threshold`.

    Before the first step of the federation, when there are no signs, no update is.
    """
    if not signs or not start:
        return False
    return relevance(update, signs) < threshold(start, round_)


def cmfl(model: GlobalModel, uploads: Sequence[Adapter], weights: Sequence[float]) -> GlobalModel:
    """The weighted average of the uploads, and the global update with which clients will compare theirs."""
    adapter = weighted_average(uploads, weights)
    return replace(model, adapter=adapter, last_update=difference(adapter, model.adapter))


def pack_signs(update: Mapping[str, Tensor]) -> Tensor:
    """The signs of an update, uint8, five per byte, tensors sorted by name."""
    signs = [update[name].sign().flatten().to(torch.int8).numpy() for name in sorted(update)]
    return torch.from_numpy(pack_ternary(np.concatenate(signs)))


def unpack_signs(packed: Tensor, like: Mapping[str, Tensor]) -> Adapter:
    """The signs that `pack_signs` packed, float32, shaped like these tensors; ValueError if they are no such signs."""
    total = sum(tensor.numel() for tensor in like.values())
    if packed.dtype != torch.uint8 or packed.shape != (-(-total // 5),):
        raise ValueError(f"signs: {packed.dtype} {tuple(packed.shape)}, not uint8 ({-(-total // 5)},)")
    codes = torch.from_numpy(unpack_ternary(packed.numpy(), total)).float()
    parts = torch.split(codes, [like[name].numel() for name in sorted(like)])
    return {name: part.view(like[name].shape) for name, part in zip(sorted(like), parts, strict=True)}

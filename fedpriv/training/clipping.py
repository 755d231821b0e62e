"""Clipping of per-sample gradients by parts: what bounds one record's influence on a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Gradients = dict[str, Tensor]
Parts = Sequence[Sequence[str]]

# A clipped norm stays below the clip norm even where float32 rounds up: 27,656 squares summed err by < 1e-6.
_ROUNDING_MARGIN = 1.0 - 1e-6


def part_norms(gradients: Mapping[str, Tensor], parts: Parts) -> Tensor:
    """L2 norm of each record's gradient in each part, [parts, batch]; NaN or inf where it is not finite."""
    squares = {name: gradient.flatten(1).square().sum(dim=1) for name, gradient in gradients.items()}
    return torch.stack([torch.stack([squares[name] for name in part]).sum(dim=0) for part in parts]).sqrt()


def clipped_sum(gradients: Mapping[str, Tensor], clip_norm: float, parts: Parts) -> Gradients:
    """The sum over the batch of gradients whose parts are clipped to `clip_norm` each.

    Guarantee: adding or removing one record moves each part of the result by at most `clip_norm` in L2, so all of it
    by at most sqrt(parts) * clip_norm. A record whose gradient is not finite anywhere counts as zero.

    Args:
        gradients: {tensor name: [batch, *shape]}; batch may be 0.
        clip_norm: C, finite, > 0, gradient units.
        parts: groups of tensor names that hold every tensor once, from `clipping_parts`.

    Raises:
        ValueError: clip_norm is not finite and > 0, or the parts do not hold every tensor once.

    Source: Abadi et al. 2016, Algorithm 1, for one part.
    """
    _check(gradients, clip_norm, parts)
    gradients = _finite_records(gradients, parts)
    norms = part_norms(gradients, parts)
    scales = torch.where(norms > clip_norm, clip_norm * _ROUNDING_MARGIN / norms, torch.ones_like(norms))
    scale_of = {name: scale for part, scale in zip(parts, scales, strict=True) for name in part}
    return {name: torch.einsum("n,n...->...", scale_of[name], gradient) for name, gradient in gradients.items()}


def finite_sum(gradients: Mapping[str, Tensor], parts: Parts) -> Gradients:
    """The sum over the batch without clipping, for the `batch` rule; non-finite records count as zero."""
    return {name: gradient.sum(dim=0) for name, gradient in _finite_records(gradients, parts).items()}


def clipped_parts(gradient: Mapping[str, Tensor], clip_norm: float, parts: Parts) -> Gradients:
    """One gradient with each part clipped to `clip_norm`: for a batch's mean under the `batch` rule.

    Guarantee: whatever two gradients go in, the results differ by at most 2 sqrt(parts) * clip_norm in L2.

    Source: Liu et al., Algorithm 1, line 14.
    """
    one_record = {name: tensor.unsqueeze(0) for name, tensor in gradient.items()}
    return clipped_sum(one_record, clip_norm, parts)


def _finite_records(gradients: Mapping[str, Tensor], parts: Parts) -> Mapping[str, Tensor]:
    """The records whose whole gradient is finite, its squared norm included."""
    finite = torch.isfinite(part_norms(gradients, parts)).all(dim=0)
    if finite.all():
        return gradients
    return {name: gradient[finite] for name, gradient in gradients.items()}


def _check(gradients: Mapping[str, Tensor], clip_norm: float, parts: Parts) -> None:
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm = {clip_norm}: must be finite and > 0")
    names = [name for part in parts for name in part]
    if len(names) != len(gradients) or set(names) != gradients.keys():
        raise ValueError("parts: must hold the name of every tensor once")

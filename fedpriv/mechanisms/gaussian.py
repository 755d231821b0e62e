"""The Gaussian mechanism on a sum of clipped gradients, and the event that pays for it."""

from __future__ import annotations

import math

from torch import Tensor

from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.mechanisms.sources import RandomSource


def noised_sum(
    clipped_sum: Tensor,
    *,
    noise_multiplier: float,
    clip_norm: float,
    sensitivity_factor: float = 1.0,
    sampling_probability: float,
    source: RandomSource,
) -> tuple[Tensor, SubsampledGaussian]:
    """The sum with N(0, (z C)^2) added to every coordinate, and the event of this release.

    Guarantee: where adding or removing one record moves the sum by at most `sensitivity_factor * clip_norm` in L2,
    and a record is included with `sampling_probability`, the result is one subsampled Gaussian with the effective
    noise multiplier z / sensitivity_factor, which the event states.

    Args:
        clipped_sum: float32 [values], all trainable tensors together: sum of clipped gradients, gradient units.
        noise_multiplier: z >= 0, noise over sensitivity; 0 adds nothing and its event costs infinity.
        clip_norm: C > 0, gradient units.
        sensitivity_factor: L2 sensitivity over C, >= 1, from the clipping rule.
        sampling_probability: q in [0, 1], from the sampler that drew the batch.
        source: where the noise comes from.

    Raises:
        ValueError: a value is out of range.

    Source: Abadi et al. 2016, Algorithm 1; Liu et al., Algorithm 1, line 15.
    """
    if not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm = {clip_norm}: must be finite and > 0")
    if not 1 <= sensitivity_factor < math.inf:
        raise ValueError(f"sensitivity_factor = {sensitivity_factor}: must be finite and >= 1")
    event = SubsampledGaussian(
        noise_multiplier=noise_multiplier / sensitivity_factor, sampling_probability=sampling_probability
    )
    scale = noise_multiplier * clip_norm
    if scale == 0:
        return clipped_sum.clone(), event
    noise = source.normal(clipped_sum.numel()).mul_(scale).to(clipped_sum.device)
    return _on_grid(noise.add_(clipped_sum), scale).to(clipped_sum.dtype), event


def _on_grid(values: Tensor, scale: float) -> Tensor:
    """The values, in place, rounded to multiples of a power of two, some 2^-18 of the noise's standard deviation.

    Which floats a sum with noise can reach depends on the sum, and tells it (Mironov 2012). After rounding, a step of
    post-processing, all sums reach the same points, each by some 2^46 words in the middle of the distribution.
    """
    step = 2.0 ** (math.floor(math.log2(scale)) - 18)
    # In place: the values are a power of two times their quotients, so both steps are exact.
    return values.div_(step).round_().mul_(step)

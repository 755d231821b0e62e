"""The Gaussian mechanism on sums of clipped gradients, and the events that pay for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.mechanisms.sources import RandomSource, normal_from_words

# Float64 noise of small adapters is made for several clients in one go, of large ones client by client.
_VALUES_AT_ONCE = 2**20


def noised_sums(
    clipped_sums: Tensor,
    *,
    noise_multiplier: float,
    clip_norm: float,
    sensitivity_factor: float = 1.0,
    sampling_probabilities: Sequence[float],
    sources: Sequence[RandomSource],
) -> tuple[Tensor, list[SubsampledGaussian]]:
    """Each client's sum with N(0, (z C)^2) added to every coordinate, and the event of each release.

    Guarantee: where adding or removing one record moves a client's sum by at most `sensitivity_factor * clip_norm` in
    L2, and a record is included with its `sampling_probabilities` entry, the client's result is one subsampled
    Gaussian with the effective noise multiplier z / sensitivity_factor, which its event states.

    Args:
        clipped_sums: float32 [clients, values], all trainable tensors together: sums of clipped gradients, gradient
            units.
        noise_multiplier: z >= 0, noise over sensitivity; 0 adds nothing and its events cost infinity.
        clip_norm: C > 0, gradient units.
        sensitivity_factor: L2 sensitivity over C, >= 1, from the clipping rule.
        sampling_probabilities: [clients], q in [0, 1], from the samplers that drew the batches.
        sources: [clients], where each client's noise comes from.

    Raises:
        ValueError: a value is out of range, or there is not one probability and source for each client.

    Source: Abadi et al. 2016, Algorithm 1; Liu et al., Algorithm 1, line 15.
    """
    check_sums(clipped_sums, clip_norm, sensitivity_factor, sampling_probabilities, sources)
    events = [
        SubsampledGaussian(noise_multiplier=noise_multiplier / sensitivity_factor, sampling_probability=probability)
        for probability in sampling_probabilities
    ]
    scale = noise_multiplier * clip_norm
    if scale == 0:
        return clipped_sums.clone(), events
    noised = torch.empty_like(clipped_sums)
    at_once = max(1, _VALUES_AT_ONCE // max(clipped_sums.shape[1], 1))
    for begin in range(0, len(sources), at_once):
        sums = clipped_sums[begin : begin + at_once]
        words = np.concatenate([source.words(sums.shape[1]) for source in sources[begin : begin + at_once]])
        noise = normal_from_words(words).mul_(scale).view(sums.shape).to(sums.device)
        noised[begin : begin + at_once] = on_grid(noise.add_(sums), scale)
    return noised, events


def check_sums(
    clipped_sums: Tensor,
    clip_norm: float,
    sensitivity_factor: float,
    sampling_probabilities: Sequence[float],
    sources: Sequence[RandomSource],
) -> None:
    """Refuse what no mechanism can add its noise to; arguments as for `noised_sums`.

    Raises:
        ValueError: a value is out of range, or there is not one probability and source for each client.
    """
    if not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm = {clip_norm}: must be finite and > 0")
    if not 1 <= sensitivity_factor < math.inf:
        raise ValueError(f"sensitivity_factor = {sensitivity_factor}: must be finite and >= 1")
    if not len(clipped_sums) == len(sampling_probabilities) == len(sources):
        raise ValueError(
            f"{len(clipped_sums)} sums, {len(sampling_probabilities)} sampling probabilities and {len(sources)} "
            "sources: must be one of each for every client"
        )


def on_grid(values: Tensor, scale: float) -> Tensor:
    """The values, in place, rounded to multiples of a power of two, some 2^-18 of the noise's standard deviation.

    Which floats a sum with noise can reach depends on the sum, and tells it (Mironov 2012). After rounding, a step of
    post-processing, all sums reach the same points, each by some 2^46 words in the middle of the distribution.
    """
    step = 2.0 ** (math.floor(math.log2(scale)) - 18)
    # In place: the values are a power of two times their quotients, so both steps are exact.
    return values.div_(step).round_().mul_(step)

"""LMO noise on sums of clipped gradients: Laplace noise of random scale, and the events that pay for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.accounting.events import LmoAccounting, SubsampledLmo
from fedpriv.accounting.lmo.density import quantile
from fedpriv.accounting.lmo.moments import columns
from fedpriv.accounting.lmo.parameters import ExponentialPart, GammaPart, LmoParameters, Part
from fedpriv.mechanisms.gaussian import check_sums, on_grid
from fedpriv.mechanisms.sources import RandomSource, laplace_from_words, uniform_from_words

Array = npt.NDArray[np.float64]

# u below this gives noise beyond every float; it is drawn with probability 0 to some hundred digits.
_SMALLEST_U = 1e-290


def noised_sums(
    clipped_sums: Tensor,
    *,
    parameters: LmoParameters,
    clip_norm: float,
    sensitivity_factor: float = 1.0,
    sampling_probabilities: Sequence[float],
    sources: Sequence[RandomSource],
    accounting: LmoAccounting = "sound",
) -> tuple[Tensor, list[SubsampledLmo]]:
    """Each client's sum with LMO noise times C added to every coordinate, and the event of each release.

    Guarantee: where adding or removing one record moves a client's sum by at most `sensitivity_factor * clip_norm` in
    L2, and a record is included with its `sampling_probabilities` entry, the client's result costs what its event
    costs, if the event's accounting is `sound`. The inverse scale u is drawn for every coordinate: one for all of them
    would need another bound, so there is none.

    Args:
        clipped_sums: float32 [clients, values], all trainable tensors together: sums of clipped gradients, gradient
            units.
        parameters: the distribution of u, in units of the clip norm.
        clip_norm: C > 0, gradient units.
        sensitivity_factor: L2 sensitivity over C, >= 1, from the clipping rule.
        sampling_probabilities: [clients], q in [0, 1], from the samplers that drew the batches.
        sources: [clients], where each client's noise comes from.
        accounting: of the events. It changes no noise; `published` is no guarantee.

    Raises:
        ValueError: a value is out of range, or there is not one probability and source for each client.

    Source: Yang et al., Algorithm 1, line 7.
    """
    check_sums(clipped_sums, clip_norm, sensitivity_factor, sampling_probabilities, sources)
    events = [
        SubsampledLmo(
            parameters=parameters,
            sensitivity=sensitivity_factor,
            dimension=clipped_sums.shape[1],
            sampling_probability=probability,
            accounting=accounting,
        )
        for probability in sampling_probabilities
    ]
    noised = torch.empty_like(clipped_sums)
    scale = clip_norm * _median_size(parameters)
    largest = torch.finfo(clipped_sums.dtype).max
    for sums, result, source in zip(clipped_sums, noised, sources, strict=True):
        noise = torch.from_numpy(lmo_noise(parameters, sums.numel(), source)).mul_(clip_norm).to(sums.device)
        # Without a finite mean a value may pass the largest float32, and one infinity would spoil the model.
        result.copy_(on_grid(noise.add_(sums), scale).clamp_(-largest, largest))
    return noised, events


def lmo_noise(parameters: LmoParameters, num: int, source: RandomSource) -> Array:
    """`num` independent values of LMO noise, float64 [num], in units of the clip norm.

    Args:
        parameters: the distribution of u.
        num: how many, >= 0.
        source: where the randomness comes from.
    """
    u = np.maximum(inverse_scales(parameters, num, source), _SMALLEST_U)
    return np.asarray(laplace_from_words(source.words(num)) / u)


def inverse_scales(parameters: LmoParameters, num: int, source: RandomSource) -> Array:
    """`num` independent values of u, float64 [num]; see `lmo_noise`."""
    parts = list(parameters.parts.values())
    if parameters.combination == "linear":
        return np.asarray(sum(part.weight * _draw(part, num, source) for part in parts))
    if len(parts) == 1:
        return _draw(parts[0], num, source)
    u = np.empty(num)
    weights = columns(parameters).weights
    borders = np.cumsum(weights[weights > 0])[:-1]
    chosen = np.searchsorted(borders, uniform_from_words(source.words(num)))
    for number, part in enumerate(parts):
        places = np.flatnonzero(chosen == number)
        u[places] = _draw(part, len(places), source)
    return u


def _draw(part: Part, num: int, source: RandomSource) -> Array:
    """Values of one part of u."""
    if isinstance(part, GammaPart):
        return part.scale * _gamma(part.shape, num, source)
    uniform = uniform_from_words(source.words(num))
    if isinstance(part, ExponentialPart):
        return np.asarray(-np.log(uniform) / part.rate)
    return part.low + (part.high - part.low) * uniform


def _gamma(shape: float, num: int, source: RandomSource) -> Array:
    """Gamma variables of scale 1 by rejection from a transformed normal (Marsaglia and Tsang 2000).

    Exact for shape >= 1; below that Gamma(shape + 1) times uniform^(1 / shape) is.
    """
    if shape < 1:
        uniform = uniform_from_words(source.words(num))
        return np.asarray(_gamma(shape + 1, num, source) * uniform ** (1 / shape))
    d = shape - 1 / 3
    values = np.empty(num)
    left = np.arange(num)
    while left.size:  # a try succeeds with probability 0.95 or more
        normal = source.normal(left.size).numpy()
        uniform = uniform_from_words(source.words(left.size))
        cube = (1 + normal / math.sqrt(9 * d)) ** 3
        positive = np.maximum(cube, 1e-300)
        accepted = (cube > 0) & (np.log(uniform) < normal**2 / 2 + d - d * cube + d * np.log(positive))
        values[left[accepted]] = d * cube[accepted]
        left = left[~accepted]
    return values


@lru_cache(maxsize=64)
def _median_size(parameters: LmoParameters) -> float:
    """Median size of the noise, in units of the clip norm."""
    return float(quantile(parameters, 0.75))

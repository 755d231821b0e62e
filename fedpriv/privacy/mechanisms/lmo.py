"""LMO noise on sums of clipped gradients: Laplace noise of random scale."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.events import Event, SubsampledLmo
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import (
    ExponentialPart,
    GammaPart,
    LmoAccounting,
    LmoParameters,
    Part,
    check_one_of,
    read_json,
)
from fedpriv.privacy.accounting.lmo_renyi import PUBLISHED_CAVEAT
from fedpriv.privacy.mechanisms.registry import NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource, laplace_from_words, on_grid, uniform_from_words

if TYPE_CHECKING:
    from torch import Tensor

# A smaller u gives noise that no float can hold; the probability of drawing one is 0 to some hundred digits.
_SMALLEST_U = 1e-290


class _Lmo:
    """Laplace noise of random scale, times z C, on every coordinate.

    Its parameters are those of the noise as JSON, plus `accounting`: `sound`, the default, or `published`, which does
    not change the noise and is not a guarantee. The inverse scale u is drawn afresh for every coordinate; sharing one u
    would need a different bound, so it is not offered.

    Source: Yang et al., Algorithm 1, line 7.
    """

    parameters_hint = "a file or JSON; fedpriv lmo search finds some"
    noise_adds_up = False
    cost_depends_on_dimension = True

    def checked(self, parameters: str, noise_multiplier: float) -> str:
        """The parameters as one line of JSON, with `accounting` only if it is not `sound`."""
        noise, accounting = _read(parameters)
        _multiplied(noise, noise_multiplier)
        published = {} if accounting == "sound" else {"accounting": accounting}
        return json.dumps(noise.to_dict() | published)

    def caveat(self, parameters: str) -> str:
        """The part of `published` accounting that is unproven."""
        return PUBLISHED_CAVEAT if _read(parameters)[1] == "published" else ""

    def planned_events(self, request: NoiseRequest) -> list[Event]:
        """[clients] events of subsampled LMO noise, with the number of coordinates that the request states."""
        noise, accounting = _read(request.parameters)
        multiplied = _multiplied(noise, request.noise_multiplier)
        return [
            SubsampledLmo(
                parameters=multiplied,
                sensitivity=request.sensitivity_factor,
                dimension=request.dimension,
                sampling_probability=probability,
                accounting=accounting,
                count=request.count,
                unit=request.unit,
            )
            for probability in request.sampling_probabilities
        ]

    def add_noise(
        self, sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]
    ) -> tuple[Tensor, list[Event]]:
        """The sums plus LMO noise, rounded to a grid, and their events."""
        import torch  # deferred: a configuration is checked without it

        request.check_fits(sums, sources)
        events = self.planned_events(request)
        parameters = _multiplied(_read(request.parameters)[0], request.noise_multiplier)
        noised = torch.empty_like(sums)
        scale = request.clip_norm * _median_size(parameters)
        largest = torch.finfo(torch.float32).max  # uploads are float32
        for total, result, source in zip(sums, noised, sources, strict=True):
            noise = torch.from_numpy(_lmo_noise(parameters, total.numel(), source))
            noise = noise.mul_(request.clip_norm).to(total.device)
            # Noise without a finite mean may exceed the largest float32, and a single infinity would ruin the model.
            result.copy_(on_grid(noise.add_(total), scale).clamp_(-largest, largest))
        return noised, events


MECHANISM = _Lmo()


@lru_cache(maxsize=64)
def _read(text: str) -> tuple[LmoParameters, LmoAccounting]:
    """The noise that the mechanism's parameters describe, and how it is accounted for."""
    try:
        values = read_json(text)
        accounting = values.pop("accounting", "sound") if isinstance(values, dict) else "sound"
        check_one_of("accounting", accounting, LmoAccounting)
        return LmoParameters.from_dict(values), cast(LmoAccounting, accounting)
    except InputError as error:
        raise InputError(f"mechanism_parameters: {error}") from None


def _multiplied(noise: LmoParameters, noise_multiplier: float) -> LmoParameters:
    """The noise times z."""
    if noise_multiplier == 0:
        raise InputError("noise_multiplier = 0: multiplies the LMO noise, so it must be > 0")
    try:
        return noise.scaled(1 / noise_multiplier)
    except InputError as error:
        raise InputError(f"noise_multiplier = {noise_multiplier:g}: takes the noise out of range ({error})") from None


@lru_cache(maxsize=64)
def _median_size(noise: LmoParameters) -> float:
    """The median size of the noise, in units of the clip norm."""
    return float(Columns.of(noise).quantile(0.75))


def _lmo_noise(parameters: LmoParameters, num: int, source: RandomSource) -> Array:
    """`num` >= 0 independent values of LMO noise, float64 [num], in units of the clip norm."""
    u = np.maximum(_inverse_scales(parameters, num, source), _SMALLEST_U)
    return np.asarray(laplace_from_words(source.words(num)) / u)


def _inverse_scales(parameters: LmoParameters, num: int, source: RandomSource) -> Array:
    """`num` independent values of u, float64 [num]; see `_lmo_noise`."""
    parts = list(parameters.parts.values())
    if parameters.combination == "linear":
        return np.asarray(sum(part.weight * _draw(part, num, source) for part in parts))
    if len(parts) == 1:
        return _draw(parts[0], num, source)
    u = np.empty(num)
    weights = Columns.of(parameters).weights
    boundaries = np.cumsum(weights[weights > 0])[:-1]
    part_indices = np.searchsorted(boundaries, uniform_from_words(source.words(num)))
    for index, part in enumerate(parts):
        coordinates = np.flatnonzero(part_indices == index)
        u[coordinates] = _draw(part, len(coordinates), source)
    return u


def _draw(part: Part, num: int, source: RandomSource) -> Array:
    """Values of one part of u."""
    if isinstance(part, GammaPart):
        return part.scale * _gamma(part.shape, num, source)
    uniform = uniform_from_words(source.words(num))
    if isinstance(part, ExponentialPart):
        return np.asarray(np.log(uniform) / -part.rate)
    return part.low + (part.high - part.low) * uniform


def _gamma(shape: float, num: int, source: RandomSource) -> Array:
    """Gamma variables of scale 1 by rejection from a transformed normal (Marsaglia and Tsang 2000).

    Exact for shape >= 1; for a smaller shape, Gamma(shape + 1) times uniform^(1 / shape) is.
    """
    if shape < 1:
        uniform = uniform_from_words(source.words(num))
        return np.asarray(_gamma(shape + 1, num, source) * uniform ** (1 / shape))
    d = shape - 1 / 3
    normal, uniform = source.normal(num).numpy(), uniform_from_words(source.words(num))
    root, square = 1 + normal / math.sqrt(9 * d), normal * normal
    values = d * root * root * root
    left = np.flatnonzero(uniform >= 1 - 0.0331 * square * square)  # all others meet the condition, whose logs are slow
    bounds = square[left] / 2 + d - values[left] + 3 * d * np.log(np.maximum(root[left], 1e-300))
    if (rejected := left[np.log(uniform[left]) >= bounds]).size:  # 0.05 of the values or fewer
        values[rejected] = _gamma(shape, rejected.size, source)
    return np.asarray(values)

"""Discrete Gaussian noise on integer grids."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedpriv.accounting.events import Event, SubsampledGaussian
from fedpriv.mechanisms.discrete_sampler import discrete_gaussian
from fedpriv.mechanisms.gaussian import Gaussian
from fedpriv.mechanisms.request import NoiseRequest
from fedpriv.mechanisms.sources import RandomSource

_S = math.sqrt(1 - 9 / 2**20)


class DiscreteGaussian(Gaussian):
    cost_depends_on_dimension = True

    def _grids(self, request: NoiseRequest) -> tuple[float, ...]:
        scale = request.noise_multiplier * request.clip_norm
        own = 2.0 ** (18 - math.floor(math.log2(scale))) if scale else 1.0
        return request.grids or (own,) * len(request.sampling_probabilities)

    def planned_events(self, request: NoiseRequest) -> list[Event]:
        events: list[Event] = []
        for grid, q in zip(self._grids(request), request.sampling_probabilities, strict=True):
            delta = grid * request.sensitivity_factor * request.clip_norm + math.sqrt(request.dimension)
            sigma = grid * request.noise_multiplier * request.clip_norm
            if 0 < sigma < 2**10:
                raise ValueError(f"sigma = {sigma}")
            events.append(
                SubsampledGaussian(
                    noise_multiplier=sigma * _S / delta, sampling_probability=q, count=request.count, unit=request.unit
                )
            )
        return events

    def add_noise(
        self, sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]
    ) -> tuple[Tensor, list[Event]]:
        events = self.planned_events(request)
        noised = torch.empty_like(sums)
        for k, grid in enumerate(self._grids(request)):
            row = sums[k].clamp(-request.bounds[k], request.bounds[k]) if request.bounds else sums[k]
            x = (row * grid).round()
            sigma = grid * request.noise_multiplier * request.clip_norm
            if sigma:
                x += torch.from_numpy(discrete_gaussian(sigma, request.dimension, sources[k]).astype(float))
            noised[k] = x / grid
        return noised, events


def integers(noised: Tensor, grid: float) -> Tensor:
    return (noised * grid).round().long()


MECHANISM = DiscreteGaussian()

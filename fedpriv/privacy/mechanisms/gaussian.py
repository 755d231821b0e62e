"""The Gaussian mechanism on sums of clipped gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedpriv.privacy.accounting.events import Event, SubsampledGaussian
from fedpriv.privacy.mechanisms.registry import NoiseRequest, WithoutParameters
from fedpriv.privacy.mechanisms.sources import RandomSource, normal_from_words, on_grid

if TYPE_CHECKING:
    from torch import Tensor

# Float64 noise is drawn for several clients at once if their adapters are small, otherwise client by client.
_VALUES_AT_ONCE = 2**20


class _Gaussian(WithoutParameters):
    """N(0, (z C)^2) on every coordinate: a subsampled Gaussian with the effective noise multiplier z / factor.

    A noise multiplier of 0 adds nothing, and its event costs infinity.

    Source: Abadi et al. 2016, Algorithm 1; Liu et al., Algorithm 1, line 15.
    """

    name = "gaussian"
    noise_adds_up = True
    cost_depends_on_dimension = False

    def planned_events(self, request: NoiseRequest) -> list[Event]:
        """[clients] subsampled Gaussians."""
        return [
            SubsampledGaussian(
                noise_multiplier=request.noise_multiplier / request.sensitivity_factor,
                sampling_probability=probability,
                count=request.count,
                unit=request.unit,
            )
            for probability in request.sampling_probabilities
        ]

    def add_noise(
        self, sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]
    ) -> tuple[Tensor, list[Event]]:
        """The sums plus Gaussian noise, rounded to a grid, and their events."""
        import torch  # deferred: a configuration is checked without it

        request.check_fits(sums, sources)
        events = self.planned_events(request)
        scale = request.noise_multiplier * request.clip_norm
        if scale == 0:
            return sums.clone(), events
        noised = torch.empty_like(sums)
        at_once = max(1, _VALUES_AT_ONCE // max(request.dimension, 1))
        for begin in range(0, len(sources), at_once):
            block = sums[begin : begin + at_once]
            words = np.concatenate([source.words(block.shape[1]) for source in sources[begin : begin + at_once]])
            noise = normal_from_words(words).mul_(scale).view(block.shape).to(block.device)
            noised[begin : begin + at_once] = on_grid(noise.add_(block), scale)
        return noised, events


MECHANISM = _Gaussian()

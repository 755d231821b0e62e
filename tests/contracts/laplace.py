"""A mechanism that exists only in the tests, Laplace noise on every coordinate: all that a new mechanism requires."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from dp_accounting import pld

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.law import Event, Unit, check_non_negative
from fedpriv.privacy.mechanisms.sources import laplace_from_words, on_grid


@dataclass(frozen=True, kw_only=True)
class SubsampledLaplace(Event):
    """Laplace noise with scale `noise_multiplier` times the L1 sensitivity, on a Poisson sample."""

    noise_multiplier: float
    sampling_probability: float
    count: int = 1
    unit: Unit = "record"

    has_pld = True

    def __post_init__(self):
        check_non_negative("noise_multiplier", self.noise_multiplier)
        super().__post_init__()

    @property
    def _epsilon(self):
        """Epsilon of one release: 1 / z, amplified by sampling (Balle, Barthe and Gaboardi 2018, Theorem 8)."""
        return math.log1p(self.sampling_probability * math.expm1(1 / self.noise_multiplier))

    def rdp(self, orders):
        """The curve of randomised response, which dominates every epsilon-DP mechanism."""
        orders, epsilon = np.asarray(orders, dtype=float), self._epsilon
        log_p = -np.log1p(np.exp(-epsilon))
        return self.count * (log_p + np.logaddexp((orders - 1) * epsilon, -orders * epsilon)) / (orders - 1)

    def pld(self, value_interval):
        parameters = pld.common.DifferentialPrivacyParameters(self._epsilon, 0.0)
        single = pld.privacy_loss_distribution.from_privacy_parameters(parameters, value_interval)
        return single.self_compose(self.count)

    def with_noise(self, factor):
        return SubsampledLaplace(
            noise_multiplier=factor * self.noise_multiplier,
            sampling_probability=self.sampling_probability,
            count=self.count,
            unit=self.unit,
        )

    @property
    def effective_noise_multiplier(self):
        """That of the Gaussian with the same ratio of variance to squared sensitivity."""
        return math.sqrt(2) * self.noise_multiplier

    @property
    def max_loss(self):
        return self.count * self._epsilon


class Laplace:
    """Laplace noise of scale z C on every coordinate; one record changes the sum by at most sqrt(d) factor C in L1."""

    parameters_hint = ""
    noise_adds_up = False
    cost_depends_on_dimension = True

    def checked(self, parameters, noise_multiplier):
        if parameters or noise_multiplier == 0:
            raise InputError(f"mechanism_parameters = {parameters!r}: laplace takes none, and needs noise")
        return ""

    def caveat(self, parameters):
        return ""

    def planned_events(self, request):
        self.checked(request.parameters, request.noise_multiplier)
        l1_factor = math.sqrt(request.dimension) * request.sensitivity_factor
        return [
            SubsampledLaplace(
                noise_multiplier=request.noise_multiplier / l1_factor,
                sampling_probability=probability,
                count=request.count,
                unit=request.unit,
            )
            for probability in request.sampling_probabilities
        ]

    def add_noise(self, sums, request, sources):
        request.check_fits(sums, sources)
        scale = request.noise_multiplier * request.clip_norm
        noise = np.stack([laplace_from_words(source.words(request.dimension)) for source in sources])
        noised = on_grid(torch.from_numpy(noise).mul_(scale).add_(sums), scale)
        return noised.to(sums.dtype), self.planned_events(request)

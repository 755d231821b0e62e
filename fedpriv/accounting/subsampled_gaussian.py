"""The Gaussian mechanism on a Poisson sample of the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.law import (
    SMALLEST_DIVERGENCE,
    Accountant,
    Array,
    Event,
    Unit,
    check_count_and_unit,
    check_non_negative,
    check_probability,
    check_sampled_unit,
)
from fedpriv.accounting.sampled_curve import sampled_curve

# Outside this range of z floating-point results are meaningless: a smaller z counts as no noise, a larger one as the
# largest. Both only raise the cost.
MIN_NOISE, MAX_NOISE = 1e-6, 1e6


@dataclass(frozen=True, kw_only=True)
class SubsampledGaussian(Event):
    """`count` compositions of a Gaussian mechanism on a Poisson sample of the records.

    Attributes:
        noise_multiplier: z_eff >= 0, the standard deviation of the noise over the L2 sensitivity; 0 means no noise,
            at infinite cost.
        sampling_probability: q in [0, 1], with which each record is included, independently; 1 is the plain
            Gaussian mechanism.
        count: number of releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite, or sampling is claimed for a whole client.
    """

    noise_multiplier: float
    sampling_probability: float
    count: int = 1
    unit: Unit = "record"

    has_pld: ClassVar[bool] = True
    noise_adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_non_negative("noise_multiplier", self.noise_multiplier)
        check_probability("sampling_probability", self.sampling_probability)
        check_count_and_unit(self.count, self.unit)
        check_sampled_unit(self.sampling_probability, self.unit)

    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] Renyi divergence of all releases; infinite without noise."""
        orders = np.asarray(orders, dtype=float)
        if self.sampling_probability == 0:
            return np.zeros(orders.shape)
        if self.noise_multiplier < MIN_NOISE:
            return np.full(orders.shape, math.inf)
        without_sampling = orders / (2 * self._noise**2)
        if self.sampling_probability == 1:
            return np.asarray(self.count * without_sampling)
        # The Gaussian without sampling bounds the curve from above, so the floor never exceeds it.
        floor = np.minimum(without_sampling, SMALLEST_DIVERGENCE)
        return np.asarray(self.count * np.maximum(sampled_curve(self.sampling_probability, self._noise, orders), floor))

    def pld(self, value_interval: float) -> Any:
        """The privacy loss distribution of all releases, built in the same steps as by dp-accounting's accountant."""
        if self.sampling_probability == 1:
            # n Gaussian releases equal one with 1 / sqrt(n) of the noise.
            return _single_loss(self._noise / math.sqrt(self.count), 1.0, value_interval)
        return _single_loss(self._noise, self.sampling_probability, value_interval).self_compose(self.count)

    def with_noise(self, factor: float) -> Self:
        """The same releases with the noise multiplied by a factor."""
        return type(self)(
            noise_multiplier=factor * self.noise_multiplier,
            sampling_probability=self.sampling_probability,
            count=self.count,
            unit=self.unit,
        )

    @classmethod
    def epsilon_bounds_of_many(
        cls, events: Sequence[Self], deltas: Sequence[float], accountant: Accountant, workers: int
    ) -> tuple[Array, Array]:
        """Bounds found by interpolating over q, count and delta."""
        from fedpriv.accounting import many_gaussians  # deferred: it imports the accountants, which import this module

        return many_gaussians.epsilon_bounds(events, deltas, accountant, workers=workers)

    @property
    def effective_noise_multiplier(self) -> float:
        """z_eff."""
        return self.noise_multiplier

    @property
    def is_noised(self) -> bool:
        """Whether z_eff is at least 1e-6, below which a release counts as one without noise."""
        return self.noise_multiplier >= MIN_NOISE

    @property
    def loss_scale(self) -> float:
        """q / z."""
        return self.sampling_probability / max(self._noise, 1.0)

    @property
    def _noise(self) -> float:
        return min(self.noise_multiplier, MAX_NOISE)


@lru_cache(maxsize=64)
def _single_loss(noise_multiplier: float, sampling_probability: float, value_interval: float) -> Any:
    """The privacy loss distribution of one release, as dp-accounting's own accountant builds it."""
    from dp_accounting import pld

    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, value_discretization_interval=value_interval, sampling_prob=sampling_probability
    )

"""Releases of which only epsilon, or epsilon and delta, is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.law import (
    Array,
    Event,
    Unit,
    check_count_and_unit,
    check_non_negative,
    check_probability,
)


class _StatedCost(Event):
    """What both events share: a pure epsilon, composed after any delta of their own has been subtracted."""

    epsilon: float
    has_pld: ClassVar[bool] = True

    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] the curve of randomised response, which dominates every epsilon-DP mechanism."""
        return self.count * _randomised_response(self.epsilon, np.asarray(orders, dtype=float))

    def pld(self, value_interval: float) -> Any:
        """The distribution of randomised response, with epsilon rounded up to the grid."""
        return _single_loss(self.epsilon, value_interval).self_compose(self.count)

    def with_noise(self, factor: float) -> Self:
        """The event itself: it states no noise."""
        return self

    @property
    def sampling_probability(self) -> float:
        """1: the cost is stated for all records."""
        return 1.0

    @property
    def effective_noise_multiplier(self) -> float:
        """0: the event says nothing about its noise."""
        return 0.0

    @property
    def max_loss(self) -> float:
        """The sum of the epsilons."""
        return self.count * self.epsilon


@dataclass(frozen=True, kw_only=True)
class PureEpsilon(_StatedCost):
    """`count` releases that are epsilon-DP each, by any mechanism.

    Attributes:
        epsilon: >= 0, finite.
        count: number of releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite.
    """

    epsilon: float
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        check_non_negative("epsilon", self.epsilon)
        check_count_and_unit(self.count, self.unit)


@dataclass(frozen=True, kw_only=True)
class EpsilonDelta(_StatedCost):
    """`count` releases that are (epsilon, delta)-DP each, by any mechanism.

    Each is dominated by a release that reveals everything with probability delta and is epsilon-DP otherwise: its
    delta is subtracted from that of the composition, and the rest is composed as a pure epsilon.

    Attributes:
        epsilon: >= 0, finite.
        delta: in [0, 1].
        count: number of releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite.

    Source: Kairouz, Oh and Viswanath 2015.
    """

    epsilon: float
    delta: float
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        check_non_negative("epsilon", self.epsilon)
        check_probability("delta", self.delta)
        check_count_and_unit(self.count, self.unit)

    @property
    def total_delta(self) -> float:
        """The sum of the deltas."""
        return self.count * self.delta


def _randomised_response(epsilon: float, orders: Array) -> Array:
    """[orders] log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1), with p / (1 - p) = e^epsilon."""
    log_p = -np.log1p(np.exp(-epsilon))
    return np.asarray((log_p + np.logaddexp((orders - 1) * epsilon, -orders * epsilon)) / (orders - 1))


@lru_cache(maxsize=64)
def _single_loss(epsilon: float, value_interval: float) -> Any:
    """The privacy loss distribution of one release, as dp-accounting's own accountant builds it."""
    from dp_accounting import pld

    parameters = pld.common.DifferentialPrivacyParameters(epsilon, 0.0)
    return pld.privacy_loss_distribution.from_privacy_parameters(parameters, value_interval)

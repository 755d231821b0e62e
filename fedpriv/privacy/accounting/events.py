"""Privacy events: each describes what releases of one kind cost. They convert to JSON, and unknown ones are refused.

Here are releases of which only the cost is known; those of Gaussian and LMO noise have files of their own.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedpriv.privacy.accounting.gaussian import SubsampledGaussian as SubsampledGaussian
from fedpriv.privacy.accounting.gaussian import SummedGaussian as SummedGaussian
from fedpriv.privacy.accounting.law import Array, check_non_negative, check_probability, short
from fedpriv.privacy.accounting.law import Event as Event
from fedpriv.privacy.accounting.law import Unit as Unit
from fedpriv.privacy.accounting.lmo_renyi import SubsampledLmo as SubsampledLmo

_VERSION = 1

_LARGEST_EXPONENT = 700.0


class _StatedCost(Event):
    """The base of both events: a pure epsilon, composed after any delta of their own has been subtracted."""

    epsilon: float

    @property
    def has_pld(self) -> bool:
        """Whether a float holds e^epsilon, which dp-accounting computes."""
        return self.epsilon <= _LARGEST_EXPONENT

    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] the curve of randomised response, which dominates every epsilon-DP mechanism."""
        return self.count * _randomised_response(self.epsilon, np.asarray(orders, dtype=float))

    def pld(self, value_interval: float) -> Any:
        """The distribution of randomised response, with epsilon rounded up to the grid."""
        return _stated_loss(self.epsilon, value_interval).self_compose(self.count)

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
    """`count` releases that are epsilon-DP each, by any mechanism; ValueError unless epsilon >= 0 is finite."""

    epsilon: float
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        check_non_negative("epsilon", self.epsilon)
        super().__post_init__()


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
        super().__post_init__()

    @property
    def total_delta(self) -> float:
        """The sum of the deltas."""
        return self.count * self.delta


def _randomised_response(epsilon: float, orders: Array) -> Array:
    """[orders] log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1), with p / (1 - p) = e^epsilon."""
    log_p = -np.log1p(np.exp(-epsilon))
    return np.asarray((log_p + np.logaddexp((orders - 1) * epsilon, -orders * epsilon)) / (orders - 1))


@lru_cache(maxsize=64)
def _stated_loss(epsilon: float, value_interval: float) -> Any:
    """The privacy loss distribution of one release, as dp-accounting's own accountant builds it."""
    from dp_accounting import pld

    parameters = pld.common.DifferentialPrivacyParameters(epsilon, 0.0)
    return pld.privacy_loss_distribution.from_privacy_parameters(parameters, value_interval)


# Every type of event, by its name in ledgers and messages. A new noise distribution adds a line here.
EVENTS: dict[str, type[Event]] = {
    "subsampled_gaussian": SubsampledGaussian,
    "pure_epsilon": PureEpsilon,
    "epsilon_delta": EpsilonDelta,
    "subsampled_lmo": SubsampledLmo,
    "summed_gaussian": SummedGaussian,
}


def group(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same composition, with equal events merged into one event with the summed count.

    Composition does not depend on order, so the cost is unchanged; accountants then do their work once per distinct
    event instead of once per round.
    """
    counts: Counter[Event] = Counter()
    for event in events:
        counts[event.with_count(1)] += event.count
    return tuple(event.with_count(count) for event, count in counts.items())


def check_known(event: object) -> None:
    """Refuse an event of an unknown type, whose cost nobody can know."""
    if type(event) not in EVENTS.values():
        raise ValueError(f"event {event!r}: unknown, so its cost is unknown")


def to_json(event: Event) -> str:
    """The event as one line of JSON with its kind and the format's version; ValueError if its type is unknown."""
    check_known(event)
    kind = next(name for name, event_type in EVENTS.items() if type(event) is event_type)
    return json.dumps({"version": _VERSION, "kind": kind, **event.to_fields()}, sort_keys=True)


def from_json(text: str) -> Event:
    """The event that `to_json` wrote; ValueError for another version, an unknown kind or a value out of range."""
    try:
        fields = json.loads(text)
        version, kind = fields.pop("version"), fields.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"event {text[:200]!r}: must be a JSON object with version and kind") from None
    if version != _VERSION:
        raise ValueError(f"event version = {short(version)}: this fedpriv reads version {_VERSION}")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ValueError(f"event kind = {short(kind)}: known are {', '.join(EVENTS)}")
    try:
        return EVENTS[kind].from_fields(fields)
    except TypeError as error:
        raise ValueError(f"event {text[:200]!r}: {error}") from None

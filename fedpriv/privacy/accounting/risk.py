"""Risk in numbers that people can read: how many of the protected an attacker finds, for how many false accusations.

Its trade-off function comes from the privacy loss distribution of releases that were fixed in advance, never from one
(epsilon, delta) alone. Gaussian noise without sampling has a closed form; what has no loss distribution has the bound
of its Renyi divergences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
from scipy import special

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import (
    FINEST_INTERVAL,
    ORDERS,
    affordable,
    check_delta,
    checked,
    epsilon_of,
    rounding_of,
    total_curve,
    total_loss,
)
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.law import Event, Unit
from fedpriv.privacy.accounting.many_clients import Name, sets_of_holders, with_size, without_size
from fedpriv.privacy.accounting.trade_off import (
    TradeOff,
    advantage_of,
    gaussian,
    mu_of,
    profile,
    regret_of,
    renyi,
    revealing,
)

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05)
"""The shares of outsiders, wrongly accused, for which the most people found are told."""

# Lines of a profile, from this epsilon to that at which so little of delta is left; and further ones, for a mu at as
# small a delta.
_NUM_LINES, _FIRST_LINE, _LAST_LINE, _LAST_DELTA = 1500, 1e-4, 500.0, 1e-12
_NUM_FURTHER, _LEAST_DELTA = 100, 1e-15
# The grid of losses: a share of the loss of one release, and of that of all; its limits.
_OF_ONE_LOSS, _OF_ALL_LOSS, _LEAST_INTERVAL, _LARGEST_INTERVAL = 0.1, 0.01, 1e-5, 5e-3
# More histories than the first number share at most the second number of values of q, count and noise, the smallest of
# these ratios apart; histories of more kinds than that share Renyi curves, so many.
_FEW_HISTORIES, _MOST_SHARED, _NUM_NODES = 32, 64, 16
_RATIOS = (1.05, 1.1, 1.2, 1.4, 2.0, 4.0, 16.0, 256.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class Risk:
    """The most that releases let an attacker find; every figure is a bound from above.

    Attributes:
        mu: of Gaussian DP: nobody finds more than against N(0, 1) and N(mu, 1), but for the share delta; infinite
            without a guarantee.
        mu_regret: how much mu overstates: by so much both error rates of its curve must rise to meet the true one;
            0 for Gaussian noise without sampling, where mu says all.
        advantage: of the best test, the share found less that wrongly accused, in [0, 1].
        found: [rates], the share found where those of `FALSE_POSITIVE_RATES` are wrongly accused, in [0, 1].
        unit: what is protected, and found.
        trade_off: f.
    """

    mu: float
    mu_regret: float
    advantage: float
    found: tuple[float, ...]
    unit: Unit
    trade_off: TradeOff = field(repr=False, compare=False)

    @property
    def tpr_at_fpr(self) -> dict[str, float]:
        """{share wrongly accused: share found}."""
        return {f"{rate:g}": found for rate, found in zip(FALSE_POSITIVE_RATES, self.found, strict=True)}

    @property
    def values(self) -> dict[str, Any]:
        """The figures under the keys that JSON and summaries have."""
        figures = {"mu": self.mu, "mu_regret": self.mu_regret, "advantage": self.advantage}
        return figures | {"tpr_at_fpr": self.tpr_at_fpr, "unit": self.unit}

    def curve(self, false_positive_rates: Sequence[float]) -> list[float]:
        """[rates] the largest share found, by the share wrongly accused."""
        missed = self.trade_off(np.asarray(false_positive_rates, dtype=float))
        return [1 - float(share) for share in missed]

    @staticmethod
    def none(unit: Unit = "record") -> Risk:
        """The risk of releases without a guarantee: everybody may be found."""
        return Risk(
            mu=math.inf,
            mu_regret=0.0,
            advantage=1.0,
            found=(1.0,) * len(FALSE_POSITIVE_RATES),
            unit=unit,
            trade_off=lambda x: np.zeros(np.shape(x)),
        )

    @staticmethod
    def of(trade_off: TradeOff, delta: float, unit: Unit) -> Risk:
        """The figures of a symmetric trade-off function; delta is for mu alone."""
        found = 1 - trade_off(np.array(FALSE_POSITIVE_RATES))
        mu = mu_of(trade_off, delta)
        return Risk(
            mu=mu,
            mu_regret=regret_of(trade_off, mu),
            advantage=advantage_of(trade_off),
            found=tuple(found.tolist()),
            unit=unit,
            trade_off=trade_off,
        )

    @staticmethod
    def worst(risks: Iterable[Risk]) -> Risk:
        """Figures that hold for each of several, of one unit: the largest of each, and the envelope of the curves."""
        distinct = list(dict.fromkeys(risks))
        if len(distinct) == 1:
            return distinct[0]
        return Risk(
            mu=max(risk.mu for risk in distinct),
            mu_regret=max(risk.mu_regret for risk in distinct),
            advantage=max(risk.advantage for risk in distinct),
            found=tuple(max(column) for column in zip(*(risk.found for risk in distinct), strict=True)),
            unit=distinct[0].unit,
            trade_off=lambda x: np.min([risk.trade_off(x) for risk in distinct], axis=0),
        )


def risk_of(events: Iterable[Event], delta: float) -> Risk:
    """The risk of a composition whose releases were fixed in advance: a schedule, or a committed plan.

    Args:
        events: in any order, all of one unit; no events reveal nothing.
        delta: in (0, 1), for mu.

    Raises:
        ValueError: delta is out of range, an event is of an unknown type, or events protect different units.
    """
    check_delta(delta)
    return _risk_of(checked(events), delta)


@lru_cache(maxsize=1024)
def _risk_of(events: tuple[Event, ...], delta: float) -> Risk:
    unit: Unit = events[0].unit if events else "record"
    if not _is_bounded(events):
        return Risk.none(unit)
    risk = Risk.of(trade_off_of(events), delta, unit)
    if (mu := _unsampled_mu(events)) is not None:
        return replace(risk, mu=mu, mu_regret=0.0)
    if rounding_of(delta, events):  # which may exceed delta; Renyi divergences have none
        mu = min(risk.mu, mu_of(_by_divergences(events), delta))
        return replace(risk, mu=mu, mu_regret=regret_of(risk.trade_off, mu))
    return risk


@lru_cache(maxsize=256)
def trade_off_of(events: tuple[Event, ...]) -> TradeOff:
    """The trade-off function of a composition whose every release is noised and a guarantee."""
    if (mu := _unsampled_mu(events)) is not None:
        return gaussian(mu)
    composition = tuple(event for event in events if event.sampling_probability > 0)
    if interval := affordable(composition, _interval(composition)):
        loss = total_loss(composition, interval)
        ends = [loss.get_epsilon_for_delta(delta) for delta in (_LAST_DELTA, _LEAST_DELTA)]
        last, least = np.clip(ends, 10 * _FIRST_LINE, _LAST_LINE)
        lines = np.geomspace(_FIRST_LINE, last, _NUM_LINES), np.geomspace(last, least, _NUM_FURTHER)
        epsilons = np.unique(np.concatenate([[0.0], *lines]))
        deltas = np.clip(loss.get_delta_for_epsilon(epsilons), 0.0, 1.0)
        known = profile(epsilons, deltas + [rounding_of(delta, composition) for delta in deltas])
        return revealing(known, _own_delta(events))
    return _by_divergences(events)


def _by_divergences(events: Sequence[Event]) -> TradeOff:
    """The trade-off function that the Renyi divergences of a composition imply."""
    return revealing(renyi(ORDERS, total_curve(events)), _own_delta(events))


def _is_bounded(events: Iterable[Event]) -> bool:
    """Whether anything bounds the risk."""
    released = [event for event in events if event.sampling_probability > 0]
    return _own_delta(released) < 1 and all(event.is_noised and event.is_guarantee for event in released)


def _own_delta(events: Iterable[Event]) -> float:
    """The sum of the deltas that events state."""
    return math.fsum(event.total_delta for event in events if event.sampling_probability > 0)


def _unsampled_mu(events: Iterable[Event]) -> float | None:
    """The mu of Gaussian noise on all records, sqrt(sum 1 / z^2); None if anything else was released."""
    squares = []
    for event in events:
        if event.sampling_probability == 0:
            continue
        if not isinstance(event, SubsampledGaussian) or event.sampling_probability != 1:
            return None
        squares.append(event.count / event.effective_noise_multiplier**2)
    return math.sqrt(math.fsum(squares))


def _interval(composition: Sequence[Event]) -> float:
    """A value discretization interval that costs less than 1 % of any share found; every one gives a bound."""
    if min(event.loss_scale for event in composition) == 0:
        return FINEST_INTERVAL
    of_all = math.sqrt(math.fsum(event.count * event.loss_scale**2 for event in composition))
    of_one = of_all / math.sqrt(sum(event.count for event in composition))
    return float(np.clip(min(_OF_ONE_LOSS * of_one, _OF_ALL_LOSS * of_all), _LEAST_INTERVAL, _LARGEST_INTERVAL))


def risks_of(histories: Mapping[Any, tuple[Iterable[Event], float]]) -> dict[Any, Risk]:
    """The risk of each of many histories, {whose: (events, delta)}, in little more time than that of a few.

    Where more than 32 differ, those that differ in q, count and noise alone share at most 64 sets of values: q and
    count are rounded up, and noise down, as little as that takes. No figure is smaller than the true one, and those of
    a history with the largest q and count and the least noise of its kind, which is the worst, are exact. A ValueError
    is one of `risk_of`.
    """
    grouped = {name: (checked(events), delta) for name, (events, delta) in histories.items()}
    if len(set(grouped.values())) <= _FEW_HISTORIES:
        return {name: _risk_of(*history) for name, history in grouped.items()}
    least_delta = min(delta for _, delta in grouped.values())
    kinds: defaultdict[tuple[Event, ...], list[Any]] = defaultdict(list)
    for name, (events, _) in grouped.items():
        kinds[tuple(_with(without_size(event), 1.0) for event in events)].append(name)
    if len(kinds) > _MOST_SHARED:
        return _by_renyi({name: events for name, (events, _) in grouped.items()}, least_delta)
    for ratio in _RATIOS:
        rounded: dict[Any, tuple[Event, ...]] = {}
        for names in kinds.values():
            rounded |= zip(names, _shared([grouped[name][0] for name in names], ratio), strict=True)
        if len(set(rounded.values())) <= _MOST_SHARED:
            break
    return {name: _risk_of(events, least_delta) for name, events in rounded.items()}


def risk_of_person(histories: Mapping[Name, Iterable[Event]], holders: int, delta: float) -> Risk:
    """The largest risk of any so many clients together, as `many_clients.cost_of_person`; a bound beyond 64 sets."""
    known = {name: list(events) for name, events in histories.items()}
    sets = sets_of_holders(known, holders)
    of_sets = {names: ([event for name in names for event in known[name]], delta) for names in sets}
    return Risk.worst(risks_of(of_sets).values())


def _shared(alike: Sequence[tuple[Event, ...]], ratio: float) -> list[tuple[Event, ...]]:
    """[histories] with each q, count and inverse of noise rounded up to the largest over a power of the ratio."""
    values = [[(e.sampling_probability, e.count, 1 / (_noise_of(e) or 1.0)) for e in events] for events in alike]
    sizes = np.array(values, dtype=float).reshape(len(alike), -1, 3)
    largest = sizes.max(axis=0)
    varies = sizes.min(axis=0) < largest
    with np.errstate(divide="ignore", invalid="ignore"):
        nodes = largest / ratio ** np.floor(np.log(largest / sizes) / math.log(ratio))
    sizes = np.where(varies, np.maximum(nodes, sizes), sizes)
    return [
        tuple(
            _with(with_size(event, q, math.ceil(count * (1 - 1e-12))), 1 / inverse)
            for event, (q, count, inverse) in zip(events, rows, strict=True)
        )
        for events, rows in zip(alike, sizes.tolist(), strict=True)
    ]


def _noise_of(event: Event) -> float | None:
    """The noise multiplier where it is a value of its own, and there is noise."""
    return getattr(event, "noise_multiplier", None) or None


def _with(event: Event, noise_multiplier: float) -> Event:
    """The event with this noise multiplier, where it has one."""
    if _noise_of(event) in (None, noise_multiplier):
        return event
    return cast(Event, replace(cast(Any, event), noise_multiplier=noise_multiplier))


def _by_renyi(histories: Mapping[Any, tuple[Event, ...]], delta: float) -> dict[Any, Risk]:
    """Bounds from Renyi curves: each history has that of the largest divergences of all histories that cost alike."""
    unit = next(iter(histories.values()))[0].unit
    risks = {name: Risk.none(unit) for name, events in histories.items() if not _is_bounded(events)}
    bounded = {name: events for name, events in histories.items() if name not in risks}
    curves = np.stack([total_curve(events) if events else np.zeros(len(ORDERS)) for events in bounded.values()])
    names, costs = list(bounded), [epsilon_of(events, delta, "rdp").epsilon for events in bounded.values()]
    for rows in np.array_split(np.argsort(costs, kind="stable"), _NUM_NODES):
        if not len(rows):
            continue
        own_delta = max(_own_delta(bounded[names[row]]) for row in rows)
        shared = Risk.of(revealing(renyi(ORDERS, curves[rows].max(axis=0)), own_delta), delta, unit)
        risks |= {names[row]: shared for row in rows}
    return risks


@dataclass(frozen=True, kw_only=True)
class RiskTarget:
    """The most that an attacker may find: a share of the protected at a share of false accusations, or a mu.

    Attributes:
        found: in (0, 1), > wrongly_accused.
        wrongly_accused: in (0, 1).
        mu: instead of both, > 0; None for them.

    Raises:
        InputError: a value is out of range.
    """

    found: float = 0.0
    wrongly_accused: float = 0.0
    mu: float | None = None

    def __post_init__(self) -> None:
        if self.mu is not None and not 0 < self.mu < math.inf:
            raise InputError(f"mu = {self.mu}: must be finite and > 0")
        if self.mu is None and not 0 < self.wrongly_accused < self.found < 1:
            raise InputError(f"target {self}: needs 0 < fpr < tpr < 1; accusing at random finds the share fpr")

    @staticmethod
    def parse(text: str, *, name: str = "target_risk") -> RiskTarget:
        """The target that a text such as `tpr=0.1@fpr=0.01` or `mu=0.9` states; else an InputError about `name`."""
        try:
            parts = {key.strip(): float(value) for key, value in (part.split("=") for part in text.split("@"))}
            if parts.keys() == {"mu"}:
                return RiskTarget(mu=parts["mu"])
            if parts.keys() == {"tpr", "fpr"}:
                return RiskTarget(found=parts["tpr"], wrongly_accused=parts["fpr"])
        except ValueError:
            pass
        except InputError as error:
            raise InputError(f"{name} = {text!r}: {error}") from None
        raise InputError(f"{name} = {text!r}: must be such as tpr=0.1@fpr=0.01, or mu=0.9")

    @property
    def gaussian_mu(self) -> float:
        """The largest mu of Gaussian noise without sampling that meets the target."""
        return self.mu or float(special.ndtri(self.found) - special.ndtri(self.wrongly_accused))

    def excess(self, events: Iterable[Event], delta: float) -> float:
        """How far the risk of a composition exceeds the target; at most 0 where it is met."""
        if self.mu is not None:
            return risk_of(events, delta).mu - self.mu
        composition = checked(events)
        if not _is_bounded(composition):
            return 1 - self.found
        return 1 - float(trade_off_of(composition)(np.array([self.wrongly_accused]))[0]) - self.found

    def __str__(self) -> str:
        return f"mu={self.mu:g}" if self.mu is not None else f"tpr={self.found:g}@fpr={self.wrongly_accused:g}"

"""Epsilon of a composition of events: accountants `pld` and `rdp` (Google's dp-accounting)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, Literal

import dp_accounting
import numpy as np
import numpy.typing as npt
from absl import logging as absl_logging
from dp_accounting import pld, rdp
from dp_accounting.rdp import rdp_privacy_accountant

from fedpriv.accounting.events import (
    EpsilonDelta,
    Event,
    PureEpsilon,
    SubsampledGaussian,
    SubsampledLmo,
    group,
    is_guarantee,
)
from fedpriv.accounting.lmo.moments import columns
from fedpriv.accounting.lmo.sampling import sampled_curve

Accountant = Literal["pld", "rdp"]

ORDERS = rdp.RdpAccountant().orders

# The orders at which LMO noise on a sample has a curve, and their places among all.
WHOLE_ORDERS = np.array([int(order) for order in ORDERS if float(order).is_integer()])
_WHOLE_PLACES = np.flatnonzero([float(order).is_integer() for order in ORDERS])

# Events without a delta of their own, and those among them that have a privacy loss distribution.
_WithLoss = SubsampledGaussian | PureEpsilon
_WithCurve = _WithLoss | SubsampledLmo

# Above this, pld takes minutes or gigabytes, and nobody needs the digits.
PLD_LIMIT = 100.0

# Outside this range of z floating point says nothing: below it a release counts as one without noise, above it as
# one with the largest noise. Both only raise the cost.
MIN_NOISE, MAX_NOISE = 1e-6, 1e6

FINEST_INTERVAL = 1e-4

# Renyi divergences below this are lost in rounding (dp-accounting even returns negative ones).
SMALLEST_DIVERGENCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """An epsilon with its delta and how it was found.

    Attributes:
        epsilon: >= 0, infinite when a release had no noise.
        delta: in (0, 1).
        accountant: the one that gave the number.
        upper_bound_only: True where the asked-for accountant was too costly, or does not know an event, and rdp
            stands in for it.
        is_guarantee: False where LMO noise was accounted as published: the epsilon then holds for one number only.
    """

    epsilon: float
    delta: float
    accountant: Accountant
    upper_bound_only: bool = False
    is_guarantee: bool = True


def spent(
    events: Iterable[Event], delta: float, accountant: Accountant = "pld", *, as_published: bool = False
) -> PrivacySpent:
    """What the composition of all events costs at the given delta.

    Events are composed first and converted once. With `pld`, a composition whose rdp epsilon exceeds 100 is
    answered by rdp, marked as an upper bound. So is one with LMO noise, of which only Renyi divergences are known.

    An (e, d)-DP release is dominated by one that reveals everything with probability d and is e-DP otherwise
    (Kairouz, Oh and Viswanath 2015): its d is taken off delta, and the rest composed as a pure e.

    Args:
        events: in any order, of one unit; none at all costs nothing.
        delta: in (0, 1).
        accountant: `pld` (tight) or `rdp` (fast, looser).
        as_published: give the paper's figure for LMO noise accounted as published, marked as no guarantee; without
            this it costs infinity, so that no budget is ever enforced by it.

    Raises:
        ValueError: delta is outside (0, 1), the accountant is unknown, an event is none of the vocabulary, or
            events protect different units.
    """
    check_delta(delta)
    check_accountant(accountant)
    composition, left = _without_deltas(_checked(events), delta)
    proven = all(map(is_guarantee, composition))
    if not composition:
        return PrivacySpent(epsilon=0.0 if left > 0 else math.inf, delta=delta, accountant=accountant)
    if left <= 0 or not all(map(_has_noise, composition)) or not (proven or as_published):
        return PrivacySpent(epsilon=math.inf, delta=delta, accountant=accountant, is_guarantee=proven)
    by_rdp = _rdp_epsilon(composition, left)
    with_loss = _all_with_loss(composition)
    if accountant == "rdp" or by_rdp > PLD_LIMIT or with_loss is None:
        stands_in = accountant == "pld"
        return PrivacySpent(
            epsilon=by_rdp, delta=delta, accountant="rdp", upper_bound_only=stands_in, is_guarantee=proven
        )
    by_pld = _pld_epsilon(with_loss, left, _interval(with_loss, by_rdp))
    return PrivacySpent(epsilon=by_pld, delta=delta, accountant="pld")


def stays_within(events: Iterable[Event], delta: float, budget: float) -> bool:
    """Whether the composition costs at most (budget, delta).

    pld decides. Where rdp, which is cheaper and as valid a bound, stays clearly below the budget, pld, which then
    nearly always does too, is not asked.

    Raises:
        ValueError: as for `spent`, or the budget bounds nothing.
    """
    if not 0 < budget < math.inf:
        raise ValueError(f"budget = {budget}: must be finite and > 0")
    events = tuple(events)
    return spent(events, delta, "rdp").epsilon <= 0.95 * budget or spent(events, delta).epsilon <= budget


def delta_spent(events: Iterable[Event], epsilon: float, accountant: Accountant = "pld") -> float:
    """The smallest delta, in [0, 1], for which the composition is (epsilon, delta)-DP by the accountant.

    Args:
        events: as for `spent`.
        epsilon: >= 0, finite.
        accountant: `pld` or `rdp`; where the composition's rdp epsilon at delta 1e-5 exceeds 100 or LMO noise is in
            it, rdp answers. LMO noise accounted as published costs delta 1.

    Raises:
        ValueError: as for `spent`, or epsilon is negative or not finite.
    """
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon}: must be finite and >= 0")
    check_accountant(accountant)
    composition, left = _without_deltas(_checked(events), 1.0)
    if not composition or not all(_has_noise(event) and is_guarantee(event) for event in composition):
        return 1.0 - left if not composition else 1.0
    with_loss = _all_with_loss(composition)
    if accountant == "rdp" or with_loss is None or _rdp_epsilon(composition, 1e-5) > PLD_LIMIT:
        rest = float(rdp_privacy_accountant.compute_delta(ORDERS, _total_curve(composition), epsilon)[0])
    else:
        rest = float(total_loss(with_loss, FINEST_INTERVAL).get_delta_for_epsilon(epsilon))
    return min(1.0, 1.0 - left + rest)


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must lie in (0, 1), for instance 1e-5")


def check_accountant(accountant: str) -> None:
    """Refuse an accountant that is neither `pld` nor `rdp`."""
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant = {accountant!r}: must be pld or rdp")


def _checked(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, grouped, if they belong to the vocabulary and protect one unit."""
    events = tuple(events)
    for event in events:
        if type(event) not in (SubsampledGaussian, PureEpsilon, EpsilonDelta, SubsampledLmo):
            raise ValueError(f"event {event!r}: unknown, so its cost is unknown")
    if len(units := {event.unit for event in events}) > 1:
        raise ValueError(f"units {', '.join(sorted(units))}: guarantees of different units have no common epsilon")
    return tuple(sorted(group(events), key=repr))


def _without_deltas(events: Iterable[Event], delta: float) -> tuple[tuple[_WithCurve, ...], float]:
    """Events that cost no delta of their own, with noise in a computable range, and what is left of delta."""
    pure: list[_WithCurve] = []
    for event in events:
        if isinstance(event, EpsilonDelta):
            delta -= event.count * event.delta
            event = PureEpsilon(epsilon=event.epsilon, count=event.count, unit=event.unit)
        if isinstance(event, (SubsampledGaussian, SubsampledLmo)) and event.sampling_probability == 0:
            continue
        if isinstance(event, SubsampledGaussian):
            event = replace(event, noise_multiplier=min(event.noise_multiplier, MAX_NOISE))
        pure.append(event)
    return tuple(pure), delta


def _has_noise(event: _WithCurve) -> bool:
    return not isinstance(event, SubsampledGaussian) or event.noise_multiplier >= MIN_NOISE


def _all_with_loss(events: tuple[_WithCurve, ...]) -> tuple[_WithLoss, ...] | None:
    """The events if a privacy loss distribution of each is known, else None."""
    found = tuple(event for event in events if not isinstance(event, SubsampledLmo))
    return found if len(found) == len(events) else None


def _rdp_epsilon(events: tuple[_WithCurve, ...], delta: float) -> float:
    """Renyi curves of single releases, times their counts, added up and converted once."""
    by_rdp = float(rdp.compute_epsilon(ORDERS, _total_curve(events), delta)[0])
    if all(isinstance(event, PureEpsilon) for event in events):  # then their plain sum is a bound as well
        return min(by_rdp, math.fsum(e.count * e.epsilon for e in events if isinstance(e, PureEpsilon)))
    return by_rdp


def _total_curve(events: tuple[_WithCurve, ...]) -> npt.NDArray[np.float64]:
    total: npt.NDArray[np.float64] = np.sum([e.count * _rdp_curve(replace(e, count=1)) for e in events], axis=0)
    return total


@lru_cache(maxsize=65536)
def _rdp_curve(event: _WithCurve) -> npt.NDArray[np.float64]:
    """Renyi divergence of one release at dp-accounting's default orders."""
    orders = np.asarray(ORDERS)
    if isinstance(event, SubsampledLmo):
        return _lmo_curve(event)
    if isinstance(event, PureEpsilon):
        # Randomised response dominates every epsilon-DP mechanism: p^a (1-p)^(1-a) + (1-p)^a p^(1-a), p/(1-p) = e^eps.
        log_p = -np.log1p(np.exp(-event.epsilon))
        curve: npt.NDArray[np.float64] = (
            log_p + np.logaddexp((orders - 1) * event.epsilon, -orders * event.epsilon)
        ) / (orders - 1)
    else:
        accountant = rdp.RdpAccountant()
        with quiet_absl():
            accountant.compose(_as_dp_event(event))
        # The Gaussian without sampling bounds the curve from above, so the floor never passes it.
        floor = np.minimum(orders / (2 * event.noise_multiplier**2), SMALLEST_DIVERGENCE)
        curve = np.maximum(accountant.rdp, floor)
    return curve


def _lmo_curve(event: SubsampledLmo) -> npt.NDArray[np.float64]:
    """Renyi divergence of one release of LMO noise, infinite at broken orders."""
    curve = np.full(len(ORDERS), math.inf)
    curve[_WHOLE_PLACES] = sampled_curve(
        columns(event.parameters),
        WHOLE_ORDERS,
        accounting=event.accounting,
        dimension=event.dimension,
        sensitivity=event.sensitivity,
        sampling_probability=event.sampling_probability,
    )
    return np.asarray(np.maximum(curve, SMALLEST_DIVERGENCE))


def _interval(events: tuple[_WithLoss, ...], by_rdp: float) -> float:
    """How coarsely privacy losses may be discretised for some 5e-4 of epsilon, found by measuring; 10 times faster.

    Every interval gives an upper bound, and its points are among those of the finest one, dp-accounting's default: the
    answer is never below the library's. Small epsilons, small losses (q / z of one release) and pure ones, which are
    rounded up to the grid, get the finest.
    """
    gaussians = [event for event in events if isinstance(event, SubsampledGaussian)]
    if len(gaussians) < len(events) or by_rdp < 1:
        return FINEST_INTERVAL
    smallest_loss = min(event.sampling_probability / max(event.noise_multiplier, 1.0) for event in gaussians)
    wanted = min(math.sqrt(5e-5 * by_rdp / sum(event.count for event in gaussians)), smallest_loss / 4)
    multiple = max(multiple for multiple in (1, 2, 5, 10, 20) if multiple <= max(1.0, wanted / FINEST_INTERVAL))
    return FINEST_INTERVAL * multiple


@lru_cache(maxsize=4096)
def _pld_epsilon(events: tuple[_WithLoss, ...], delta: float, interval: float) -> float:
    """By privacy loss distributions; equal histories, common across clients, are computed once."""
    return float(total_loss(events, interval).get_epsilon_for_delta(delta))


def total_loss(events: tuple[_WithLoss, ...], interval: float) -> Any:
    """The privacy loss distribution of the whole composition, from above.

    It starts from the identity as dp-accounting's accountant does, which cuts 1e-15 off the tails: a bound without
    that cut would be as valid, but below the library's.
    """
    with quiet_absl():
        losses = (_loss(event, interval) for event in events)
        return reduce(lambda total, loss: total.compose(loss), losses, pld.privacy_loss_distribution.identity(interval))


def _loss(event: _WithLoss, interval: float) -> Any:
    """The privacy loss distribution of the event with its count, step by step as dp-accounting's accountant has it."""
    if isinstance(event, SubsampledGaussian) and event.sampling_probability == 1:
        # n Gaussians are one with a sqrt(n)-th of the noise.
        noise_multiplier = event.noise_multiplier / math.sqrt(event.count)
        return _single_loss(replace(event, noise_multiplier=noise_multiplier, count=1), interval)
    return _single_loss(replace(event, count=1), interval).self_compose(event.count)


@lru_cache(maxsize=64)
def _single_loss(event: _WithLoss, interval: float) -> Any:
    """The privacy loss distribution of one release, as dp-accounting's own accountant makes it."""
    if isinstance(event, PureEpsilon):
        parameters = pld.common.DifferentialPrivacyParameters(event.epsilon, 0.0)
        return pld.privacy_loss_distribution.from_privacy_parameters(parameters, interval)
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        event.noise_multiplier, value_discretization_interval=interval, sampling_prob=event.sampling_probability
    )


def _as_dp_event(event: SubsampledGaussian) -> Any:
    """One release of the event in dp-accounting's vocabulary; q = 1 is the plain Gaussian."""
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    if event.sampling_probability == 1:
        return gaussian
    return dp_accounting.PoissonSampledDpEvent(event.sampling_probability, gaussian)


@contextmanager
def quiet_absl() -> Iterator[None]:
    """Hide the note that an rdp order was left out: fewer orders only raise the bound."""
    root, silent, verbosity = logging.getLogger(), logging.NullHandler(), absl_logging.get_verbosity()
    root.addHandler(silent)  # without any handler absl would configure the root logger for the whole process
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(verbosity)
        root.removeHandler(silent)

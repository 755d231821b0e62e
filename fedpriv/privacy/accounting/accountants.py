"""Epsilon of a composition of events: accountants `pld` and `rdp`, by Google's dp-accounting, and `closed-form`.

`repeat_and_select` is the cost of publishing only the best of several runs on the same records.

dp-accounting is imported where an epsilon or a delta is computed: scipy.signal and scipy.stats come with it.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.events import Event, SubsampledGaussian, check_known, group
from fedpriv.privacy.accounting.law import Accountant, Array

# dp-accounting's default orders.
ORDERS = np.array([*(1 + tenths / 10 for tenths in range(1, 100)), *range(11, 64), 128, 256, 512, 1024])

# The orders at which a bound for any mechanism under Poisson sampling is known.
INTEGER_ORDERS = np.array([int(order) for order in ORDERS if float(order).is_integer()])

# The finest value discretization interval of a privacy loss, dp-accounting's default, and the coarsest of any use.
FINEST_INTERVAL, _COARSEST_INTERVAL = 1e-4, 1.0

# The intervals that are chosen, in units of the finest.
_MULTIPLES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

# A grid with more losses than this takes many seconds and gigabytes.
_MOST_LOSSES = 3e6

# The shares of all releases, and of one, that dp-accounting leaves outside of a grid of losses.
_TAIL, _TAIL_OF_ONE = 1e-15, math.exp(-50)

# A delta below the first number is rounded by at most the second and, for each release, the third: powers of a Fourier
# transform amplify its rounding (measured with and without sampling: up to 5e-14 at 1,000 releases, 9e-13 at 10,000). A
# larger delta is rounded by less than the grid adds to it.
_TINY_DELTA, _ROUNDING, _ROUNDING_OF_ONE = 1e-9, 5e-14, 1e-16


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """An epsilon, its delta, and how it was computed.

    Attributes:
        epsilon: >= 0, infinite if a release had no noise.
        delta: in (0, 1).
        accountant: the one that gave epsilon.
        upper_bound_only: True if rdp answered for pld, since its bound is the smaller one, or the only one.
        is_guarantee: False if the accounting of an event is not proven, see `Event.caveat`.
    """

    epsilon: float
    delta: float
    accountant: Accountant
    upper_bound_only: bool = False
    is_guarantee: bool = True


def epsilon_of(
    events: Iterable[Event], delta: float, accountant: Accountant = "pld", *, allow_unproven: bool = False
) -> PrivacySpent:
    """The cost of the composition of all events at the given delta.

    Events are composed first and converted once. If `pld` is requested and the rdp epsilon is smaller, as at a tiny
    delta, or an event has no known privacy loss distribution, or the grid of losses would be too large, rdp answers
    instead and the result is marked as an upper bound.

    An (e, d)-DP release is dominated by one that reveals everything with probability d and is e-DP otherwise
    (Kairouz, Oh and Viswanath 2015): d is subtracted from delta, and the rest is composed as pure e-DP.

    Args:
        events: in any order, all of one unit; no events cost nothing.
        delta: in (0, 1).
        accountant: `pld` (tight) or `rdp` (fast, looser).
        allow_unproven: give a finite figure, marked as such, even if an event carries no guarantee; by default it is
            infinite, so that no budget is ever enforced by it.

    Raises:
        ValueError: delta is outside (0, 1), the accountant is unknown, an event is of an unknown type, or events
            protect different units.
    """
    check_delta(delta)
    check_accountant(accountant)
    composition, remaining_delta = _participating(checked(events), delta)
    proven = all(event.is_guarantee for event in composition)
    if not composition:
        return PrivacySpent(epsilon=0.0 if remaining_delta > 0 else math.inf, delta=delta, accountant=accountant)
    if remaining_delta <= 0 or not all(event.is_noised for event in composition) or not (proven or allow_unproven):
        return PrivacySpent(epsilon=math.inf, delta=delta, accountant=accountant, is_guarantee=proven)
    most = math.fsum(event.max_loss for event in composition)
    rdp_epsilon = min(epsilon_of_curve(total_curve(composition), remaining_delta), most)
    pld_epsilon = math.inf
    if accountant == "pld" and (interval := affordable(composition, _value_interval(composition, rdp_epsilon))):
        pld_epsilon = _pld_epsilon(composition, remaining_delta, interval)
    if pld_epsilon <= rdp_epsilon:
        return PrivacySpent(epsilon=pld_epsilon, delta=delta, accountant="pld", is_guarantee=proven)
    is_fallback = accountant == "pld"
    return PrivacySpent(
        epsilon=rdp_epsilon, delta=delta, accountant="rdp", upper_bound_only=is_fallback, is_guarantee=proven
    )


def stays_within(events: Iterable[Event], delta: float, budget: float) -> bool:
    """Whether the composition costs at most (budget, delta); ValueError unless the budget is finite and > 0.

    pld decides, unless rdp, which is cheaper and just as valid a bound, is already clearly below the budget.
    """
    if not 0 < budget < math.inf:
        raise ValueError(f"budget = {budget}: must be finite and > 0")
    events = tuple(events)
    return epsilon_of(events, delta, "rdp").epsilon <= 0.95 * budget or epsilon_of(events, delta).epsilon <= budget


def delta_of(events: Iterable[Event], epsilon: float, accountant: Accountant = "pld") -> float:
    """The smallest delta, in [0, 1], for which the composition is (epsilon, delta)-DP by the accountant.

    Args:
        events: as for `epsilon_of`; delta is 1 if one of them carries no guarantee.
        epsilon: >= 0, finite.
        accountant: `pld` or `rdp`; of pld, as in `epsilon_of`, the smaller of both.

    Raises:
        ValueError: as for `epsilon_of`, or epsilon is negative or not finite.
    """
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon}: must be finite and >= 0")
    check_accountant(accountant)
    composition, remaining_delta = _participating(checked(events), 1.0)
    if not composition:
        return 1.0 - remaining_delta
    if not all(event.is_noised and event.is_guarantee for event in composition):
        return 1.0
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    curve = total_curve(composition)
    converted = float(compute_delta(ORDERS, curve, epsilon)[0]) if np.isfinite(curve).any() else 1.0
    if accountant == "pld" and (interval := affordable(composition, FINEST_INTERVAL)):
        found = float(total_loss(composition, interval).get_delta_for_epsilon(epsilon))
        converted = min(converted, found + rounding_of(found, composition))
    return min(1.0, 1.0 - remaining_delta + converted)


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must lie in (0, 1), for instance 1e-5")


def check_accountant(accountant: str) -> None:
    """Refuse an accountant that is neither `pld` nor `rdp`."""
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant = {accountant!r}: must be pld or rdp")


def checked(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, grouped and in an order of their own; ValueError if a type is unknown, or their units differ."""
    events = tuple(events)
    for event in events:
        check_known(event)
    if len(units := {event.unit for event in events}) > 1:
        raise ValueError(f"units {', '.join(sorted(units))}: guarantees of different units have no common epsilon")
    return tuple(sorted(group(events), key=repr))


def _participating(events: Iterable[Event], delta: float) -> tuple[tuple[Event, ...], float]:
    """The events in which a record may take part, and what remains of delta after subtracting their own deltas."""
    composition = tuple(event for event in events if event.sampling_probability > 0)
    for event in composition:
        delta -= event.total_delta
    return composition, delta


def total_loss(events: Iterable[Event], value_interval: float) -> Any:
    """A privacy loss distribution, on a grid of this interval, that bounds a composition of events that have one.

    Like dp-accounting's accountant, it starts from the identity, which truncates 1e-15 of the tails. Without that
    truncation the bound would be just as valid, but lower than the library's.
    """
    from dp_accounting import pld

    with _quiet_absl():
        identity = pld.privacy_loss_distribution.identity(value_interval)
        return reduce(lambda total, event: total.compose(event.pld(value_interval)), events, identity)


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """Silence the warning that an rdp order was left out: fewer orders only raise the bound."""
    from absl import logging as absl_logging

    root, silent, verbosity = logging.getLogger(), logging.NullHandler(), absl_logging.get_verbosity()
    root.addHandler(silent)  # without any handler, absl would configure the root logger of the whole process
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(verbosity)
        root.removeHandler(silent)


def epsilon_of_curve(curve: Array, delta: float) -> float:
    """Epsilon of a Renyi curve at `ORDERS`; infinite if the curve is infinite at every order.

    Source: Canonne, Kamath and Steinke 2020, Proposition 12, by dp-accounting.
    """
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, curve, delta)[0]) if np.isfinite(curve).any() else math.inf


def total_curve(events: Iterable[Event]) -> Array:
    """[orders] The Renyi divergence of a composition at `ORDERS`; infinite where no bound is known."""
    total: Array = np.sum([event.count * _single_curve(event.with_count(1)) for event in events], axis=0)
    return total


@lru_cache(maxsize=65536)
def _single_curve(event: Event) -> Array:
    """Renyi divergence of one release at dp-accounting's default orders."""
    return event.rdp(ORDERS)


def _value_interval(events: tuple[Event, ...], rdp_epsilon: float) -> float:
    """A value discretization interval that costs some 5e-4 of epsilon, as measured, and is 10 times faster.

    Every interval gives an upper bound, and its grid points are among those of the finest one, dp-accounting's
    default, so the result is never below the library's, but where e^-epsilon underflows: from some 700 on, points of
    the grid alone are found. So an interval above 2e-3 is at most 1e-5 of epsilon. Small epsilons, small losses (q / z
    of one release) and pure epsilons, which are rounded up to the grid, get the finest one.
    """
    smallest_loss = min(event.loss_scale for event in events)
    if smallest_loss == 0 or rdp_epsilon < 1:
        return FINEST_INTERVAL
    by_error = math.sqrt(5e-5 * rdp_epsilon / sum(event.count for event in events))
    coarsest = min(by_error, smallest_loss / 4, max(2e-3, 1e-5 * rdp_epsilon))
    return FINEST_INTERVAL * max(n for n in _MULTIPLES if n <= max(1.0, coarsest / FINEST_INTERVAL))


def affordable(events: Sequence[Event], value_interval: float) -> float | None:
    """The interval > 0, doubled until the grid of losses is small enough; None if pld cannot or need not be asked.

    The grid has the losses from minus to plus the rdp epsilon at the tail that is left outside. Its size alone decides,
    whatever epsilon is: a coarser grid gives a bound that is larger by little, and so no jump.
    """
    if not all(event.has_pld for event in events):
        return None
    tails = [(total_curve(events), _TAIL), *((_single_curve(event.with_count(1)), _TAIL_OF_ONE) for event in events)]
    largest = max(epsilon_of_curve(curve, tail) for curve, tail in tails)
    while 2 * largest > _MOST_LOSSES * value_interval and value_interval <= _COARSEST_INTERVAL:
        value_interval *= 2
    return value_interval if value_interval <= _COARSEST_INTERVAL else None


def rounding_of(delta: float, events: Iterable[Event]) -> float:
    """By how much the true delta may exceed one that a privacy loss distribution of the events gives, >= 0."""
    releases = sum(event.count for event in events)
    return _ROUNDING + _ROUNDING_OF_ONE * releases if delta < _TINY_DELTA else 0.0


def epsilon_of_loss(loss: Any, delta: float, events: Iterable[Event]) -> float:
    """Epsilon of the events' privacy loss distribution; infinite where delta is lost in rounding."""
    left = delta - rounding_of(delta, events)
    return float(loss.get_epsilon_for_delta(left)) if left > 0 else math.inf


@lru_cache(maxsize=4096)
def _pld_epsilon(events: tuple[Event, ...], delta: float, value_interval: float) -> float:
    """Epsilon by privacy loss distributions; equal histories, common across clients, are computed once."""
    return epsilon_of_loss(total_loss(events, value_interval), delta, events)


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """The DP-LoRA paper's epsilon, and whether its conditions hold.

    Attributes:
        epsilon: c2 q sqrt(T ln(1/delta)) / (rho_bar sigma).
        conditions_hold: whether every condition of the theorem holds for constants c1 and c2.
        violated: the conditions that do not hold, as text.
    """

    epsilon: float
    conditions_hold: bool
    violated: tuple[str, ...]


def closed_form(events: Iterable[Event], delta: float, *, c1: float = 1.0, c2: float = 2.0) -> ClosedForm:
    """The DP-LoRA paper's epsilon of a composition, and whether its conditions hold: for reproduction only.

    It is not a guarantee, and is used neither to enforce a budget nor to calibrate: the theorem's constants exist but
    are not known, and even where the conditions hold for c1 = 1, c2 = 2 the result can be below the true epsilon
    (q = 0.04, sigma = 1, T = 1e5: 86 against 197).

    Args:
        events: identical subsampled Gaussians as the `rho` view sees them, with noise multiplier rho_bar sigma.
        delta: in (0, 1).
        c1: constant of the range of validity, epsilon < c1 q^2 T.
        c2: constant of the noise bound.

    Raises:
        ValueError: delta is out of range, or the events are not all the same subsampled Gaussian: the theorem knows
            one q and one sigma.

    Source: Liu et al., Theorem 1 (Eq. 9); conditions of Abadi et al. 2016, Theorem 1.
    """
    check_delta(delta)
    grouped = group(events)
    if not grouped:
        return ClosedForm(epsilon=0.0, conditions_hold=False, violated=("epsilon < c1 q^2 T",))
    if len(grouped) > 1 or not isinstance(grouped[0], SubsampledGaussian):
        raise ValueError("accountant = closed-form: supports only one noise multiplier and one sampling probability")
    noise_multiplier, q, steps = grouped[0].noise_multiplier, grouped[0].sampling_probability, grouped[0].count
    if noise_multiplier == 0:
        return ClosedForm(epsilon=math.inf, conditions_hold=False, violated=("rho_bar * sigma >= 1",))
    epsilon = c2 * q * math.sqrt(steps * math.log(1 / delta)) / noise_multiplier
    conditions = {
        "rho_bar * sigma >= 1": noise_multiplier >= 1,
        "q < 1 / (16 rho_bar * sigma)": q < 1 / (16 * noise_multiplier),
        "epsilon < c1 q^2 T": epsilon < c1 * q**2 * steps,
    }
    violated = tuple(name for name, holds in conditions.items() if not holds)
    return ClosedForm(epsilon=epsilon, conditions_hold=not violated, violated=violated)


def repeat_and_select(
    events: Iterable[Event],
    delta: float,
    *,
    mean_repetitions: float,
    shape: float = 1.0,
    number_is_random_and_secret: bool,
    losers_are_hidden: bool,
) -> float:
    """Epsilon, by rdp, of publishing the best of a random number of runs that each release the given events.

    The sum over all runs, which a ledger keeps, is always a bound. This one is smaller, but holds only if the number of
    runs is random and secret and the losers stay hidden.

    Args:
        events: of one run, all subsampled Gaussians.
        delta: in (0, 1).
        mean_repetitions: expected number of runs, >= 1.
        shape: of the truncated negative binomial distribution of that number, >= 0: 1 is geometric, 0 logarithmic,
            infinity Poisson.
        number_is_random_and_secret: whether the number of runs was drawn from that distribution and stays secret.
        losers_are_hidden: whether nobody, not even the server, sees anything of the runs that were not chosen.

    Raises:
        InputError: a condition does not hold. In a federation the server sees every run's uploads, so the bound never
            holds against it; it can hold against someone who gets only the chosen model.
        ValueError: a value is out of range.

    Source: Papernot and Steinke 2022, Theorems 2 and 6, by dp-accounting.
    """
    import dp_accounting
    from dp_accounting import rdp

    advice = "sum the runs, as one ledger for all of them does"
    if not number_is_random_and_secret:
        raise InputError(f"repeat-and-select: the number of runs must be random and secret; otherwise {advice}")
    if not losers_are_hidden:
        raise InputError(f"repeat-and-select: nobody may see the losers; otherwise {advice}")
    check_delta(delta)
    if not 1 <= mean_repetitions < math.inf:
        raise ValueError(f"mean_repetitions = {mean_repetitions}: must be finite and >= 1")
    if not shape >= 0:
        raise ValueError(f"shape = {shape}: must be >= 0")
    run = [_as_dp_event(event) for event in group(events)]
    accountant = rdp.RdpAccountant()
    with _quiet_absl():
        accountant.compose(
            dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.ComposedDpEvent(run), mean_repetitions, shape)
        )
        return float(accountant.get_epsilon(delta))


def _as_dp_event(event: Event) -> Any:
    import dp_accounting

    if not isinstance(event, SubsampledGaussian):
        raise ValueError(f"event {event!r}: repeat-and-select supports only subsampled Gaussians")
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, event.count)

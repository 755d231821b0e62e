"""The noise that a target of epsilon or risk needs, and the number of rounds that a budget allows."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from scipy import optimize

from fedpriv.privacy.accounting.accountants import check_delta, epsilon_of
from fedpriv.privacy.accounting.events import Event, SubsampledGaussian
from fedpriv.privacy.accounting.gaussian import MAX_NOISE
from fedpriv.privacy.accounting.law import Accountant
from fedpriv.privacy.accounting.risk import RiskTarget
from fedpriv.privacy.accounting.trade_off import gaussian_epsilon

# All releases of one client as a function of the noise multiplier.
Schedule = Callable[[float], Sequence[Event]]
# A client's releases in the first rounds of a run, as a function of their number.
_FirstRounds = Callable[[int], Sequence[Event]]

_MAX_ROUNDS = 10**9
_LARGEST_EXCESS = 1e6


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    scale: float = 1.0,
    accountant: Accountant = "pld",
) -> float:
    """The smallest noise multiplier z that keeps Gaussian steps within (epsilon, delta), to 1e-7 (rdp) or 1e-4 (pld).

    Guarantee: the schedule with the returned z costs at most epsilon by the given accountant.

    Args:
        epsilon: target, finite, > 0.
        delta: in (0, 1).
        sampling_probability: q in (0, 1].
        steps: total number of noisy steps, >= 1.
        scale: what z is multiplied by to give the effective noise multiplier: 1 / sensitivity factor, times rho_bar
            on the `rho` view; > 0.
        accountant: `pld` or `rdp`.

    Raises:
        ValueError: a value is out of range, or no noise up to 1e6 suffices.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale = {scale}: must be finite and > 0")
    if not 0 < sampling_probability <= 1:
        raise ValueError(f"sampling_probability = {sampling_probability}: must lie in (0, 1]")

    def schedule(z: float) -> list[Event]:
        return [SubsampledGaussian(noise_multiplier=z * scale, sampling_probability=sampling_probability, count=steps)]

    return calibrate(schedule, epsilon, delta, accountant)


def calibrate(
    schedule: Schedule,
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    *,
    fixed: Sequence[Event] = (),
    allow_unproven: bool = False,
) -> float:
    """The smallest noise multiplier, for any mechanism, that keeps a schedule within (epsilon, delta).

    Guarantee: the schedule with the returned noise costs at most epsilon by the accountant that `epsilon_of` uses.

    Args:
        schedule: the releases as a function of the noise multiplier; more noise must not cost more.
        epsilon: target, finite, > 0.
        delta: in (0, 1).
        accountant: `pld` or `rdp`.
        fixed: further releases, whose noise is given; they count towards epsilon.
        allow_unproven: as for `epsilon_of`; then the result is no guarantee either.

    Raises:
        ValueError: a value is out of range, or no noise up to 1e6 suffices.
    """
    check_delta(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon = {epsilon}: must be finite and > 0")

    def excess(z: float, accountant: Accountant) -> float:
        spent = epsilon_of([*schedule(z), *fixed], delta, accountant, allow_unproven=allow_unproven)
        return spent.epsilon - epsilon

    def by_rdp(z: float) -> float:
        return excess(z, "rdp")

    if accountant == "rdp" or not all(event.has_pld for event in [*schedule(1.0), *fixed]):
        return _smallest(by_rdp, start=1.0, tolerance=1e-7 if accountant == "rdp" else 1e-4)
    # rdp is fast and hardly ever below pld: it finds the neighbourhood, unless releases that do not depend on z are too
    # much by rdp alone, and then the requested accountant the value.
    start = _smallest(by_rdp, start=1.0, tolerance=0.02) if by_rdp(MAX_NOISE) <= 0 else 1.0
    return _smallest(lambda z: excess(z, "pld"), start=start, tolerance=1e-4)


def calibrate_all(
    clients: Iterable[tuple[Schedule, float]],
    epsilon: float,
    accountant: Accountant = "pld",
    *,
    fixed: Sequence[Event] = (),
    allow_unproven: bool = False,
) -> float:
    """The smallest noise multiplier that keeps every client within epsilon at its own delta.

    Args:
        clients: (schedule, delta) of each, at least one.
        epsilon: target for each client, finite, > 0.
        accountant: `pld` or `rdp`.
        fixed: further releases of every client, whose noise is given; they count towards epsilon.
        allow_unproven: as for `calibrate`.

    Raises:
        ValueError: a value is out of range, there is no client, or no noise suffices.
    """

    def exceeds(schedule: Schedule, delta: float, z: float) -> bool:
        return epsilon_of([*schedule(z), *fixed], delta, accountant, allow_unproven=allow_unproven).epsilon > epsilon

    def needed(schedule: Schedule, delta: float) -> float:
        return calibrate(schedule, epsilon, delta, accountant, fixed=fixed, allow_unproven=allow_unproven)

    return _for_all(clients, exceeds, needed)


def calibrate_to_risk(
    clients: Iterable[tuple[Schedule, float]], target: RiskTarget, *, fixed: Sequence[Event] = ()
) -> float:
    """The smallest noise multiplier, to 1e-4, with which no client's releases exceed a risk.

    Args:
        clients, fixed: as for `calibrate_all`.
        target: the risk, for which the releases count as fixed in advance.

    Raises:
        ValueError: there is no client, or no noise suffices.
    """

    def excess(schedule: Schedule, delta: float, z: float) -> float:
        return target.excess([*schedule(z), *fixed], delta)

    def needed(schedule: Schedule, delta: float) -> float:
        # Unsampled noise of that risk has this epsilon, which by rdp is near.
        start = calibrate(schedule, gaussian_epsilon(target.gaussian_mu, delta), delta, "rdp")
        return _smallest(lambda z: excess(schedule, delta, z), start=start, tolerance=1e-4)

    return _for_all(clients, lambda schedule, delta, z: excess(schedule, delta, z) > 0, needed)


def _for_all(
    clients: Iterable[tuple[Schedule, float]],
    exceeds: Callable[[Schedule, float, float], bool],
    needed: Callable[[Schedule, float], float],
) -> float:
    """The noise multiplier with which no client, by schedule and delta, exceeds its limit."""
    # The client with the highest sampling probability usually needs the most noise. The others are checked, and rarely
    # need more because of their delta.
    distinct = {(tuple(schedule(1.0)), delta): schedule for schedule, delta in clients}
    ordered = sorted(distinct, key=lambda c: (-max(event.sampling_probability for event in c[0]), c[1]))
    if not ordered:
        raise ValueError("clients: calibration needs at least one")
    multiplier = 0.0
    for events, delta in ordered:
        schedule = distinct[events, delta]
        if multiplier == 0 or exceeds(schedule, delta, multiplier):
            multiplier = needed(schedule, delta)
    return multiplier


def _smallest(excess: Callable[[float], float], *, start: float, tolerance: float) -> float:
    """The smallest z, near `start`, with an excess, which must not rise with z, of at most 0: never below it."""
    excess = cache(excess)  # the search asks again about the ends of its bracket, and about the root
    low = high = start
    while excess(high) > 0:
        if high == MAX_NOISE:
            raise ValueError(f"no noise multiplier up to {MAX_NOISE:g} meets the target; raise epsilon or delta")
        low, high = high, min(1.5 * high, MAX_NOISE)
    while low == high or excess(low) <= 0:
        low, high = low / 1.5, low
        if low < 1 / MAX_NOISE:
            return high
    # Infinite costs have no place between others.
    z = optimize.brentq(lambda middle: min(excess(middle), _LARGEST_EXCESS), low, high, xtol=low * tolerance / 4)
    while excess(z) > 0:
        z *= 1 + tolerance / 2
    return float(z)


def rounds_within(
    epsilon: float,
    delta: float,
    *,
    each_round: Event,
    spent_before: Iterable[Event] = (),
    at_most: int | None = None,
    accountant: Accountant = "pld",
) -> int:
    """The largest number of rounds whose cost stays within (epsilon, delta); 0 if not even one does.

    Args:
        epsilon: budget, finite, > 0.
        delta: in (0, 1).
        each_round: the event of one round, on the view in question.
        spent_before: the events released before, on the same view.
        at_most: the number of rounds after which the search stops; None searches until the budget is used up.
        accountant: `pld` or `rdp`.

    Raises:
        ValueError: a value is out of range, or the budget is never used up (more than 1e9 rounds).
    """
    before = list(spent_before)

    def first_rounds(num: int) -> list[Event]:
        return [*before, each_round.with_count(num * each_round.count)]

    return first_rounds_within(epsilon, delta, first_rounds, at_most=at_most, accountant=accountant)


def first_rounds_within(
    epsilon: float,
    delta: float,
    first_rounds: _FirstRounds,
    *,
    at_most: int | None = None,
    accountant: Accountant = "pld",
) -> int:
    """`rounds_within` for rounds that cost differently.

    Args:
        epsilon, delta, at_most, accountant: as for `rounds_within`.
        first_rounds: what was released before and in the first so many rounds, >= 1; a further round adds to it.

    Raises:
        ValueError: see `rounds_within`.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon = {epsilon}: must be finite and > 0")

    def fits(rounds: int) -> bool:
        return epsilon_of(first_rounds(rounds), delta, accountant).epsilon <= epsilon

    if at_most is not None and (at_most == 0 or fits(at_most)):
        return at_most
    low, high = 0, 1
    while (at_most is None or high < at_most) and fits(high):
        low, high = high, 2 * high
        if high > _MAX_ROUNDS:
            raise ValueError(f"epsilon = {epsilon}: more than {_MAX_ROUNDS} rounds fit; the budget does not bind")
    high = high if at_most is None else min(high, at_most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""Audit of a whole trade-off curve in one run: Gaussian DP, (epsilon, delta)-DP, or the accountant's privacy profile.

Let f be the claimed trade-off function, symmetric, and F = 1 - f its blow-up: an event of probability x without a
canary has probability at most F(x) with it, and vice versa. The attacker makes exactly g guesses on m canaries; p_l is
the probability that l of them are right. Fix c and, for canary j, the event O_j that j is guessed and at least c - 1
of the *other* guesses are right, which does not depend on the bit of j. F is concave, so averaging over the bit, over
the other bits and over j,

    P[j right and O_j] <= F(P[j wrong and O_j])   gives   sum_{l >= c} l p_l / m <= F(sum_{l >= c-1} (g - l) p_l / m).

With r_i = sum_{l >= i} l p_l / m and h_i = sum_{l >= i} (g - l) p_l / m this becomes h_i >= F^{-1}(r_{i+1}) for all i,
and r_0 + h_0 = g / m. Suppose P[at least c right] >= t. Then r_c + h_c >= t g / m and r_c >= t c / m, and the recursion

    h_i = max(h_{i+1}, F^{-1}(r_{i+1})),   r_i = r_{i+1} + i / (g - i) (h_i - h_{i+1})

from r_c = t c / m, h_c = t (g - c) / m gives the least possible r_0 + h_0; if it exceeds g / m, then t is impossible.
Proof that it is the least: let P_i = (r_i + h_i) m / g be the mass from i on. Suppose a state has dP more mass and dr
more r with m dr >= i dP >= 0, which is true of every tail that is heavier or further up, and of every mass beyond the
required one. Then the same is true of the next state: the required mass falls by at most (g dP - m dr) / (g - i + 1),
so dP' >= (m dr - (i - 1) dP) / (g - i + 1) >= 0, and m dr' - (i - 1) dP' = m dr - (i - 1) dP >= 0.

Source: Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235), for two outcomes and abstentions.

`audit_power` tells beforehand how much an audit could find: its bounds if every guess were right, and those of an ideal
attacker on the claim, who sees, for each canary alone, the sum of what its record added to all releases and of their
noise. Attackers who see a model find less: canaries disturb each other, and a model does not show its weights' inner
products with them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InputError
from fedpriv.methods.audit._bounds import (
    check_group_size,
    fixed_num_guesses,
    largest_error_rates,
    num_correct,
    one_run_epsilon,
)
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.law import Array, Event
from fedpriv.privacy.accounting.risk import trade_off_of
from fedpriv.privacy.accounting.trade_off import TradeOff, gaussian, gaussian_epsilon, of_group

_GRID = 17
_PASSES = 5
_LARGEST_MU = 16.0

# The noise of a schedule is varied by these factors, so often.
_LEAST_NOISE, _MOST_NOISE, _NOISE_STEPS = 1 / 16, 64.0, 10

# Attackers, of whom the median counts.
_ATTACKERS = 101


def rejected(
    trade_off: TradeOff, level: float, num_canaries: int, num_guesses: int, num_correct: int, num_claims: int = 1
) -> npt.NDArray[np.bool_]:
    """[claims] Which claims make at least this many correct guesses less likely than the level."""
    m, g, c = num_canaries, num_guesses, num_correct
    r, h = np.full(num_claims, level * c / m), np.full(num_claims, level * (g - c) / m)
    for i in range(c - 1, -1, -1):
        needed = np.maximum(h, trade_off(1 - np.minimum(r, 1.0)))  # F^{-1}(r) = f(1 - r), since f is symmetric
        r, h = r + i / (g - i) * (needed - h), needed
        if (r + h > g / m).all():
            break
    # A rounding error must not reject a claim: at level 1 the claim of no privacy at all gives exactly g / m.
    return np.asarray(r + h > g / m * (1 + 1e-12))


def _largest_rejected(
    claims: Callable[[Array], TradeOff],
    largest: float,
    *,
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    confidence: float,
) -> float:
    """The largest parameter rejected at the level 1 - confidence, in a family of weakening claims; >= 0.

    Args:
        claims: maps parameters, [n] >= 0, to trade-off functions, one for each; a larger parameter claims less privacy.
    """
    low, high = 0.0, largest
    for _ in range(_PASSES):
        values = np.linspace(low, high, _GRID)
        is_rejected = rejected(claims(values), 1 - confidence, num_canaries, num_guesses, num_correct, _GRID)
        end = int(np.argmin(is_rejected)) if not is_rejected.all() else _GRID
        if end == 0:
            return 0.0
        if end == _GRID:
            return high
        low, high = float(values[end - 1]), float(values[end])
    return low


def gaussian_mu(*, num_canaries: int, num_guesses: int, num_correct: int, confidence: float = 0.95) -> float:
    """A lower bound on mu for a run that is claimed to be mu-GDP, such as Gaussian noise without sampling."""
    return _largest_rejected(
        gaussian,
        _LARGEST_MU,
        num_canaries=num_canaries,
        num_guesses=num_guesses,
        num_correct=num_correct,
        confidence=confidence,
    )


def schedule_epsilon(
    events: Iterable[Event],
    delta: float,
    *,
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    confidence: float = 0.95,
    group_size: int = 1,
) -> float:
    """A lower bound on epsilon for releases whose noise alone is in doubt, >= 0; infinite above all that is tried.

    The claims are the accountant's whole curves of the same releases, with the noise of each multiplied by one factor
    in 1/16..64. The bound is the epsilon of the weakest claim that is rejected. It holds against claims of this family,
    and against no single (epsilon, delta). Releases without noise, or with none that is known and proven, are held
    against Gaussian DP.

    Args:
        delta: in (0, 1), for epsilon.
        num_canaries: m.
        num_guesses: g <= m, fixed beforehand.
        num_correct: c <= g.
        confidence: in (0, 1).
        group_size: records that a canary consists of; the bound is of one.

    Raises:
        InputError: the group is of no records.
    """
    check_group_size(group_size)
    released = _released(events)
    counts = {"num_canaries": num_canaries, "num_guesses": num_guesses, "num_correct": num_correct}
    if not has_curve(released):
        return gaussian_epsilon(gaussian_mu(**counts, confidence=confidence) / group_size, delta)

    def refutes(claim: TradeOff) -> bool:
        claim = of_group(claim, group_size)
        return bool(rejected(claim, 1 - confidence, num_canaries, num_guesses, num_correct)[0])

    return _epsilon_of_weakest_rejected(released, delta, refutes)


def has_curve(events: Iterable[Event]) -> bool:
    """Whether the accountant has a proven curve of the releases for any amount of noise: there is noise, in numbers."""
    return all(event.is_noised and event.is_guarantee and event.with_noise(2.0) != event for event in _released(events))


def _released(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events that say anything of any record."""
    return tuple(event for event in events if event.sampling_probability > 0)


def many_runs_schedule_epsilon(
    events: Iterable[Event],
    delta: float,
    *,
    num_false_positives: int,
    num_without: int,
    num_false_negatives: int,
    num_with: int,
    confidence: float = 0.95,
) -> float:
    """A lower bound on epsilon as `schedule_epsilon` gives it, from the two error rates of one test over many runs.

    A claim with trade-off function f is rejected where f of the largest rate of false positives exceeds the largest of
    false negatives, each by its one-sided Clopper-Pearson bound at half the error probability.

    Args:
        events: of one run, as they are charged; all noised.
        delta: in (0, 1), for epsilon.
        num_false_positives: of `num_without` runs without the record, how many the test took for runs with it.
        num_without: >= 1.
        num_false_negatives: of `num_with` runs with the record, how many it took for runs without.
        num_with: >= 1.
        confidence: in (0, 1).

    Raises:
        InputError: a count or a level is out of range, or an event has no proven curve.
    """
    wrong, missed = largest_error_rates(
        num_false_positives, num_without, num_false_negatives, num_with, confidence=confidence
    )
    released = _released(events)
    if not has_curve(released):
        raise InputError("events: need noise, in numbers, whose accounting is proven")
    return _epsilon_of_weakest_rejected(released, delta, lambda claim: bool(claim(np.array([wrong]))[0] > missed))


def _epsilon_of_weakest_rejected(
    released: tuple[Event, ...], delta: float, refutes: Callable[[TradeOff], bool]
) -> float:
    """The epsilon with the least noise, in 1/16..64 times that of the events, whose claim is refuted; 0 if none is."""

    def claimed(noise: float) -> tuple[Event, ...]:
        return tuple(event.with_noise(noise) for event in released)

    low, high = _LEAST_NOISE, _MOST_NOISE
    if not refutes(trade_off_of(claimed(high))):
        return 0.0
    for _ in range(_NOISE_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refutes(trade_off_of(claimed(middle))) else (middle, high)
    # Last, since curves of so little noise take longest, and most searches end far above.
    if low == _LEAST_NOISE and refutes(trade_off_of(claimed(low))):
        return math.inf
    return epsilon_of(claimed(high), delta).epsilon


@dataclass(frozen=True, kw_only=True)
class AuditPower:
    """The lower bounds of epsilon that an audit may expect, as `one_run_audit` and as `schedule_epsilon` give them.

    Attributes:
        num_guesses: fixed beforehand.
        num_correct: of an ideal attacker, in the median.
        largest, largest_f_dp: if every guess is right, as they may be without noise.
        ideal, ideal_f_dp: of the median ideal attacker, if the claim is exactly true.
    """

    num_canaries: int
    num_guesses: int
    num_correct: int
    largest: float
    largest_f_dp: float
    ideal: float
    ideal_f_dp: float


def audit_power(
    events: Iterable[SubsampledGaussian],
    delta: float,
    num_canaries: int,
    *,
    confidence: float = 0.95,
    group_size: int = 1,
) -> AuditPower:
    """The power of an audit of these releases.

    Args:
        events: of a canary's holder, as they will be charged; all noised.
        delta: in (0, 1).
        num_canaries: of all clients, >= 2.
        confidence: in (0, 1).
        group_size: records that a canary consists of.

    Raises:
        InputError: there are fewer than two canaries, or an event is not Gaussian noise.
    """
    if num_canaries < 2:
        raise InputError(f"num_canaries = {num_canaries}: must be >= 2")
    released = tuple(events)
    if bad := [event for event in released if not isinstance(event, SubsampledGaussian) or not event.is_noised]:
        raise InputError(f"event {bad[0]}: an audit's power is known for Gaussian noise alone")
    num_guesses = fixed_num_guesses(num_canaries)
    typical = int(np.median(_correct(released, num_canaries, num_guesses, group_size)))

    def bounds(correct: int) -> tuple[float, float]:
        counts = {
            "num_canaries": num_canaries,
            "num_guesses": num_guesses,
            "num_correct": correct,
            "group_size": group_size,
        }
        by_one_run = one_run_epsilon(**counts, delta=delta, confidence=confidence)
        return float(by_one_run), schedule_epsilon(released, delta, **counts, confidence=confidence)

    (largest, largest_f_dp), (ideal, ideal_f_dp) = bounds(num_guesses), bounds(typical)
    return AuditPower(
        num_canaries=num_canaries,
        num_guesses=num_guesses,
        num_correct=typical,
        largest=largest,
        largest_f_dp=largest_f_dp,
        ideal=ideal,
        ideal_f_dp=ideal_f_dp,
    )


def _correct(events: tuple[SubsampledGaussian, ...], num: int, num_guesses: int, group_size: int) -> list[int]:
    """[attackers] right guesses of ideal attackers."""
    rng, found = np.random.default_rng(0), []
    for _ in range(_ATTACKERS):
        included = rng.random(num) < 0.5
        scores = np.zeros(num)
        for event in events:
            noise = event.effective_noise_multiplier
            drawn = rng.binomial(event.count * group_size, event.sampling_probability, num) * included
            # Releases with little noise tell more than others, and count more.
            scores += (drawn + noise * np.sqrt(event.count) * rng.standard_normal(num)) / noise**2
        found.append(int(num_correct(scores, included, np.array([num_guesses]))[0]))
    return found

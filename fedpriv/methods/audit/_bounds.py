"""Lower bounds on epsilon from an attacker's guesses: in one run with many canaries, and over many runs.

One run (Steinke, Nasr and Jagielski 2023): each of m canaries is in the data independently with probability 1/2, and
the attacker guesses for some of them whether they are. Under (epsilon, 0)-DP the number of correct guesses is
stochastically at most that of randomised response, Binomial(guesses, e^epsilon / (1 + e^epsilon)); delta adds 2 m delta
times the largest mean probability of the counts just below. The number of guesses must not depend on the inclusions:
it is fixed before they are seen, or each number that is tried gets its share of the error probability.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.law import Array

_BISECTIONS = 60
_LARGEST_EPSILON = 64.0


@dataclass(frozen=True, kw_only=True)
class OneRunAudit:
    """The result of an audit of one run.

    Attributes:
        epsilon_lower: with probability `confidence`, the run is not (epsilon, delta)-DP for any smaller epsilon.
        delta: in [0, 1).
        confidence: in (0, 1).
        num_guesses: that gave the bound.
        num_correct: how many of these were correct.
        num_tried: how many numbers of guesses shared the error probability; 1 if it was fixed beforehand.
        group_size: records, or persons, that a canary consists of; epsilon_lower is of one.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    num_canaries: int
    num_guesses: int
    num_correct: int
    num_tried: int
    group_size: int = 1


def one_run_audit(
    scores: npt.ArrayLike,
    included: npt.ArrayLike,
    *,
    num_guesses: int | Sequence[int] | None = None,
    delta: float = 0.0,
    confidence: float = 0.95,
    group_size: int = 1,
) -> OneRunAudit:
    """A lower bound on epsilon from the scores of canaries in one run.

    The canaries with the highest scores are guessed to be in and equally many with the lowest scores to be out.

    Args:
        scores: [canaries], finite; a higher score means more likely included.
        included: bool [canaries], each drawn with probability 1/2.
        num_guesses: even, in 2..canaries, fixed before the inclusions were seen; several values share the error
            probability 1 - confidence; None tries the values of `ladder`.
        delta: in [0, 1).
        confidence: in (0, 1).
        group_size: r >= 1, the records that each canary consists of. The bound is of one record: an (epsilon,
            delta)-DP run is (r epsilon, delta (e^(r epsilon) - 1) / (e^epsilon - 1))-DP for r together.

    Raises:
        InputError: a value is out of range, a score is not finite, or all or none of the canaries are included.

    Source: Steinke, Nasr and Jagielski 2023, Algorithm 1 and Corollary 5.4.
    """
    values, inside = checked_scores(scores, included)
    _check_levels(delta, confidence)
    sizes = ladder(len(values)) if num_guesses is None else np.atleast_1d(np.asarray(num_guesses, dtype=np.int64))
    if bad := [int(size) for size in sizes if not 2 <= size <= len(values) or size % 2]:
        raise InputError(f"num_guesses = {bad[0]}: must be even and lie in 2..{len(values)}, the canaries")
    correct = num_correct(values, inside, sizes)
    epsilons = one_run_epsilon(
        num_canaries=len(values),
        num_guesses=sizes,
        num_correct=correct,
        delta=delta,
        confidence=1 - (1 - confidence) / len(sizes),
        group_size=group_size,
    )
    best = int(np.argmax(epsilons))
    return OneRunAudit(
        epsilon_lower=float(epsilons[best]),
        delta=delta,
        confidence=confidence,
        num_canaries=len(values),
        num_guesses=int(sizes[best]),
        num_correct=int(correct[best]),
        num_tried=len(sizes),
        group_size=group_size,
    )


def combined_audit(audits: Sequence[OneRunAudit]) -> OneRunAudit:
    """The audit of several independent runs of one mechanism at once, each with canaries and coins of its own.

    A coin decides about its own run alone, so the runs together are a mechanism with the guarantee of each, and their
    canaries and guesses count together.

    Args:
        audits: at least one, of the same delta, confidence and group size; each number of guesses was fixed beforehand.

    Raises:
        InputError: there is none, they differ, or a number of guesses was searched.
    """
    if not audits:
        raise InputError("audits: there are none to combine")
    first = audits[0]
    for name in ("delta", "confidence", "group_size", "num_tried"):
        expected = 1 if name == "num_tried" else getattr(first, name)
        if bad := [getattr(audit, name) for audit in audits if getattr(audit, name) != expected]:
            raise InputError(f"{name} = {bad[0]}: audits that are combined need {expected}")
    canaries, guesses, correct = (
        sum(getattr(audit, name) for audit in audits) for name in ("num_canaries", "num_guesses", "num_correct")
    )
    epsilon = one_run_epsilon(
        num_canaries=canaries,
        num_guesses=guesses,
        num_correct=correct,
        delta=first.delta,
        confidence=first.confidence,
        group_size=first.group_size,
    )
    return replace(first, epsilon_lower=float(epsilon), num_canaries=canaries, num_guesses=guesses, num_correct=correct)


def fixed_num_guesses(num_canaries: int) -> int:
    """An even number of guesses that suits many attackers: about 5 times the root of the canaries, or all of them.

    Fewer guesses are surer, and more of them prove more; between a sixth and half of 1,000 canaries the bounds of ideal
    attackers at epsilon 4 and 8 hardly differ, and weaker ones need more than the strongest.
    """
    return 2 * max(1, round(min(num_canaries / 2 - 0.25, 2.5 * math.sqrt(num_canaries))))


def ladder(num_canaries: int) -> npt.NDArray[np.int64]:
    """Even numbers of guesses to try: from 10 up by factors of about 1.6, then all canaries; about 14 for 5,000."""
    sizes = 10 * 1.6 ** np.arange(64)
    even = 2 * np.round(sizes[sizes < num_canaries] / 2)
    return np.unique(np.append(even, num_canaries - num_canaries % 2)).astype(np.int64)


def num_correct(scores: Array, included: npt.NDArray[np.bool_], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of correct guesses for each even number of guesses; ties are broken by the canaries' order."""
    ordered = included[np.argsort(scores, kind="stable")]
    out_below = np.append(0, np.cumsum(~ordered))
    in_above = np.append(0, np.cumsum(ordered[::-1]))
    return np.asarray(out_below[sizes // 2] + in_above[sizes // 2])


def _one_run_p_value(
    epsilon: npt.ArrayLike,
    delta: npt.ArrayLike,
    *,
    num_canaries: int,
    num_guesses: npt.ArrayLike,
    num_correct: npt.ArrayLike,
) -> Array:
    """Upper bound on the probability of at least this many correct guesses under (epsilon, delta)-DP, in [0, 1].

    P[v or more correct] <= P[X >= v] + 2 m delta alpha with X ~ Binomial(r, 1 / (1 + e^-epsilon)). The published sum
    over i is a maximum of means: alpha = max_i P[v - i <= X < v] / i over i = 1..v. Binomial probabilities are
    unimodal, so these means rise with i up to a maximum and then fall, and bisection finds it: pmf(v - i) is at least
    the mean of those above it before the maximum, and below it afterwards.

    Args:
        epsilon: >= 0; scalars, or arrays of one shape, for this, num_guesses and num_correct.
        delta: in [0, 1], of the shape of epsilon or for all.

    Source: Steinke, Nasr and Jagielski 2023, Corollary 5.4 and Appendix D.
    """
    epsilon, r, v = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (epsilon, num_guesses, num_correct)))
    accuracy = special.expit(epsilon)
    tail = _at_least(v, r, accuracy)
    if not np.any(delta):
        return np.asarray(tail)

    def mean(i: Array) -> Array:
        return np.asarray((_at_least(v - i, r, accuracy) - tail) / np.maximum(i, 1))

    low, high = np.minimum(1.0, v), v.copy()
    for _ in range(max(1, math.ceil(math.log2(float(v.max(initial=1)) + 1)))):
        middle = np.ceil((low + high) / 2)
        rises = stats.binom.pmf(v - middle, r, accuracy) >= mean(middle - 1)
        low, high = np.where(rises, middle, low), np.where(rises, high, np.maximum(middle - 1, low))
    return np.asarray(np.minimum(1.0, tail + 2 * num_canaries * np.asarray(delta) * mean(low)))


def one_run_epsilon(
    *,
    num_canaries: int,
    num_guesses: npt.ArrayLike,
    num_correct: npt.ArrayLike,
    delta: float,
    confidence: float,
    group_size: int = 1,
) -> Array:
    """The largest epsilon such that all smaller ones are rejected at the level 1 - confidence; 0 if none is.

    Each number of guesses is treated as the only one: a caller that tries several must divide the level.

    Args:
        num_canaries: m.
        num_guesses: r <= m, a scalar or an array.
        num_correct: v <= r, of the same shape.
        delta: in [0, 1].
        confidence: in (0, 1).
        group_size: as for `one_run_audit`.
    """
    check_group_size(group_size)
    r, v = np.broadcast_arrays(np.asarray(num_guesses, dtype=float), np.asarray(num_correct, dtype=float))
    low, high = np.zeros(r.shape), np.full(r.shape, _LARGEST_EPSILON)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        # Of a group: its delta exceeds 1 from some epsilon on, from which nothing is rejected.
        of_group = np.minimum(
            1.0, delta * np.exp(np.minimum((group_size - 1) * middle, 700)) * _shares(middle, group_size)
        )
        p = _one_run_p_value(group_size * middle, of_group, num_canaries=num_canaries, num_guesses=r, num_correct=v)
        rejected = p < 1 - confidence
        low, high = np.where(rejected, middle, low), np.where(rejected, high, middle)
    return low


def largest_error_rates(
    num_false_positives: int, num_without: int, num_false_negatives: int, num_with: int, *, confidence: float
) -> tuple[float, float]:
    """Upper bounds of the error rates of one test over independent runs, which hold together with this confidence.

    Each is the one-sided Clopper-Pearson bound at half the error probability. The threshold must have been fixed on
    other runs.

    Args:
        num_false_positives: of `num_without` >= 1 runs without the canary, how many were classified as runs with it.
        num_without: runs.
        num_false_negatives: of `num_with` >= 1 runs with the canary, how many were classified as runs without it.
        num_with: runs.
        confidence: in (0, 1).

    Raises:
        InputError: a count is out of range.

    Source: Jagielski, Ullman and Oprea 2020; Nasr et al. 2021.
    """
    for name, errors, runs in (
        ("num_false_positives", num_false_positives, num_without),
        ("num_false_negatives", num_false_negatives, num_with),
    ):
        if not (runs >= 1 and 0 <= errors <= runs):
            raise InputError(f"{name} = {errors}: must lie in 0..{runs}, the runs")
    wrong, missed = ((num_false_positives, num_without), (num_false_negatives, num_with))
    return clopper_pearson(*wrong, confidence)[1], clopper_pearson(*missed, confidence)[1]


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Clopper-Pearson interval of a probability; each end fails with probability <= (1 - confidence) / 2."""
    half = (1 - confidence) / 2
    low = stats.beta.ppf(half, successes, trials - successes + 1) if successes else 0.0
    high = stats.beta.isf(half, successes + 1, trials - successes) if successes < trials else 1.0
    return float(low), float(high)


def checked_scores(scores: npt.ArrayLike, included: npt.ArrayLike) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Scores as float64 and inclusions as bool, both [canaries]; InputError if they are none, or all of one class."""
    values, flags = np.asarray(scores, dtype=float), np.asarray(included)
    if values.ndim != 1 or flags.shape != values.shape:
        raise InputError(f"scores: {values.size} scores and {flags.size} inclusions; must be one of each per canary")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(f"score = {values[index]} at place {index}: must be finite")
    if not np.isin(flags, (0, 1)).all():
        raise InputError(f"included = {flags[~np.isin(flags, (0, 1))][0]}: must be 0 or 1")
    inside = flags.astype(bool)
    if inside.all() or not inside.any():
        raise InputError(f"included: all {len(inside)} are {int(inside.all())}; an audit needs canaries in and out")
    return values, inside


def check_group_size(group_size: int) -> None:
    """Refuse a group of no records, with an InputError."""
    if group_size < 1:
        raise InputError(f"group_size = {group_size}: must be >= 1")


def _shares(epsilon: Array, group_size: int) -> Array:
    """(e^(r epsilon) - 1) / (e^epsilon - 1) over e^((r - 1) epsilon): the sum of e^(-k epsilon) for k below r."""
    return np.asarray(
        np.exp(-np.arange(group_size)[:, None] * np.ravel(epsilon)).sum(axis=0).reshape(np.shape(epsilon))
    )


def _check_levels(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise InputError(f"delta = {delta}: must lie in [0, 1), for instance 1e-5")
    if not 0 < confidence < 1:
        raise InputError(f"confidence = {confidence}: must lie in (0, 1), for instance 0.95")


def _at_least(k: Array, n: Array, p: Array) -> Array:
    """P[Binomial(n, p) >= k]."""
    inside = np.maximum(k, 1)
    return np.where(k <= 0, 1.0, special.betainc(inside, n - inside + 1, p))

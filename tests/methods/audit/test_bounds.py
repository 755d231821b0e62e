"""Lower bounds of epsilon: the published p-value, its inversion, coverage, and what is refused."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from scipy import special, stats

from fedpriv.errors import InputError
from fedpriv.methods.audit._bounds import (
    _one_run_p_value,
    clopper_pearson,
    combined_audit,
    fixed_num_guesses,
    ladder,
    largest_error_rates,
    num_correct,
    one_run_audit,
    one_run_epsilon,
)

RNG = np.random.default_rng


def published_p_value(epsilon: float, delta: float, m: int, r: int, v: int) -> float:
    """Steinke et al. 2023, Appendix D, term by term in 60 decimal digits, with exact binomial coefficients."""
    getcontext().prec = 60
    right = 1 / (1 + (-Decimal(repr(epsilon))).exp())
    mass = [math.comb(r, k) * right**k * (1 - right) ** (r - k) for k in range(r + 1)]
    alpha = total = Decimal(0)
    for i in range(1, v + 1):
        total += mass[v - i]
        alpha = max(alpha, total / i)
    return float(min(Decimal(1), sum(mass[v:], Decimal(0)) + 2 * m * Decimal(repr(delta)) * alpha))


@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize(("canaries", "guesses"), [(1, 1), (10, 4), (60, 60), (500, 40), (500, 300)])
def test_p_value_is_the_published_one(canaries, guesses, delta):
    correct = np.unique(np.linspace(0, guesses, 9).round().astype(int))
    for epsilon in (0.0, 0.3, 1.0, 2.5, 6.0):
        found = _one_run_p_value(epsilon, delta, num_canaries=canaries, num_guesses=guesses, num_correct=correct)
        expected = [published_p_value(epsilon, delta, canaries, guesses, int(v)) for v in correct]
        assert found == pytest.approx(expected, abs=1e-9)


def test_epsilon_is_the_papers():
    appendix = {"num_canaries": 1000, "num_guesses": 100, "num_correct": 75, "delta": 1e-4}
    assert float(one_run_epsilon(**appendix, confidence=0.95)) == pytest.approx(0.673, abs=1e-3)
    # Section 7; printed cut off.
    section = {"num_canaries": 100_000, "num_guesses": 1510, "num_correct": 1439, "delta": 1e-5}
    assert float(one_run_epsilon(**section, confidence=0.95)) == pytest.approx(2.675, abs=1e-3)


def test_epsilon_is_where_the_p_value_reaches_the_level():
    guesses = np.array([20, 100, 400])
    correct = np.array([19, 80, 290])
    found = one_run_epsilon(num_canaries=400, num_guesses=guesses, num_correct=correct, delta=1e-4, confidence=0.95)
    at_it = _one_run_p_value(found, 1e-4, num_canaries=400, num_guesses=guesses, num_correct=correct)
    assert at_it == pytest.approx(0.05, abs=1e-9)


def test_more_right_guesses_a_smaller_delta_and_less_confidence_raise_the_bound():
    def bound(correct: int, delta: float, confidence: float) -> float:
        return float(
            one_run_epsilon(num_canaries=500, num_guesses=100, num_correct=correct, delta=delta, confidence=confidence)
        )

    bounds = {correct: bound(correct, 1e-4, 0.95) for correct in range(0, 101, 10)}
    assert list(bounds.values()) == sorted(bounds.values())
    assert bounds[50] == 0 < bounds[70] < bounds[100]
    assert bound(80, 1e-3, 0.95) < bound(80, 1e-4, 0.95) < bound(80, 0.0, 0.95)
    assert bound(80, 0.0, 0.99) < bound(80, 0.0, 0.95) < bound(80, 0.0, 0.8)


@pytest.mark.parametrize(("epsilon", "canaries"), [(0.5, 300), (1.0, 1000), (3.0, 300)])
def test_bound_exceeds_randomised_response_in_at_most_5_percent(epsilon, canaries):
    right = RNG(1).binomial(canaries, special.expit(epsilon), size=2000)
    found = one_run_epsilon(num_canaries=canaries, num_guesses=canaries, num_correct=right, delta=0.0, confidence=0.95)
    assert (found > epsilon).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 2000)
    assert (found > 2 / 3 * epsilon).mean() > 0.06  # the same trials do refute two thirds of it


def test_search_over_guesses_must_be_paid_for():
    """Graded scores of exactly epsilon-DP answers: the best of several bounds is no 95 % bound unless corrected."""
    rng, sizes = RNG(2), ladder(1000)
    right = np.empty((1000, len(sizes)), dtype=int)
    for trial in right:
        included = rng.random(1000) < 0.5
        signs = np.where(included == (rng.random(1000) < special.expit(1.0)), 1.0, -1.0)
        trial[:] = num_correct(signs * rng.random(1000), included, sizes)

    def exceeding(confidence: float) -> float:
        found = one_run_epsilon(
            num_canaries=1000, num_guesses=sizes, num_correct=right, delta=0.0, confidence=confidence
        )
        return float((found.max(axis=1) > 1.0).mean())

    allowed = 0.05 + 4 * math.sqrt(0.05 * 0.95 / 1000)
    assert exceeding(0.95) > 0.1
    assert exceeding(1 - 0.05 / len(sizes)) <= allowed


def test_audit_pays_for_its_search():
    rng = RNG(3)
    included = rng.random(1000) < 0.5
    scores = included + rng.standard_normal(1000)
    searched = one_run_audit(scores, included, delta=1e-5)
    fixed = one_run_audit(scores, included, delta=1e-5, num_guesses=searched.num_guesses)
    assert searched.num_tried == len(ladder(1000))
    assert fixed.num_tried == 1
    assert searched.epsilon_lower < fixed.epsilon_lower
    assert searched.num_correct == fixed.num_correct


def test_guesses_are_the_extreme_scores_and_counted_by_hand():
    included = np.array([True, False, True, False, True, False])
    scores = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    # With 2 guesses 5 is in and 0 is out; with 4 guesses 4 is out and 1 is in besides; all wrong.
    assert num_correct(scores, included, np.array([2, 4, 6])).tolist() == [2, 2, 4]


def test_the_ladder_and_the_fixed_number_of_guesses_are_even_and_no_more_than_the_canaries():
    for num in (2, 3, 10, 11, 500, 5000):
        sizes = ladder(num)
        assert (np.diff(sizes) > 0).all()
        assert not (sizes % 2).any()
        assert sizes[-1] == num - num % 2
    for num in [*range(2, 40), 150, 1000, 5000]:
        assert fixed_num_guesses(num) % 2 == 0
        assert 2 <= fixed_num_guesses(num) <= num


def test_clopper_pearson_contains_the_truth_and_meets_scipy():
    for successes, trials in ((0, 20), (3, 20), (20, 20)):
        expected = stats.binomtest(successes, trials).proportion_ci(0.95)
        assert clopper_pearson(successes, trials) == pytest.approx((expected.low, expected.high))
    with pytest.raises(InputError, match="num_false_negatives = 5"):
        largest_error_rates(0, 4, 5, 4, confidence=0.95)


@pytest.mark.parametrize(
    ("scores", "included", "options", "message"),
    [
        ([1.0, math.nan], [1, 0], {}, "score = nan at place 1"),
        ([1.0, math.inf], [1, 0], {}, "must be finite"),
        ([1.0, 2.0], [1, 1], {}, "needs canaries in and out"),
        ([1.0, 2.0], [0, 0], {}, "needs canaries in and out"),
        ([1.0, 2.0, 3.0], [0, 1], {}, "3 scores and 2 inclusions"),
        ([1.0, 2.0], [0, 2], {}, "included = 2"),
        ([1.0, 2.0], [0, 1], {"num_guesses": 4}, "num_guesses = 4"),
        ([1.0, 2.0, 3.0, 4.0], [0, 1, 0, 1], {"num_guesses": 3}, "must be even"),
        ([1.0, 2.0], [0, 1], {"delta": 1.0}, "delta = 1.0"),
        ([1.0, 2.0], [0, 1], {"confidence": 1.0}, "confidence = 1.0"),
        ([1.0, 2.0], [0, 1], {"delta": math.nan}, "delta = nan"),
    ],
)
def test_bad_scores_are_refused_by_name(scores, included, options, message):
    with pytest.raises(InputError, match=message):
        one_run_audit(scores, included, **options)


def test_a_bound_from_groups_is_of_one_record():
    """Exact randomised response of 3 epsilon about each group: the bound exceeds epsilon in at most 5 %."""
    rng, epsilon, size = RNG(5), 0.5, 3
    right = rng.binomial(600, special.expit(size * epsilon), size=1000)
    counts = {"num_canaries": 600, "num_guesses": 600, "num_correct": right, "delta": 0.0, "confidence": 0.95}
    of_one, of_group = (one_run_epsilon(**counts, group_size=r) for r in (size, 1))
    assert of_one == pytest.approx(of_group / size, abs=1e-9)
    assert (of_one > epsilon).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 1000)


def test_the_delta_of_a_group_grows_with_epsilon():
    """(epsilon, delta) for one is (r epsilon, delta sum of e^(k epsilon), k < r) for r: summed here term by term."""
    counts = {"num_canaries": 400, "num_guesses": 200, "num_correct": 180}
    found = float(one_run_epsilon(**counts, delta=1e-4, confidence=0.95, group_size=3))
    delta = sum(1e-4 * math.exp(k * found) for k in range(3))
    assert _one_run_p_value(3 * found, delta, **counts) == pytest.approx(0.05, abs=1e-6)
    with pytest.raises(InputError, match="group_size = 0"):
        one_run_epsilon(**counts, delta=1e-4, confidence=0.95, group_size=0)


def test_several_runs_count_together():
    rng = RNG(6)
    audits = []
    for _ in range(4):
        included = rng.random(500) < 0.5
        scores = included + rng.standard_normal(500)
        audits.append(one_run_audit(scores, included, delta=1e-5, num_guesses=100))
    together = combined_audit(audits)
    assert (together.num_canaries, together.num_guesses) == (2000, 400)
    assert together.num_correct == sum(audit.num_correct for audit in audits)
    assert together.epsilon_lower > np.median([audit.epsilon_lower for audit in audits])
    assert combined_audit(audits[:1]) == audits[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_guesses": None}, "num_tried = 5: audits that are combined need 1"),
        ({"delta": 1e-4}, "delta = 0.0001"),
        ({"group_size": 2}, "group_size"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(changes, message):
    scores, included = np.arange(50.0), np.arange(50) % 2 == 0
    options = {"delta": 1e-5, "num_guesses": 10}
    one, other = (one_run_audit(scores, included, **given) for given in (options, options | changes))
    with pytest.raises(InputError, match=message):
        combined_audit([one, other])
    with pytest.raises(InputError, match="none to combine"):
        combined_audit([])

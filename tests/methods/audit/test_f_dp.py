"""The f-DP audit: its recursion against a linear programme, exact games, and Gaussian DP; and the power of an audit."""

import math
from bisect import bisect_left

import numpy as np
import pytest
from scipy import optimize, special, stats

from fedpriv.errors import InputError
from fedpriv.methods.audit import audit_power, f_dp, one_run_audit
from fedpriv.methods.audit._bounds import num_correct
from fedpriv.privacy.accounting import SubsampledGaussian, epsilon_of, trade_off
from fedpriv.privacy.accounting.events import EpsilonDelta
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters, UniformPart
from fedpriv.privacy.accounting.lmo_renyi import SubsampledLmo


def epsilon_delta(epsilon: float | np.ndarray, delta: float) -> trade_off.TradeOff:
    return trade_off.profile(np.atleast_1d(epsilon)[:, None], np.array([delta]))


def most_likely(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """The largest P[at least `correct` right] that the theorem's constraints allow, as a linear programme."""
    counts = np.arange(guesses + 1)
    rows, limits = [], []
    for least in range(1, guesses + 1):
        right = np.where(counts >= least, counts, 0) / canaries
        wrong = np.where(counts >= least - 1, guesses - counts, 0) / canaries
        # right <= min(delta + e^eps wrong, 1 - e^-eps (1 - delta - wrong))
        rows += [right - math.exp(epsilon) * wrong, right - math.exp(-epsilon) * wrong]
        limits += [delta, 1 - math.exp(-epsilon) * (1 - delta)]
    found = optimize.linprog(
        -(counts >= correct).astype(float), rows, limits, np.ones((1, guesses + 1)), [1.0], method="highs"
    )
    return float(-found.fun)


def p_value(claim: trade_off.TradeOff, *counts: int) -> float:
    """The least level at which a claim is not rejected, by bisection, with (canaries, guesses, correct ones)."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if f_dp.rejected(claim, middle, *counts)[0] else (middle, high)
    return high


@pytest.mark.parametrize(("canaries", "guesses"), [(8, 8), (40, 12), (60, 60), (200, 30)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 1e-3), (2.5, 1e-2)])
def test_p_value_is_the_largest_probability_that_the_constraints_allow(canaries, guesses, epsilon, delta):
    for correct in np.unique(np.linspace(1, guesses, 6).round().astype(int)):
        found = p_value(epsilon_delta(epsilon, delta), canaries, guesses, int(correct))
        assert found == pytest.approx(most_likely(epsilon, delta, canaries, guesses, int(correct)), abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_p_value_covers_randomised_response_exactly(epsilon):
    for correct in range(0, 41, 4):
        exact = stats.binom.sf(correct - 1, 40, special.expit(epsilon))
        found = p_value(epsilon_delta(epsilon, 0.0), 40, 40, correct)
        assert found >= exact - 1e-9


def right_guesses(mu: float, canaries: int, guesses: int, trials: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    counts = []
    for _ in range(trials):
        included = rng.random(canaries) < 0.5
        scores = included + rng.standard_normal(canaries) / mu
        counts.append(int(num_correct(scores, included, np.array([guesses]))[0]))
    return np.array(counts)


@pytest.mark.parametrize(("mu", "canaries", "guesses"), [(0.5, 300, 100), (2.0, 100, 50)])
def test_gaussian_bound_exceeds_the_truth_rarely_and_finds_a_share_of_it(mu, canaries, guesses):
    counts = right_guesses(mu, canaries, guesses, 400)
    distinct, places = np.unique(counts, return_inverse=True)
    asked = {"num_canaries": canaries, "num_guesses": guesses}
    found = np.array([f_dp.gaussian_mu(**asked, num_correct=int(count)) for count in distinct])[places]
    assert (found > mu).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 400)
    assert np.median(found) > 0.25 * mu


def test_gaussian_bound_is_larger_than_that_of_epsilon_delta_for_gaussian_noise():
    typical = int(np.median(right_guesses(0.925, 1000, 100, 21)))
    counts = {"num_canaries": 1000, "num_guesses": 100, "num_correct": typical}
    weaker = f_dp._largest_rejected(lambda epsilon: epsilon_delta(epsilon, 1e-5), 16.0, **counts, confidence=0.95)
    assert trade_off.gaussian_epsilon(f_dp.gaussian_mu(**counts), 1e-5) > 1.2 * weaker


def test_nothing_is_rejected_without_evidence():
    assert f_dp.gaussian_mu(num_canaries=100, num_guesses=50, num_correct=25) == 0.0
    assert p_value(trade_off.gaussian(0.5), 10, 10, 0) == 1.0


def _full_batches(mu: float, count: int = 4) -> SubsampledGaussian:
    return SubsampledGaussian(noise_multiplier=math.sqrt(count) / mu, sampling_probability=1.0, count=count)


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("correct", [60, 75, 90])
def test_a_schedule_of_full_batches_is_held_against_gaussian_dp(correct, group_size):
    """Noise without sampling is mu-GDP, and r mu for r records; the bound is at most a step of the search lower."""
    counts = {"num_canaries": 400, "num_guesses": 100, "num_correct": correct}
    found = f_dp.schedule_epsilon([_full_batches(1.0)], 1e-5, **counts, group_size=group_size)
    expected = trade_off.gaussian_epsilon(f_dp.gaussian_mu(**counts) / group_size, 1e-5)
    assert found <= expected * (1 + 1e-4)
    assert found == pytest.approx(expected, rel=0.02, abs=0.02)  # beyond 64 times the noise nothing is tried


def test_the_bound_of_a_sampled_schedule_exceeds_its_epsilon_rarely_and_finds_a_share_of_it():
    """Sums of sampled rounds under exactly the claimed noise, each canary alone; 300 audits."""
    event = SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.25, count=10)
    claimed = epsilon_of([event], 1e-5).epsilon
    rng, counts = np.random.default_rng(7), []
    for _ in range(300):
        included = rng.random(500) < 0.5
        sums = rng.binomial(10, 0.25, 500) * included + math.sqrt(10) * rng.standard_normal(500)
        counts.append(int(num_correct(sums, included, np.array([110]))[0]))

    def bound(count: float) -> float:
        return f_dp.schedule_epsilon([event], 1e-5, num_canaries=500, num_guesses=110, num_correct=int(count))

    # Bounds never fall with the count, as the next test shows, so one between those of two counts is not looked at.
    distinct = sorted(set(counts))
    above = distinct[bisect_left(distinct, True, key=lambda count: bound(count) > claimed) :]
    assert np.isin(counts, above).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)
    assert bound(np.median(counts)) > 0.2 * claimed


def test_more_right_guesses_never_lower_the_bound_of_a_schedule():
    event = SubsampledGaussian(noise_multiplier=0.8, sampling_probability=0.1, count=20)
    bounds = [
        f_dp.schedule_epsilon([event], 1e-5, num_canaries=300, num_guesses=80, num_correct=correct)
        for correct in (40, 56, 72)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0.0 < bounds[-1]


def test_error_rates_over_many_runs_are_held_against_the_schedule():
    """For Gaussian noise the bound is that of mu between the largest error rates; exceeding mu is rare."""
    event, claimed = _full_batches(0.5), trade_off.gaussian_epsilon(0.5, 1e-5)
    rng = np.random.default_rng(8)
    found = []
    for _ in range(200):
        wrong, missed = rng.binomial(2000, special.ndtr(-0.25), 2)
        counts = {"num_false_positives": int(wrong), "num_false_negatives": int(missed)}
        bound = f_dp.many_runs_schedule_epsilon([event], 1e-5, **counts, num_without=2000, num_with=2000)
        largest = [stats.beta.isf(0.025, errors + 1, 2000 - errors) for errors in (wrong, missed)]
        expected = trade_off.gaussian_epsilon(-sum(special.ndtri(largest)), 1e-5)
        assert bound == pytest.approx(expected, rel=0.02)
        found.append(bound)
    assert np.mean(np.array(found) > claimed) <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 200)
    assert np.median(found) > 0.7 * claimed


NO_NOISE = SubsampledGaussian(noise_multiplier=0.0, sampling_probability=0.1, count=4)


def test_a_schedule_without_noise_or_of_unproven_or_stated_cost_is_held_against_gaussian_dp():
    lmo = LmoParameters(combination="mixture", uniform=UniformPart(weight=1.0, low=4.9, high=5.1))
    unproven = SubsampledLmo(
        parameters=lmo, sensitivity=1.0, dimension=10, sampling_probability=1.0, accounting="published"
    )
    stated = EpsilonDelta(epsilon=1.0, delta=1e-6)
    counts = {"num_canaries": 400, "num_guesses": 100, "num_correct": 95}
    expected = trade_off.gaussian_epsilon(f_dp.gaussian_mu(**counts), 1e-5)
    for event in (NO_NOISE, unproven, stated):
        assert f_dp.schedule_epsilon([event], 1e-5, **counts) == pytest.approx(expected)


def test_the_most_that_can_be_found_is_that_of_guesses_that_are_all_right():
    power = audit_power([_full_batches(0.25)], 1e-5, 400)
    included = np.random.default_rng(0).random(400) < 0.5
    found = one_run_audit(included.astype(float), included, delta=1e-5, num_guesses=power.num_guesses)
    assert power.largest == found.epsilon_lower
    assert power.ideal < power.largest


def test_an_ideal_attacker_is_right_as_often_as_gaussian_tails_say_and_a_release_with_much_noise_takes_nothing_away():
    """At mu = 2 and of all canaries guessed, each guess is right with probability Phi(1)."""
    power = audit_power([_full_batches(2.0)], 1e-5, 24)
    assert power.num_guesses == 24
    assert power.num_correct == pytest.approx(24 * special.ndtr(1.0), abs=1.5)
    alone = audit_power([_full_batches(1.0)], 1e-5, 1000)
    both = audit_power([_full_batches(1.0), _full_batches(0.02)], 1e-5, 1000)
    assert both.num_correct >= alone.num_correct - 2


def test_bounds_stay_below_the_claim_and_rise_with_canaries():
    event = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.4, count=20)
    claimed = epsilon_of([event], 1e-5).epsilon
    powers = [audit_power([event], 1e-5, num) for num in (50, 1000)]
    assert powers[0].largest < powers[1].largest
    assert powers[0].ideal_f_dp < powers[1].ideal_f_dp < claimed
    assert all(power.ideal <= power.ideal_f_dp for power in powers)


def test_what_has_no_power_is_refused():
    with pytest.raises(InputError, match="num_canaries = 1"):
        audit_power([_full_batches(1.0)], 1e-5, 1)
    with pytest.raises(InputError, match="Gaussian noise alone"):
        audit_power([NO_NOISE], 1e-5, 10)

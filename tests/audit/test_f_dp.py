"""The f-DP audit: its recursion against a linear programme, exact games, and Gaussian DP."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, special, stats

from fedpriv.audit import f_dp
from fedpriv.audit._bounds import num_correct


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


@pytest.mark.parametrize(("canaries", "guesses"), [(8, 8), (40, 12), (60, 60), (200, 30)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 1e-3), (2.5, 1e-2)])
def test_p_value_is_the_largest_probability_that_the_constraints_allow(canaries, guesses, epsilon, delta):
    for correct in np.unique(np.linspace(1, guesses, 6).round().astype(int)):
        found = f_dp._p_value(
            f_dp._epsilon_delta(epsilon, delta), num_canaries=canaries, num_guesses=guesses, num_correct=int(correct)
        )
        assert found == pytest.approx(most_likely(epsilon, delta, canaries, guesses, int(correct)), abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_p_value_covers_randomised_response_exactly(epsilon):
    for correct in range(41):
        exact = stats.binom.sf(correct - 1, 40, special.expit(epsilon))
        found = f_dp._p_value(f_dp._epsilon_delta(epsilon, 0.0), num_canaries=40, num_guesses=40, num_correct=correct)
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
    bound = {
        int(count): f_dp.gaussian_mu(num_canaries=canaries, num_guesses=guesses, num_correct=int(count))
        for count in np.unique(counts)
    }
    found = np.array([bound[int(count)] for count in counts])
    assert (found > mu).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 400)
    assert np.median(found) > 0.25 * mu


def test_gaussian_bound_is_larger_than_that_of_epsilon_delta_for_gaussian_noise():
    counts = right_guesses(0.925, 1000, 100, 21)
    typical = int(np.median(counts))
    mu = f_dp.gaussian_mu(num_canaries=1000, num_guesses=100, num_correct=typical)
    weaker = f_dp._largest_rejected(
        lambda epsilon: f_dp._epsilon_delta(epsilon, 1e-5),
        16.0,
        num_canaries=1000,
        num_guesses=100,
        num_correct=typical,
        confidence=0.95,
    )
    assert f_dp.gaussian_epsilon(mu, 1e-5) > 1.2 * weaker


@pytest.mark.parametrize("mu", [0.1, 0.925, 3.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_epsilon_meets_dp_accounting(mu, delta):
    assert f_dp.gaussian_epsilon(mu, delta) == pytest.approx(
        dp_accounting.get_epsilon_gaussian(1 / mu, delta), rel=1e-6, abs=1e-9
    )


def test_inverse_blow_ups_undo_blow_ups():
    x = np.linspace(0.01, 0.99, 25)
    assert f_dp.gaussian(1.3)(special.ndtr(special.ndtri(x) + 1.3)) == pytest.approx(x)
    blown = np.minimum(0.01 + math.e * x, 1 - (1 - 0.01 - x) / math.e)
    inside = blown < 1
    assert f_dp._epsilon_delta(1.0, 0.01)(blown)[inside] == pytest.approx(x[inside])


def test_profile_of_gaussian_dp_is_weaker_than_the_curve_and_close():
    epsilons = np.concatenate([[0.0], np.geomspace(0.01, 12, 200)])
    deltas = special.ndtr(0.5 - epsilons) - np.exp(epsilons) * special.ndtr(-epsilons - 0.5)
    x = np.linspace(0.001, 0.999, 99)
    approximate, exact = f_dp.profile(epsilons, deltas)(x), f_dp.gaussian(1.0)(x)
    assert (approximate <= exact + 1e-12).all()
    assert approximate == pytest.approx(exact, abs=2e-3)


def test_nothing_is_rejected_without_evidence():
    assert f_dp.gaussian_mu(num_canaries=100, num_guesses=50, num_correct=25) == 0.0
    assert f_dp._p_value(f_dp.gaussian(0.5), num_canaries=10, num_guesses=10, num_correct=0) == 1.0

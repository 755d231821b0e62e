"""Trade-off functions: closed forms, dp-accounting, and what each claims."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from scipy import special

from fedpriv.privacy.accounting import trade_off

X = np.linspace(0.001, 0.999, 99)


@pytest.mark.parametrize("mu", [0.1, 0.925, 3.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_epsilon_meets_dp_accounting(mu, delta):
    assert trade_off.gaussian_epsilon(mu, delta) == pytest.approx(
        dp_accounting.get_epsilon_gaussian(1 / mu, delta), rel=1e-6, abs=1e-9
    )


def test_each_function_is_its_own_inverse():
    for f in (trade_off.gaussian(1.3), trade_off.renyi(np.array([4.0]), np.array([0.7]))):
        assert f(f(X)) == pytest.approx(X, abs=1e-9)
    pair = trade_off.profile(np.array([1.0]), np.array([0.01]))
    inside = X < 0.98
    assert pair(pair(X[inside])) == pytest.approx(X[inside])


def test_a_pair_is_two_lines():
    missed = trade_off.profile(np.array([1.0]), np.array([0.01]))(X)
    assert 1 - missed == pytest.approx(np.minimum(0.01 + math.e * X, 1 - (0.99 - X) / math.e).clip(max=1))


def test_profile_of_gaussian_dp_is_weaker_than_the_curve_and_close():
    epsilons = np.concatenate([[0.0], np.geomspace(0.01, 12, 200)])
    deltas = special.ndtr(0.5 - epsilons) - np.exp(epsilons) * special.ndtr(-epsilons - 0.5)
    approximate, exact = trade_off.profile(epsilons, deltas)(X), trade_off.gaussian(1.0)(X)
    assert (approximate <= exact + 1e-12).all()
    assert approximate == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize("mu", [0.2, 1.0, 4.0])
def test_the_figures_of_gaussian_dp_are_those_of_its_mu(mu):
    f = trade_off.gaussian(mu)
    assert trade_off.mu_of(f, 1e-9) == pytest.approx(mu, rel=2e-4)
    assert trade_off.regret_of(f, mu) == pytest.approx(0.0, abs=1e-9)
    assert trade_off.advantage_of(f) == pytest.approx(2 * special.ndtr(mu / 2) - 1)
    # A larger mu claims less: the errors of its curve must rise until they meet the true one.
    assert trade_off.regret_of(f, 1.2 * mu) > 0.005

"""The Renyi curve and the losses of the sampled Gaussian: those of dp-accounting, and the curve's defining integral."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_poisson_subsampled_gaussian as by_dp_accounting
from scipy.special import logsumexp

from fedpriv.privacy.accounting.accountants import ORDERS
from fedpriv.privacy.accounting.gaussian import _single_loss, sampled_curve
from tests.marks import slow

pytestmark = pytest.mark.usefixtures("quiet_absl")

# At 0.573 and z = 0.3, the thousandth term of order 1.3 is e^-29.99 of the sum.
PROBABILITIES = [1e-6, 1e-4, 0.01, 1 / 16, 0.25, 0.5, 0.5732762522853087, 0.9, 0.999, 1 - 1e-9]


@pytest.mark.parametrize("z", [1e-3, 0.3, 1.0, 1e6, *slow(0.05, 0.7, 2.0, 50.0)])
def test_the_curve_is_that_of_dp_accounting_and_known_where_theirs_is(z):
    for q in PROBABILITIES:
        ours, theirs = sampled_curve(q, z, ORDERS), by_dp_accounting(q, z, list(ORDERS))
        known = np.isfinite(theirs)
        assert (np.isfinite(ours) == known).all()
        # They stop a series at terms of e^-30; ours goes on, so where terms fall slowly it is a little higher.
        np.testing.assert_allclose(ours[known], theirs[known], rtol=1e-9, atol=1e-9)


def by_integration(q, z, order):
    """log E ((1 - q) + q exp((2 x - 1) / (2 z^2)))^order over x ~ N(0, z^2), by the trapezoidal rule."""
    x = np.linspace(-40 * z, order + 40 * z, 400_001)
    power = order * np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    log_density = -(x**2) / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi))
    return logsumexp(power + log_density + math.log(x[1] - x[0]))


@pytest.mark.parametrize("order", [1.5, 2, 3.7, 10.9, 12, 63])
@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.125, 5.0), (0.5, 0.9), (1 / 16, 0.7)])
def test_the_curve_is_the_integral_that_defines_it(q, z, order):
    (ours,) = sampled_curve(q, z, [order])
    exact = by_integration(q, z, order) / (order - 1)
    if order == int(order):
        assert ours == pytest.approx(exact, rel=1e-6)
    else:
        # Terms beyond the order alternate and are all counted as positive, which weighs at the smallest orders.
        assert ours >= exact * (1 - 1e-6)
        assert order < 3 or ours <= 1.01 * exact


def test_divergences_far_below_the_rounding_of_one_are_kept():
    # order q^2 (exp(1 / z^2) - 1) / 2, to first order in q^2
    q, z = 1e-9, 1.0
    np.testing.assert_allclose(
        sampled_curve(q, z, [2, 8]), [q * q * math.expm1(1), 4 * q * q * math.expm1(1)], rtol=1e-6
    )


@pytest.mark.parametrize("z", [0.05, 1.0, 500.0, *slow(0.7, 5.0)])
@pytest.mark.parametrize("q", [1e-6, 0.25, 1.0, *slow(1e-4, 0.01, 0.999)])
def test_the_losses_are_those_of_dp_accounting(q, z):
    """Both neighbours, at every epsilon of the grid: losses above 709, whose exponential is infinite, too."""
    interval = 1e-3 if z > 0.1 else 0.05
    ours = _single_loss(z, q, interval)
    theirs = from_gaussian_mechanism(z, value_discretization_interval=interval, sampling_prob=q)
    for kind in ("_pmf_remove", "_pmf_add"):
        one, other = (getattr(each, kind).to_dense_pmf() for each in (ours, theirs))
        assert (one._lower_loss, one.size) == (other._lower_loss, other.size)
        np.testing.assert_allclose(one._probs, other._probs, rtol=1e-9, atol=1e-11)
        assert one._infinity_mass == pytest.approx(other._infinity_mass, rel=1e-9, abs=1e-30)
    for delta in (1e-2, 1e-5, 1e-9):
        expected = theirs.self_compose(3).get_epsilon_for_delta(delta)
        assert ours.self_compose(3).get_epsilon_for_delta(delta) == pytest.approx(expected, rel=1e-7, abs=1e-7)

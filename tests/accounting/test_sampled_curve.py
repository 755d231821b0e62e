"""The Renyi curve of the sampled Gaussian: dp-accounting's, and the integral that defines it."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_poisson_subsampled_gaussian as by_dp_accounting
from scipy.special import logsumexp

from fedpriv.accounting._gaussian import sampled_curve
from fedpriv.accounting.accountants import ORDERS

# At 0.573 and z = 0.3, the thousandth term of order 1.3 is e^-29.99 of the sum.
PROBABILITIES = [1e-6, 1e-4, 0.01, 1 / 16, 0.25, 0.5, 0.5732762522853087, 0.9, 0.999, 1 - 1e-9]


@pytest.fixture(autouse=True)
def quiet():
    """Silence dp-accounting's warning for each order that it abandons."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    yield
    logging.getLogger("absl").setLevel(logging.NOTSET)


@pytest.mark.parametrize("z", [1e-3, 0.05, 0.3, 0.7, 1.0, 2.0, 50.0, 1e6])
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

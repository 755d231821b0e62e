"""Our accountants agree with direct calls to dp-accounting in random settings, 20 of them every day."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp

from fedpriv.privacy.accounting.accountants import ORDERS, PLD_LIMIT, epsilon_of
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.events import SubsampledGaussian

pytestmark = pytest.mark.usefixtures("quiet_absl")

NUM_SETTINGS = pytest.mark.parametrize("num", [20, pytest.param(200, marks=pytest.mark.slow)])


def test_the_orders_are_those_of_dp_accounting():
    np.testing.assert_array_equal(ORDERS, rdp.RdpAccountant().orders)


def directly(accountant, event):
    """dp-accounting's own accountant, given the event; a plain Gaussian if every record takes part."""
    single = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, single)
    composed = rdp.RdpAccountant() if accountant == "rdp" else pld.PLDAccountant()
    return composed.compose(single if event.sampling_probability == 1 else sampled, event.count)


def settings(num, *, seed, z, counts):
    """(event, delta) with rdp epsilon <= 100: q log-uniform from 1e-4, and every fifth time 1."""
    generator, drawn = np.random.default_rng(seed), []
    while len(drawn) < num:
        q = 1.0 if len(drawn) % 5 == 0 else float(np.exp(generator.uniform(np.log(1e-4), np.log(0.5))))
        event = SubsampledGaussian(
            noise_multiplier=float(np.exp(generator.uniform(*np.log(z)))),
            sampling_probability=q,
            count=int(np.exp(generator.uniform(*np.log(counts)))),
        )
        delta = float(np.exp(generator.uniform(np.log(1e-9), np.log(1e-3))))
        if epsilon_of([event], delta, "rdp").epsilon <= PLD_LIMIT:
            drawn.append((event, delta))
    return drawn


@NUM_SETTINGS
def test_rdp_agrees_with_dp_accounting_in_random_settings(num):
    for event, delta in settings(num, seed=0, z=(0.4, 20), counts=(1, 5000)):
        ours, theirs = epsilon_of([event], delta, "rdp").epsilon, directly("rdp", event).get_epsilon(delta)
        assert ours == pytest.approx(theirs, rel=1e-6), (event, delta)


# The direct call is very slow for a plain Gaussian with little noise, so z is not small here.
@NUM_SETTINGS
def test_pld_agrees_with_dp_accounting_in_random_settings_and_is_never_below_it(num):
    for event, delta in settings(num, seed=1, z=(2.0, 20), counts=(1, 60)):
        ours, theirs = epsilon_of([event], delta, "pld").epsilon, directly("pld", event).get_epsilon(delta)
        assert ours == pytest.approx(theirs, rel=1e-3), (event, delta)
        # Both have masses that are differences of divergences, rounded at 1e-16, tens of thousands of them.
        assert ours >= theirs - 1e-9, (event, delta)


@pytest.mark.parametrize(
    ("accountant", "num", "rel"),
    [
        ("rdp", 3, 1e-6),
        ("pld", 1, 1e-3),
        pytest.param("rdp", 20, 1e-6, marks=pytest.mark.slow),
        pytest.param("pld", 6, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_calibrated_noise_meets_the_target_by_the_library(accountant, num, rel):
    generator = np.random.default_rng(2)
    for target in np.exp(generator.uniform(np.log(0.2), np.log(10), num)).tolist():
        q, steps = float(np.exp(generator.uniform(np.log(1e-3), np.log(0.2)))), int(generator.integers(1, 300))
        z = noise_multiplier_for(target, 1e-5, sampling_probability=q, steps=steps, accountant=accountant)
        event = SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=steps)
        direct = directly(accountant, event).get_epsilon(1e-5)
        # Their sums of the same terms are rounded in another order.
        assert target * (1 - rel) <= direct <= target * (1 + 1e-12), (target, q, steps)

"""One contract for every accountant: composition, monotonicity, agreement with direct calls to dp-accounting."""

import math
import subprocess
import sys
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from fedpriv.privacy.accounting.accountants import ORDERS, delta_of, epsilon_of, epsilon_of_loss
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.trade_off import gaussian_epsilon
from tests.events import by_dp_accounting as directly
from tests.marks import slow

DELTA = 1e-5
QUIET = pytest.mark.usefixtures("quiet_absl")


def event(q=0.02, z=1.1, count=1):
    return SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=count)


@pytest.fixture(params=["pld", "rdp"])
def accountant(request):
    return request.param


# Reference values: dp-accounting 0.6.0, (q, z, steps) -> rdp, pld at delta 1e-5, truncated to three decimals.
@pytest.mark.parametrize(
    ("q", "z", "steps", "expected"),
    [
        (0.01, 1.0, 1000, {"rdp": 2.101, "pld": 1.828}),
        (0.008, 2.0, 50, {"rdp": 0.206, "pld": 0.106}),
        (0.04, 0.8944, 50, {"rdp": 3.432, "pld": 2.828}),
    ],
)
def test_epsilon_has_the_reference_values(accountant, q, z, steps, expected):
    assert epsilon_of([event(q, z, steps)], DELTA, accountant).epsilon == pytest.approx(expected[accountant], abs=1e-3)


@pytest.mark.parametrize(
    "events",
    [
        [event()],
        [event(count=50)],
        [event(0.16, 1.88, 30)],
        [event(0.3, 3.0, 4), event(0.3, 5.0, 2)],
        [event(1.0, 3.0, 4)],
        *slow(
            [event(0.3, 0.7, 5), event(0.01, 2.0, 200)],
            [event(0.5, 5.0, 10), event(0.5, 4.0, 10), event(0.05, 1.0, 10)],
        ),
    ],
)
def test_agrees_with_dp_accounting_called_directly(accountant, events):
    direct, ours = directly(accountant, *events).get_epsilon(DELTA), epsilon_of(events, DELTA, accountant).epsilon
    assert ours == pytest.approx(direct, rel=1e-6 if accountant == "rdp" else 1e-3)
    assert ours >= direct * (1 - 1e-9)


def test_n_single_releases_in_any_order_cost_the_same_as_one_event_of_count_n(accountant):
    singles = [event()] * 6 + [event(0.1, 2.0)] * 3
    mixed = [singles[i] for i in (6, 0, 7, 1, 2, 8, 3, 4, 5)]
    grouped = [event(0.1, 2.0, 3), event(count=6)]
    values = {epsilon_of(events, DELTA, accountant).epsilon for events in (singles, mixed, grouped)}
    assert len(values) == 1


# That less noise, more steps and more sampling never cost less, test_mechanisms.py shows of every mechanism.
def test_a_smaller_delta_costs_more(accountant):
    costs = [epsilon_of([event(count=20)], delta, accountant).epsilon for delta in (1e-3, 1e-5, 1e-8)]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("events", "epsilon"),
    [([], 0), ([event(), event(z=0.0)], math.inf), ([event(q=0.0, z=0.0, count=5)], 0)],
    ids=["no release", "no noise", "nobody sampled"],
)
def test_no_release_costs_nothing_and_one_without_noise_infinity(accountant, events, epsilon):
    assert epsilon_of(events, DELTA, accountant).epsilon == epsilon


def test_pld_answers_above_epsilon_100_and_agrees_with_dp_accounting_on_its_grid():
    """Where losses of -100 to 500 need no fine grid; rdp says 574."""
    large = event(q=0.5, z=0.3, count=100)
    direct = directly("pld", large, interval=2e-3)
    answer = epsilon_of([large], DELTA)
    assert (answer.accountant, answer.upper_bound_only) == ("pld", False)
    assert answer.epsilon == pytest.approx(direct.get_epsilon(DELTA), rel=1e-6)
    assert answer.epsilon < 0.7 * epsilon_of([large], DELTA, "rdp").epsilon


@pytest.mark.parametrize("z", [3e-3, 1e-5])
def test_a_grid_that_would_be_too_large_is_coarser_or_rdp_answers_and_the_result_says_so(z):
    answer, by_rdp = (epsilon_of([event(q=0.5, z=z, count=3)], DELTA, kind) for kind in ("pld", "rdp"))
    assert answer.upper_bound_only is (z < 1e-4)
    assert answer.epsilon <= by_rdp.epsilon
    assert not by_rdp.upper_bound_only


# pld of these alone is 13.66 and twice infinite: so little is lost in the rounding of its grid.
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"), [(0.001, 0.7, 100_000, 1e-12), (0.16, 1.88, 30, 1e-15), (0.01, 1.0, 1000, 1e-14)]
)
def test_the_smaller_of_both_bounds_counts_and_the_result_says_which(q, z, steps, delta):
    answer, direct = epsilon_of([event(q, z, steps)], delta), directly("rdp", event(q, z, steps)).get_epsilon(delta)
    assert answer.epsilon == pytest.approx(direct, rel=1e-9)
    assert (answer.accountant, answer.upper_bound_only) == ("rdp", True)
    assert delta_of([event(q, z, steps)], answer.epsilon) <= delta * (1 + 1e-6)


# So many steps are one Gaussian of mu = 1; a power of a Fourier transform is not, and may be rounded to less.
@pytest.mark.parametrize("steps", [1000, 100_000])
def test_pld_of_many_steps_is_not_rounded_below_the_exact_epsilon_at_a_tiny_delta(steps):
    step = event(1.0, math.sqrt(steps))
    loss = step.pld(5e-4).self_compose(steps)
    below = []
    for delta in (1e-6, 1e-9, 1e-11, 1e-12, 1e-13, 1e-14):
        exact = gaussian_epsilon(1.0, delta)
        assert epsilon_of_loss(loss, delta, [replace(step, count=steps)]) >= exact
        below += [loss.get_epsilon_for_delta(delta) < exact]
    assert any(below) is (steps > 1000), "else this shows nothing"


def test_pld_is_never_above_rdp():
    for events in ([event(count=50)], [event(0.2, 1.5, 40)], [event(1e-6, 5.0, 2)]):
        assert epsilon_of(events, DELTA, "pld").epsilon <= epsilon_of(events, DELTA, "rdp").epsilon


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_out_of_range_and_an_unknown_accountant_are_refused(accountant, delta):
    with pytest.raises(ValueError, match="delta"):
        epsilon_of([event()], delta, accountant)
    with pytest.raises(ValueError, match="accountant = 'moments'"):
        epsilon_of([event()], DELTA, "moments")


# Balle and Wang 2018, Theorem 8: exact for Gaussians without sampling, here equal to one with mu^2 = 4/3^2 + 2/5^2.
def test_pld_of_plain_gaussians_is_a_tight_upper_bound_on_the_exact_epsilon():
    exact = dp_accounting.get_epsilon_gaussian(1 / math.sqrt(4 / 9 + 2 / 25), DELTA)
    epsilon = epsilon_of([event(1.0, 3.0, 4), event(1.0, 5.0, 2)], DELTA, "pld").epsilon
    assert exact <= epsilon <= exact * (1 + 1e-3)


# absl configures the root logger on its first warning, but not under pytest, which has already installed handlers.
def test_a_fresh_process_stays_silent_and_without_log_handlers():
    code = """
import logging
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian as Event
for q, z in ((0.16, 0.891), (0.5, 0.3), (1e-8, 1.0)):
    for accountant in ("pld", "rdp"):
        epsilon_of([Event(noise_multiplier=z, sampling_probability=q, count=7)], 1e-5, accountant)
assert logging.getLogger().handlers == []
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# The event accepts every finite z >= 0, so each must have a cost, however extreme.
@pytest.mark.parametrize("q", [0.5, 1.0])
@pytest.mark.parametrize("z", [1e-300, 1e300])
def test_extreme_noise_has_a_cost(accountant, q, z):
    epsilon = epsilon_of([event(q, z)], DELTA, accountant).epsilon
    assert epsilon > 1e9 if z < 1 else epsilon < 1e-3


def test_the_orders_are_those_of_dp_accounting():
    np.testing.assert_array_equal(ORDERS, rdp.RdpAccountant().orders)


def settings(num, *, seed, z, counts):
    """(event, delta) with rdp epsilon <= 100: q log-uniform from 1e-4, and every fifth time 1."""
    generator, drawn = np.random.default_rng(seed), []
    while len(drawn) < num:
        q = 1.0 if len(drawn) % 5 == 0 else float(np.exp(generator.uniform(np.log(1e-4), np.log(0.5))))
        noise, steps = (float(np.exp(generator.uniform(*np.log(bounds)))) for bounds in (z, counts))
        delta = float(np.exp(generator.uniform(np.log(1e-9), np.log(1e-3))))
        if epsilon_of([one := event(q, noise, int(steps))], delta, "rdp").epsilon <= 100:
            drawn.append((one, delta))
    return drawn


# The direct call of pld is very slow for a plain Gaussian with little noise, so z is not small there.
@QUIET
@pytest.mark.parametrize("num", [5, *slow(200)])
@pytest.mark.parametrize(
    ("accountant", "seed", "z", "counts"), [("rdp", 0, (0.4, 20), (1, 5000)), ("pld", 1, (2.0, 20), (1, 60))]
)
def test_agrees_with_dp_accounting_in_random_settings(accountant, seed, z, counts, num):
    for one, delta in settings(num, seed=seed, z=z, counts=counts):
        ours, theirs = epsilon_of([one], delta, accountant).epsilon, directly(accountant, one).get_epsilon(delta)
        assert ours == pytest.approx(theirs, rel=1e-6 if accountant == "rdp" else 1e-3), (one, delta)
        # Both pld have masses that are differences of divergences, rounded at 1e-16, tens of thousands of them.
        assert accountant == "rdp" or ours >= theirs - 1e-9, (one, delta)


@QUIET
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
        direct = directly(accountant, event(q, z, steps)).get_epsilon(1e-5)
        # Their sums of the same terms are rounded in another order.
        assert target * (1 - rel) <= direct <= target * (1 + 1e-12), (target, q, steps)

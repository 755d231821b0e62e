"""The recipe's mathematics: how the budget is split, how noisy the head's weights end, and which rate follows."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from dp_accounting import get_sigma_gaussian
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.recipe import (
    START_SHARE,
    WeightedClients,
    arrived,
    client_weight,
    joint_rates,
    learning_rate,
    start_noise_for_steps,
    start_noise_multiplier,
)
from tests.events import gaussian

DELTA = 1e-5
SIZES = (1200, 1000, 800, 600, 400)


def federation(sizes=SIZES, *, equal=False, participation=1.0):
    weights = [client_weight(size, "records" if equal else "root-records") for size in sizes]
    return WeightedClients(sizes=sizes, weights=weights, participation=participation)


# --- the budget


# The equation of Balle and Wang 2018, Theorem 8, solved by bisection in 40 digits (mpmath).
@pytest.mark.parametrize(("epsilon", "s1"), [(1.0, 3.73063163482), (2.0, 1.99381244564), (8.0, 0.600229072199)])
def test_the_exact_gaussian_mechanism_is_that_of_the_theorem(epsilon, s1):
    assert get_sigma_gaussian(epsilon, DELTA) == pytest.approx(s1, rel=1e-7)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_the_start_has_the_noise_of_one_exact_release_over_the_root_of_its_share(epsilon, delta):
    exact = get_sigma_gaussian(epsilon, delta) / math.sqrt(0.15)
    assert exact <= start_noise_multiplier(epsilon, delta) <= 1.002 * exact


@pytest.mark.parametrize(("epsilon", "num_steps"), [(1.0, 40), (2.0, 39), (8.0, 20), (8.0, 160)])
def test_start_and_full_batches_together_cost_exactly_the_target(epsilon, num_steps):
    s1 = get_sigma_gaussian(epsilon, DELTA)
    run = [gaussian(s1 / math.sqrt(0.15)), gaussian(s1 * math.sqrt(num_steps / 0.85), count=num_steps)]
    assert epsilon_of(run, DELTA).epsilon == pytest.approx(epsilon, rel=1e-3)
    assert epsilon_of([event.with_noise(0.99) for event in run], DELTA).epsilon > 1.005 * epsilon


def test_what_a_run_releases_besides_leaves_the_start_its_share_of_the_rest():
    other, s1 = 4.0, get_sigma_gaussian(2.0, DELTA)
    rest = 1 / s1**2 - 1 / other**2  # Gaussian releases add up in 1 / z^2
    found = start_noise_multiplier(2.0, DELTA, fixed=[gaussian(other)])
    assert found == pytest.approx(1 / math.sqrt(START_SHARE * rest), rel=2e-3)


def test_a_start_beside_given_noise_spends_the_same_share():
    for num_steps in (1, 39, 160):
        start, steps = 1 / start_noise_for_steps(3.0, num_steps) ** 2, num_steps / 3.0**2
        assert start / (start + steps) == pytest.approx(0.15)
    assert start_noise_for_steps(0.0, 40) == 0, "and beside steps without noise has none"


# --- the learning rate


def simulated_end(sizes, *, z, q, rates, momentum=0.0, num_asked=None, num_weights=4000):
    """[weights] where a head's weights end that noise alone moves: uploads, their weighted average, the server's step.

    A client's upload is minus rate N(0, z^2) / (q N_k); it counts with w_k N_k over the sum of those asked.
    """
    rng = np.random.default_rng(3)
    sizes = np.array(sizes, dtype=float)
    theta, velocity = np.zeros((2, num_weights))
    for rate in rates:
        asked = rng.permutation(len(sizes))[: num_asked or len(sizes)]
        shares = sizes[asked] ** 1.5 / (sizes[asked] ** 1.5).sum()
        uploads = -rate * z * rng.normal(size=(num_weights, len(asked))) / (q * sizes[asked])
        velocity = momentum * velocity + (1 - momentum) * uploads @ shares
        theta += velocity
    return theta


# 4,000 weights: the standard error of a standard deviation is 1.1 %, so 5 % fails once in 1e5 and tells 2/3 and 3/2.
@pytest.mark.parametrize("sizes", [SIZES, (1000,), (50, 5000, 300)], ids=str)
@pytest.mark.parametrize(("z", "q", "num_steps"), [(13.5, 1.0, 39), (3.0, 0.1, 20)])
def test_weights_that_only_noise_moves_end_as_noisy_as_the_rule_says(sizes, z, q, num_steps):
    rule = learning_rate(federation(sizes), noise_stddev=z, sampling_probability=q, num_steps=num_steps)
    ends = simulated_end(sizes, z=z, q=q, rates=[rule.learning_rate] * num_steps)
    assert np.std(ends) == pytest.approx(rule.final_noise, rel=0.05)
    assert rule.final_noise == pytest.approx(0.487)


@pytest.mark.parametrize(
    ("num_steps", "num_after", "momentum"), [(40, 0, 0.9), (35, 4, 0.9), (12, 0, 0.9), (40, 9, 0.5)]
)
def test_what_momentum_holds_back_is_made_up_for(num_steps, num_after, momentum):
    of_run = {"num_after": num_after, "momentum": momentum}
    rule = learning_rate(federation(), noise_stddev=13.5, sampling_probability=1.0, num_steps=num_steps, **of_run)
    assert rule.final_noise == pytest.approx(0.487)
    rates = [rule.learning_rate] * num_steps + [0.0] * num_after
    ends = simulated_end(SIZES, z=13.5, q=1.0, rates=rates, momentum=momentum)
    assert np.std(ends) == pytest.approx(0.487, rel=0.05)
    position, velocity = 0.0, 0.0
    for rate in rates:
        velocity = momentum * velocity + (1 - momentum) * rate
        position += velocity
    assert position == pytest.approx(arrived(num_steps, momentum, num_after=num_after).mean() * rule.total_step)


def test_momentum_of_the_recipe_leaves_four_fifths_and_no_momentum_everything():
    shares = arrived(40, 0.9)
    # 1 - 9 (1 - 0.9^40) / 40, and the root of 1 - 18 (1 - 0.9^40) / 40 + 0.81 (1 - 0.81^40) / (0.19 * 40), by hand
    assert shares.mean() == pytest.approx(0.77833, abs=1e-5)
    assert math.sqrt(np.mean(shares**2)) == pytest.approx(0.81438, abs=1e-5)
    assert shares[-1] == pytest.approx(0.1)
    np.testing.assert_array_equal(arrived(36, 0.9, num_after=4), shares[:-4])
    assert (arrived(7, 0.0) == 1).all()


@pytest.mark.parametrize(("sizes", "num_asked"), [(SIZES, 2), ((100, 1000), 1), ((300, 300, 300, 300), 3)], ids=str)
def test_rounds_that_ask_some_clients_end_as_noisy_as_the_rule_says(sizes, num_asked):
    asked = federation(sizes, participation=num_asked / len(sizes))
    rule = learning_rate(asked, noise_stddev=13.5, sampling_probability=1.0, num_steps=400)
    options = {"z": 13.5, "q": 1.0, "rates": [rule.learning_rate] * 400, "num_asked": num_asked}
    assert np.std(simulated_end(sizes, **options)) == pytest.approx(rule.final_noise, rel=0.06)


def test_too_many_possible_rounds_to_enumerate_are_sampled_closely():
    sizes = np.random.default_rng(1).lognormal(5, 1, size=18).astype(int).tolist()  # 8,568 rounds of 5
    many = federation(sizes, participation=5 / 18)
    rounds = combinations(sizes, 5)
    exact = [sum(asked) / sum(size**1.5 for size in asked) ** 2 for asked in rounds]
    assert many.noise_per_record == pytest.approx(math.sqrt(np.mean(exact)), rel=0.02)
    assert many.noise_per_record == federation(sizes, participation=5 / 18).noise_per_record


def test_without_noise_the_rate_is_the_largest():
    for classes, largest in ((None, 75.0), (2, 100.0), (3, 150.0), (4, 200.0), (1000, 200.0)):
        options = {"noise_stddev": 0.0, "sampling_probability": 1.0, "num_steps": 40}
        rule = learning_rate(federation(), centred_classes=classes, **options)
        assert (rule.learning_rate, rule.total_step, rule.final_noise) == (largest, 40 * largest, 0.0)
        assert largest <= NodeLimits().max_learning_rate, "nodes would refuse it after the start was paid for"


def test_sums_of_a_persons_records_have_lower_largest_rates():
    """On the embedded corpus without noise, A and B diverged at 30 with 2.3 records a person, in two runs of three."""
    persons = replace(federation(), records_of_unit=4)
    options = {"noise_stddev": 0.0, "sampling_probability": 1.0, "num_steps": 40}
    assert learning_rate(persons, centred_classes=8, **options).learning_rate == 100.0
    joint = joint_rates(persons, num_values=1000, **options)
    assert (joint.head, joint.lora) == (min(37.5, sum(SIZES) / 100), 7.5)
    noisy = options | {"noise_stddev": 13.5}
    rates = [learning_rate(clients, **noisy).learning_rate for clients in (persons, federation())]
    assert rates[0] == rates[1], "noise alone decides"


def test_full_batches_end_as_noisy_as_one_release_with_their_share_of_the_budget():
    # nu = s1 sqrt(sum w^2) / (sqrt(0.85) sum w N), whatever T
    s1, clients = get_sigma_gaussian(2.0, DELTA), federation()
    for num_steps in (20, 40, 160):
        z = s1 * math.sqrt(num_steps / 0.85)
        rule = learning_rate(clients, noise_stddev=z, sampling_probability=1.0, num_steps=num_steps)
        expected = s1 * clients.weighted_noise / (math.sqrt(0.85) * clients.weighted_records)
        assert rule.noise_per_step_length == pytest.approx(expected)


def test_hidden_uploads_are_as_good_as_one_client_with_all_records():
    options = {"sampling_probability": 1.0, "num_steps": 40}
    hidden = learning_rate(federation(equal=True), noise_stddev=13.5 / math.sqrt(5), **options)
    central = learning_rate(federation([sum(SIZES)], equal=True), noise_stddev=13.5, **options)
    assert hidden.learning_rate == pytest.approx(central.learning_rate)


CLIENTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)
NOISE = st.floats(1e-3, 1e4)


@given(sizes=CLIENTS, z=NOISE, more=st.floats(1, 10), q=st.floats(0.01, 1), num_steps=st.integers(1, 200))
def test_more_noise_never_raises_the_rate_and_more_records_never_lower_it(sizes, z, more, q, num_steps):
    def rule(sizes, z):
        return learning_rate(federation(sizes), noise_stddev=z, sampling_probability=q, num_steps=num_steps)

    base = rule(sizes, z)
    assert 0 < base.learning_rate <= 75
    assert base.final_noise <= 0.487 * (1 + 1e-12)
    assert rule(sizes, more * z).learning_rate <= base.learning_rate * (1 + 1e-12)
    assert rule([2 * size for size in sizes], z).learning_rate >= base.learning_rate * (1 - 1e-12)


@given(sizes=CLIENTS, factor=st.floats(1e-3, 1e3), participation=st.floats(0.1, 1))
def test_proportions_count_roots_are_no_noisier_than_equal_weights_fewer_clients_no_less(sizes, factor, participation):
    some, noise = federation(sizes, participation=participation), federation(sizes).noise_per_record
    other = WeightedClients(sizes=sizes, weights=[factor * w for w in some.weights], participation=participation)
    assert other.noise_per_record == pytest.approx(some.noise_per_record)
    assert noise <= federation(sizes, equal=True).noise_per_record * (1 + 1e-12)
    assert some.noise_per_record >= noise * (1 - 1e-12)

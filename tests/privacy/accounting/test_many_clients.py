"""Bounds computed for many clients at once are never below the epsilon computed for each client alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import rdp

from fedpriv.privacy.accounting import many_clients
from fedpriv.privacy.accounting.accountants import ORDERS, epsilon_of, total_loss
from fedpriv.privacy.accounting.events import EpsilonDelta, PureEpsilon, SubsampledGaussian, SubsampledLmo
from fedpriv.privacy.accounting.many_clients import epsilons
from tests.marks import slow
from tests.privacy.accounting.lmo_oracle import uniform

# `epsilon_of` chooses a value discretization interval by epsilon. The rdp bounds already allow for rounding.
PLD_ROUNDING = 1e-3
LMO = SubsampledLmo(parameters=uniform(0.1, 0.5), sensitivity=1.0, dimension=500, sampling_probability=0.1)


def event(q=0.02, z=1.1, count=10):
    return SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=count)


def draw(num, *, seed, z=(0.6, 1.0, 2.5), q=(1e-4, 0.9), counts=(1, 300)):
    """Random histories and deltas."""
    generator = np.random.default_rng(seed)
    columns = zip(
        np.exp(generator.uniform(*np.log(q), num)).tolist(),
        generator.choice(z, num).tolist(),
        np.exp(generator.uniform(*np.log(counts), num)).astype(int).tolist(),
        strict=True,
    )
    events = [event(q_k, z_k, count) for q_k, z_k, count in columns]
    return events, np.exp(generator.uniform(math.log(1e-8), math.log(1e-2), num)).tolist()


def check(events, deltas, accountant, rows, rounding=0.0):
    """The bounds, and the exact epsilons of the clients in `rows`, after a comparison."""
    bounds = epsilons(events, deltas, accountant)
    assert len(bounds) == len(events)
    exact = np.array([epsilon_of([events[k]], deltas[k], accountant).epsilon for k in rows])
    for k, epsilon in zip(rows, exact, strict=True):
        assert bounds[k] >= epsilon * (1 - rounding), (events[k], deltas[k])
    return bounds, exact


# There are more clients of each z than nodes, so that this tests the choice of orders between nodes.
@pytest.mark.parametrize("num_checked", [15, *slow(300)])
@pytest.mark.parametrize("z", [(0.6, 2.5), (0.3,), *slow((1.0,), (8.0,))])
def test_rdp_bounds_are_never_below_the_exact_epsilon_and_close_to_it(z, num_checked):
    events, deltas = draw(3000, seed=1, z=z)
    bounds, exact = check(events, deltas, "rdp", range(num_checked))
    positive = exact > 1e-3
    excess = bounds[:num_checked][positive] / exact[positive] - 1
    assert np.median(excess) < 1e-4
    assert excess.max() < 0.005


def test_the_rdp_upper_bound_is_nearly_exact_for_few_clients():
    events, deltas = draw(30, seed=2)
    bounds, exact = check(events, deltas, "rdp", range(30))
    assert bounds == pytest.approx(exact, rel=1e-3, abs=1e-9)


# arXiv:1908.10530, Section 3.3: if dp-accounting abandons an order, or adds absolute values, so must the bounds.
@pytest.mark.parametrize("z", [0.15, 1.0, *slow(0.7, 3.0)])
def test_rdp_bounds_are_never_below_the_exact_epsilon_if_the_best_order_is_below_two(z):
    events, deltas = draw(24, seed=3, z=(z,), q=(0.05, 0.999), counts=(30, 3000))
    check(events, deltas, "rdp", range(24))


@pytest.mark.parametrize("q", [1e-9, 1e-6, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("count", [1, 10**9])
def test_rdp_bounds_are_never_below_the_exact_epsilon_at_the_limits_of_sampling(q, count):
    check([event(q, z, count) for z in (1e-3, 0.5, 1.0, 50.0, 1e5)], [1e-5] * 5, "rdp", range(5))


def test_the_conversion_to_epsilon_is_that_of_dp_accounting():
    generator = np.random.default_rng(4)
    orders = np.asarray(ORDERS)
    curve = generator.uniform(0, 0.3) * orders
    deltas = np.exp(generator.uniform(-25, -0.1, 50))
    converted = many_clients._to_epsilon(np.tile(curve, (50, 1)), orders, deltas).min(axis=1)
    assert converted == pytest.approx([rdp.compute_epsilon(ORDERS, curve, delta)[0] for delta in deltas], rel=1e-9)


@pytest.mark.parametrize("q", [64e-10, 1e-5, 0.1])
def test_probabilities_that_differ_in_their_last_bits_are_accounted_for(q):
    """More of them than there are nodes, between which their curves are interpolated."""
    check([event(q * (1 + k * 2**-52), count=70) for k in range(60)], [1e-6] * 60, "rdp", range(0, 60, 20))


@pytest.mark.slow
def test_pld_bounds_are_never_below_the_exact_epsilon(monkeypatch):
    monkeypatch.setattr(many_clients, "_PLD_NODES", (9, 4, 5))
    events, deltas = draw(300, seed=5, z=(1.0,), q=(1e-3, 0.1), counts=(10, 60))
    check(events, deltas, "pld", range(10), PLD_ROUNDING)


@pytest.mark.parametrize(
    ("events", "deltas"),
    [
        ([event(0.01), event(0.2, 1.5, 4), event(1.0, 3.0, 4)], [1e-5, 1e-6, 1e-5]),
        ([event(0.5, 0.3, 100)], [1e-5]),
        ([event(0.01, 1.0, 1000)], [1e-14]),  # of which rdp is the smaller bound, as for one client alone
    ],
    ids=["few", "large", "tiny delta"],
)
def test_the_pld_bounds_are_nearly_exact_for_few_clients(events, deltas):
    bounds, exact = check(events, deltas, "pld", range(len(events)), PLD_ROUNDING)
    assert bounds == pytest.approx(exact, rel=1e-3)


def test_a_coarse_discretization_bounds_the_fine_one_from_above():
    for q in (0.002, 0.4):
        interval = many_clients._coarse_interval(event(q, 1.0))
        fine, coarse = (total_loss([event(q, 1.0, 30)], h).get_epsilon_for_delta(1e-5) for h in (1e-4, interval))
        assert interval > 1e-4
        assert fine <= coarse <= fine * 1.005


def test_two_processes_give_the_same_bounds_as_one():
    events, deltas = draw(2, seed=6, z=(2.5,), q=(1e-3, 0.05), counts=(1, 9))
    one, two = (epsilons(events, deltas, "pld", workers=workers) for workers in (1, 2))
    assert (one == two).all()
    with pytest.raises(ValueError, match="workers = 0"):
        epsilons(events, deltas, "pld", workers=0)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_extreme_clients_cost_the_same_as_alone(accountant):
    noises = [(0.0, 1.1), (0.0, 0.0), (0.02, 0.0), (1.0, 0.0), (1.0, 1e300), (0.02, 1e-300)]
    bounds, _ = check([event(q, z) for q, z in noises], [1e-5] * 6, accountant, range(6))
    assert bounds[:4].tolist() == [0, 0, math.inf, math.inf]
    assert epsilons([], [], accountant).shape == (0,)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_histories_of_every_event_type_are_bounded_together(accountant):
    events = [
        event(),
        LMO.with_count(3),
        PureEpsilon(epsilon=0.3, count=2),
        replace(LMO, sampling_probability=0.0),
        EpsilonDelta(epsilon=0.1, delta=1e-6, count=2),
        replace(LMO, accounting="published"),
        replace(LMO, sampling_probability=0.2, count=7),
        EpsilonDelta(epsilon=0.1, delta=1e-5),
    ]
    bounds, _ = check(events, [1e-5] * len(events), accountant, range(len(events)), PLD_ROUNDING)
    assert bounds[[3, 5, 7]].tolist() == [0, math.inf, math.inf]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([event()], [], "rdp"), "events has 1 entries, deltas has 0"),
        (([event()], [1.0], "rdp"), "delta = 1.0"),
        (([event()], [1e-5], "moments"), "accountant = 'moments'"),
        ((["event"], [1e-5], "rdp"), "event 'event': unknown"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        epsilons(*arguments)


def test_thousands_of_clients_with_lmo_noise_are_bounded_at_the_best_order_each(monkeypatch):
    monkeypatch.setattr(many_clients, "_RDP_NODES", 10)
    drawn = np.exp(np.random.default_rng(5).uniform(math.log(0.01), 0.0, 28)).tolist()
    events = [replace(LMO, sampling_probability=q, count=20) for q in (0.0, 1.0, *drawn)]
    bounds, exact = check(events, [1e-5] * len(events), "rdp", range(0, len(events), 10))
    assert bounds[0] == 0
    assert bounds[10::10] == pytest.approx(exact[1:], rel=1e-3)

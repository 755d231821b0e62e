"""Bounds computed for many clients at once contain the epsilon computed for each client alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import rdp

from fedpriv.accounting import _many_gaussians
from fedpriv.accounting.accountants import epsilon_of, epsilons
from fedpriv.accounting.composition.conversion import ORDERS
from fedpriv.accounting.events import EpsilonDelta, PureEpsilon, SubsampledGaussian, SubsampledLmo
from fedpriv.accounting.lmo import event as lmo_event
from fedpriv.accounting.lmo.parameters import LmoParameters, UniformPart

# `epsilon_of` chooses a value discretization interval by epsilon. The rdp bounds already allow for rounding.
PLD_ROUNDING = 1e-3


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
    """The bounds, after a comparison with `epsilon_of` for the clients in `rows`."""
    bounds = epsilons(events, deltas, accountant)
    assert len(bounds.lower) == len(bounds.upper) == len(events)
    for k in rows:
        exact = epsilon_of([events[k]], deltas[k], accountant).epsilon
        assert bounds.lower[k] <= exact * (1 + min(rounding, 1e-7)), (events[k], deltas[k])
        assert bounds.upper[k] >= exact * (1 - rounding), (events[k], deltas[k])
    return bounds


# There are more clients of each z than nodes, so that this tests the chords between nodes.
@pytest.mark.parametrize("z", [(1.0,), (0.6, 2.5), (0.3,), (8.0,)])
def test_rdp_bounds_contain_the_exact_epsilon_and_are_narrow(z):
    events, deltas = draw(3000, seed=1, z=z)
    bounds = check(events, deltas, "rdp", range(30))
    positive = bounds.lower > 1e-3
    assert np.median(bounds.upper[positive] / bounds.lower[positive] - 1) < 1e-4
    assert (bounds.upper[positive] / bounds.lower[positive] - 1).max() < 0.005


def test_the_rdp_upper_bound_is_nearly_exact_for_few_clients():
    events, deltas = draw(30, seed=2)
    exact = [epsilon_of([e], d, "rdp").epsilon for e, d in zip(events, deltas, strict=True)]
    bounds = check(events, deltas, "rdp", range(30))
    assert bounds.upper == pytest.approx(exact, rel=1e-3, abs=1e-9)


# arXiv:1908.10530, Section 3.3: if dp-accounting abandons an order, or adds absolute values, so must the bounds.
@pytest.mark.parametrize("z", [0.15, 0.7, 1.0, 3.0])
def test_rdp_bounds_contain_the_exact_epsilon_if_the_best_order_is_below_two(z):
    events, deltas = draw(24, seed=3, z=(z,), q=(0.05, 0.999), counts=(30, 3000))
    check(events, deltas, "rdp", range(24))


@pytest.mark.parametrize("q", [1e-9, 1e-6, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("count", [1, 10**9])
def test_rdp_bounds_contain_the_exact_epsilon_at_the_limits_of_sampling(q, count):
    check([event(q, z, count) for z in (1e-3, 0.5, 1.0, 50.0, 1e5)], [1e-5] * 5, "rdp", range(5))


def test_the_conversion_to_epsilon_is_that_of_dp_accounting():
    generator = np.random.default_rng(4)
    orders = np.asarray(ORDERS)
    curve = generator.uniform(0, 0.3) * orders
    deltas = np.exp(generator.uniform(-25, -0.1, 50))
    ones = np.ones(50)
    clients = _many_gaussians._Histories(z=ones, q=ones, count=ones, delta=deltas)
    converted = _many_gaussians._to_epsilon(np.tile(curve * (orders - 1), (50, 1)), orders, clients).min(axis=1)
    assert converted == pytest.approx([rdp.compute_epsilon(ORDERS, curve, delta)[0] for delta in deltas], rel=1e-9)


@pytest.mark.slow
def test_pld_bounds_contain_the_exact_epsilon(monkeypatch):
    monkeypatch.setattr(_many_gaussians, "_PLD_LOWER_NODES", (5, 3, 3))
    monkeypatch.setattr(_many_gaussians, "_PLD_UPPER_NODES", (9, 4, 5))
    events, deltas = draw(300, seed=5, z=(1.0,), q=(1e-3, 0.1), counts=(10, 60))
    bounds = check(events, deltas, "pld", range(10), PLD_ROUNDING)
    assert (bounds.lower <= bounds.upper).all()


def test_the_pld_bounds_are_nearly_exact_for_few_clients():
    events, deltas = [event(0.01), event(0.2, 1.5, 4), event(1.0, 3.0, 4)], [1e-5, 1e-6, 1e-5]
    bounds = check(events, deltas, "pld", range(3), PLD_ROUNDING)
    assert bounds.upper == pytest.approx(bounds.lower, rel=1e-3)


def test_a_coarse_discretization_bounds_the_fine_one_from_above():
    for q in (0.002, 0.05, 0.4):
        (interval,) = _many_gaussians._coarse_interval(np.array([q]), np.array([1.0]))
        fine, coarse = (
            _many_gaussians._gaussian_loss(1.0, q, 30, h).get_epsilon_for_delta(1e-5) for h in (1e-4, interval)
        )
        assert interval > 1e-4
        assert fine <= coarse <= fine * 1.005


def test_above_epsilon_100_rdp_replaces_pld():
    events, deltas = [event(0.5, 0.3, 100)], [1e-5]
    (exact,) = [epsilon_of(events, 1e-5, "pld").epsilon]
    bounds = epsilons(events, deltas, "pld")
    assert exact > 100
    assert bounds.lower[0] <= exact <= bounds.upper[0]
    assert bounds.upper[0] == pytest.approx(exact, rel=1e-3)


def test_two_processes_give_the_same_bounds_as_one():
    events, deltas = draw(6, seed=6, z=(2.5,), q=(1e-3, 0.05), counts=(1, 9))
    one, two = (epsilons(events, deltas, "pld", workers=workers) for workers in (1, 2))
    assert (one.upper == two.upper).all()
    assert (one.lower == two.lower).all()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_extreme_clients_cost_the_same_as_alone(accountant):
    events = [
        event(q=0.0),
        event(q=0.0, z=0.0),
        event(z=0.0),
        event(q=1.0, z=0.0),
        event(q=1.0, z=1e300),
        event(z=1e-300),
    ]
    check(events, [1e-5] * len(events), accountant, range(len(events)))
    assert epsilons(events[:4], [1e-5] * 4, accountant).upper.tolist() == [0, 0, math.inf, math.inf]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_clients_give_empty_bounds(accountant):
    bounds = epsilons([], [], accountant)
    assert bounds.lower.shape == bounds.upper.shape == (0,)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_histories_of_every_event_type_are_bounded_together(accountant):
    noise = LmoParameters(combination="mixture", uniform=UniformPart(weight=1.0, low=0.1, high=0.5))
    lmo = SubsampledLmo(parameters=noise, sensitivity=1.0, dimension=500, sampling_probability=0.1)
    events = [
        event(),
        lmo.with_count(3),
        PureEpsilon(epsilon=0.3, count=2),
        replace(lmo, sampling_probability=0.0),
        EpsilonDelta(epsilon=0.1, delta=1e-6, count=2),
        replace(lmo, accounting="published"),
        replace(lmo, sampling_probability=0.2, count=7),
        EpsilonDelta(epsilon=0.1, delta=1e-5),
    ]
    bounds = check(events, [1e-5] * len(events), accountant, range(len(events)), PLD_ROUNDING)
    assert bounds.upper[[3, 5, 7]].tolist() == [0, math.inf, math.inf]


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


def test_zero_workers_are_refused():
    with pytest.raises(ValueError, match="workers = 0"):
        epsilons([event()], [1e-5], "pld", workers=0)


def test_thousands_of_clients_with_lmo_noise_are_bounded_on_a_grid_of_sampling_probabilities(monkeypatch):
    monkeypatch.setattr(lmo_event, "_NODES", 20)
    noise = LmoParameters(combination="mixture", uniform=UniformPart(weight=1.0, low=0.1, high=0.5))
    generator = np.random.default_rng(5)
    events = [
        SubsampledLmo(parameters=noise, sensitivity=1.0, dimension=500, sampling_probability=q, count=20)
        for q in [0.0, 1.0, *np.exp(generator.uniform(math.log(0.01), 0.0, 200)).tolist()]
    ]
    found = check(events, [1e-5] * len(events), "pld", range(0, len(events), 20))
    assert found.upper[0] == 0
    assert (found.lower <= found.upper).all()
    # Twenty nodes over a factor of 100 lie 27 % apart.
    assert np.median(found.upper[1:] / found.lower[1:]) < 1.6

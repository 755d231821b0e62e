"""Events that state only (epsilon, delta): composed from above, together with Gaussians, and never across units."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.privacy.accounting.accountants import delta_of, epsilon_of, stays_within
from fedpriv.privacy.accounting.events import EpsilonDelta, PureEpsilon, SubsampledGaussian, from_json, to_json

GAUSSIAN = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.1, count=20)
PURE = PureEpsilon(epsilon=0.3, count=4)
BOTH = ("pld", "rdp")


def best_delta(epsilons: list[float], epsilon: float) -> float:
    """The smallest delta of composed randomised responses at epsilon, by enumerating all outcomes."""
    total = 0.0
    for signs in product((1, -1), repeat=len(epsilons)):
        p = math.prod(math.exp(max(s, 0) * e) / (1 + math.exp(e)) for s, e in zip(signs, epsilons, strict=True))
        q = math.prod(math.exp(max(-s, 0) * e) / (1 + math.exp(e)) for s, e in zip(signs, epsilons, strict=True))
        total += max(0.0, p - math.exp(epsilon) * q)
    return total


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize("epsilons", [[0.3] * 4, [1.0, 0.2, 0.2], [2.5], [0.05] * 12])
def test_pure_epsilons_compose_to_a_tight_upper_bound(accountant, epsilons):
    epsilon = epsilon_of([PureEpsilon(epsilon=e) for e in epsilons], 1e-3, accountant).epsilon
    assert best_delta(epsilons, epsilon) <= 1e-3 * (1 + 1e-6)
    assert epsilon <= sum(epsilons) + 1e-3
    if accountant == "pld":
        assert best_delta(epsilons, epsilon - 0.01) > 1e-3 or epsilon < 0.01, "the bound must be tight"


@pytest.mark.parametrize("accountant", BOTH)
def test_deltas_are_subtracted_before_anything_is_converted(accountant):
    given_delta = EpsilonDelta(epsilon=0.3, delta=1e-6, count=4)
    as_pure = epsilon_of([GAUSSIAN, PURE], 1e-5 - 4e-6, accountant).epsilon
    assert epsilon_of([GAUSSIAN, given_delta], 1e-5, accountant).epsilon == pytest.approx(as_pure, rel=1e-12)
    assert epsilon_of([given_delta], 4e-6, accountant).epsilon == math.inf
    assert epsilon_of([EpsilonDelta(epsilon=0.0, delta=1.0)], 1e-5, accountant).epsilon == math.inf


@pytest.mark.parametrize("accountant", BOTH)
def test_a_composition_costs_at_least_each_part_and_at_most_the_sum(accountant):
    parts = [epsilon_of([event], 5e-6, accountant).epsilon for event in (GAUSSIAN, PURE)]
    total = epsilon_of([GAUSSIAN, PURE], 1e-5, accountant).epsilon
    assert total <= sum(parts)
    assert total >= max(epsilon_of([event], 1e-5, accountant).epsilon for event in (GAUSSIAN, PURE))


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize(
    "events", [[GAUSSIAN], [GAUSSIAN, PURE], [GAUSSIAN, EpsilonDelta(epsilon=0.1, delta=1e-7)]], ids=["g", "gp", "ged"]
)
def test_delta_at_the_composed_epsilon_is_the_original_delta(accountant, events):
    epsilon = epsilon_of(events, 1e-5, accountant).epsilon
    assert delta_of(events, epsilon, accountant) == pytest.approx(1e-5, rel=1e-2)
    assert delta_of(events, 2 * epsilon, accountant) < 1e-5 < delta_of(events, epsilon / 2, accountant)


def test_delta_is_0_without_releases_and_1_without_noise():
    assert delta_of([], 0.0) == 0
    assert delta_of([replace(GAUSSIAN, noise_multiplier=0.0)], 5.0) == 1
    with pytest.raises(ValueError, match="epsilon = -1"):
        delta_of([GAUSSIAN], -1)


def test_events_of_different_units_are_never_composed():
    client = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=1.0, unit="client")
    with pytest.raises(ValueError, match="client, record"):
        epsilon_of([GAUSSIAN, client], 1e-5)
    assert epsilon_of([client, replace(PURE, unit="client")], 1e-5).epsilon > epsilon_of([client], 1e-5).epsilon
    with pytest.raises(ValueError, match="unit = client"):
        SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.5, unit="client")


class Renyi:
    """Not a known type of event."""

    unit, count = "record", 1


@pytest.mark.parametrize("accountant", BOTH)
def test_an_unknown_event_is_refused(accountant):
    with pytest.raises(ValueError, match="unknown"):
        epsilon_of([GAUSSIAN, Renyi()], 1e-5, accountant)


@given(st.floats(0, 50), st.floats(0, 1), st.integers(1, 1000), st.sampled_from(["record", "person", "client"]))
def test_json_round_trip_returns_the_same_event(epsilon, delta, count, unit):
    for event in (
        PureEpsilon(epsilon=epsilon, count=count, unit=unit),
        EpsilonDelta(epsilon=epsilon, delta=delta, count=count, unit=unit),
    ):
        assert from_json(to_json(event)) == event


def test_pld_decides_whether_a_composition_stays_within_a_budget():
    cost = epsilon_of([GAUSSIAN], 1e-5).epsilon
    assert stays_within([GAUSSIAN], 1e-5, cost)
    assert not stays_within([GAUSSIAN], 1e-5, cost * (1 - 1e-9))
    for budget in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="budget"):
            stays_within([GAUSSIAN], 1e-5, budget)

"""Events survive a JSON round trip, invalid ones are refused, and stated epsilons compose from above, by unit."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.privacy.accounting.accountants import delta_of, epsilon_of, stays_within
from fedpriv.privacy.accounting.events import EpsilonDelta, PureEpsilon, from_json, group, to_json
from tests.events import gaussian

COUNTS, UNITS = st.integers(1, 10**6), st.sampled_from(["record", "person", "client"])
EVENTS = st.builds(gaussian, st.floats(0, 1e6), st.floats(0, 1), COUNTS)
FIELDS = {"epsilon": st.floats(0, 50), "count": COUNTS, "unit": UNITS}
STATED = st.builds(PureEpsilon, **FIELDS) | st.builds(EpsilonDelta, delta=st.floats(0, 1), **FIELDS)
GAUSSIAN = gaussian(2.0, 0.1, 20)
PURE = PureEpsilon(epsilon=0.3, count=4)
BOTH = ("pld", "rdp")


@given(EVENTS | STATED)
def test_json_round_trip_is_exact(event):
    assert from_json(to_json(event)) == event


@given(st.lists(EVENTS, max_size=8))
def test_grouping_keeps_the_total_count_and_leaves_no_equal_events(events):
    grouped = group(events + events)
    assert sum(event.count for event in grouped) == 2 * sum(event.count for event in events)
    keys = [(event.noise_multiplier, event.sampling_probability) for event in grouped]
    assert len(keys) == len(set(keys))
    assert set(group(events[::-1] * 2)) == set(grouped), "in any order"


def changed(**changes):
    fields = json.loads(to_json(gaussian(1.0, 0.1)))
    return json.dumps({name: value for name, value in (fields | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (changed(version=2), "version = 2"),
        (changed(kind="laplace"), "kind = 'laplace'"),
        (changed(kind=None), "JSON object"),
        (changed(colour="red"), "colour"),
        (changed(noise_multiplier=-1.0), "noise_multiplier = -1.0"),
        (changed(sampling_probability=1.5), "sampling_probability = 1.5"),
        (changed(count=0), "count = 0"),
        (changed(count=1.5), "count = 1.5"),
        (changed(noise_multiplier="2"), "noise_multiplier = '2'"),
        (changed(noise_multiplier=None), "noise_multiplier"),
        (changed(sampling_probability=None), "sampling_probability"),
        ("[]", "JSON object"),
        ("nonsense", "JSON object"),
        # The server reads this from untrusted clients: whatever the text, it must raise ValueError, which it expects.
        (changed(kind=[]), "event"),
        (changed(kind={}), "event"),
        (changed(noise_multiplier=10**400), "noise_multiplier"),
        ("[" * 100_000, "event"),
    ],
    ids=lambda value: value[:60],
)
def test_unknown_or_impossible_events_are_refused(text, part):
    with pytest.raises(ValueError, match=part):
        from_json(text)


# What breaks depends on the depth of the caller's stack: the parser, a message's text, or nothing at all.
@pytest.mark.parametrize("field", ["noise_multiplier", "unit", "count", "kind", "version"])
def test_deeply_nested_values_are_refused_like_any_other(field):
    for depth in range(500, 1100, 25):
        text = changed(**{field: "DEEP"}).replace('"DEEP"', "[" * depth + "]" * depth)
        with pytest.raises(ValueError, match=r"event|must be"):
            from_json(text)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="noise_multiplier"):
        gaussian(bad, 0.1)
    with pytest.raises(ValueError, match="sampling_probability"):
        gaussian(1.0, bad)


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
@pytest.mark.parametrize("others", [(), (PURE,), (EpsilonDelta(epsilon=0.1, delta=1e-7),)], ids=len)
def test_delta_at_the_composed_epsilon_is_the_original_delta(accountant, others):
    events = [GAUSSIAN, *others]
    epsilon = epsilon_of(events, 1e-5, accountant).epsilon
    assert delta_of(events, epsilon, accountant) == pytest.approx(1e-5, rel=1e-2)
    assert delta_of(events, 2 * epsilon, accountant) < 1e-5 < delta_of(events, epsilon / 2, accountant)


def test_delta_is_0_without_releases_and_1_without_noise():
    assert delta_of([], 0.0) == 0
    assert delta_of([replace(GAUSSIAN, noise_multiplier=0.0)], 5.0) == 1
    with pytest.raises(ValueError, match="epsilon = -1"):
        delta_of([GAUSSIAN], -1)


def test_events_of_different_units_are_never_composed():
    client = gaussian(2.0, unit="client")
    with pytest.raises(ValueError, match="client, record"):
        epsilon_of([GAUSSIAN, client], 1e-5)
    assert epsilon_of([client, replace(PURE, unit="client")], 1e-5).epsilon > epsilon_of([client], 1e-5).epsilon
    with pytest.raises(ValueError, match="unit = client"):
        gaussian(2.0, 0.5, unit="client")


class Renyi:
    """Not a known type of event."""

    unit, count = "record", 1


@pytest.mark.parametrize("accountant", BOTH)
def test_an_unknown_event_is_refused(accountant):
    with pytest.raises(ValueError, match="unknown"):
        epsilon_of([GAUSSIAN, Renyi()], 1e-5, accountant)


def test_pld_decides_whether_a_composition_stays_within_a_budget():
    cost = epsilon_of([GAUSSIAN], 1e-5).epsilon
    assert stays_within([GAUSSIAN], 1e-5, cost)
    assert not stays_within([GAUSSIAN], 1e-5, cost * (1 - 1e-9))
    for budget in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="budget"):
            stays_within([GAUSSIAN], 1e-5, budget)

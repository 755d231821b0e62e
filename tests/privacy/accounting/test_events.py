"""Events survive a JSON round trip; unknown or invalid ones are refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.privacy.accounting.events import SubsampledGaussian, from_json, group, to_json

EVENTS = st.builds(
    SubsampledGaussian,
    noise_multiplier=st.floats(0, 1e6),
    sampling_probability=st.floats(0, 1),
    count=st.integers(1, 10**6),
)


@given(EVENTS)
def test_json_round_trip_is_exact(event):
    assert from_json(to_json(event)) == event


@given(st.lists(EVENTS, max_size=8))
def test_grouping_keeps_the_total_count_and_leaves_no_equal_events(events):
    grouped = group(events + events)
    assert sum(event.count for event in grouped) == 2 * sum(event.count for event in events)
    keys = [(event.noise_multiplier, event.sampling_probability) for event in grouped]
    assert len(keys) == len(set(keys))


def changed(**changes):
    fields = json.loads(to_json(SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.1)))
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
        ("[]", "JSON object"),
        ("nonsense", "JSON object"),
    ],
)
def test_unknown_or_impossible_events_are_refused(text, part):
    with pytest.raises(ValueError, match=part):
        from_json(text)


# What breaks depends on the depth of the caller's stack: the parser, a message's text, or nothing at all.
@pytest.mark.parametrize("field", ["noise_multiplier", "unit", "count", "kind", "version"])
def test_deeply_nested_values_are_refused_like_any_other(field):
    for depth in range(500, 1100, 10):
        text = changed(**{field: "DEEP"}).replace('"DEEP"', "[" * depth + "]" * depth)
        with pytest.raises(ValueError, match=r"event|must be"):
            from_json(text)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="noise_multiplier"):
        SubsampledGaussian(noise_multiplier=bad, sampling_probability=0.1)
    with pytest.raises(ValueError, match="sampling_probability"):
        SubsampledGaussian(noise_multiplier=1.0, sampling_probability=bad)


@pytest.mark.parametrize("field", ["noise_multiplier", "sampling_probability"])
def test_a_missing_value_is_refused_by_name(field):
    with pytest.raises(ValueError, match=field):
        from_json(changed(**{field: None}))


def test_order_of_events_does_not_change_the_groups():
    events = [SubsampledGaussian(noise_multiplier=z, sampling_probability=0.1, count=2) for z in (1.0, 2.0, 1.0)]
    assert set(group(events)) == set(group(events[::-1]))
    assert group([]) == ()


# The server reads this from untrusted clients: whatever the text, it must raise ValueError, which the server expects.
@pytest.mark.parametrize(
    "text",
    [changed(kind=[]), changed(kind={}), changed(noise_multiplier=10**400), "[" * 100_000],
    ids=["list as kind", "object as kind", "number beyond float", "deep nesting"],
)
def test_hostile_text_is_refused_with_a_value_error(text):
    with pytest.raises(ValueError, match=r"event|noise_multiplier"):
        from_json(text)

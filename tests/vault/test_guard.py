"""The guard at its borders: what it just allows, what it just refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.accounting.sensitivity import CLIPPING_RULES
from fedpriv.config import RunConfig
from fedpriv.training.local_update import UpdateSpec
from fedpriv.vault import guard

SPEC = UpdateSpec.of(RunConfig())
STRICT = guard.NodePolicy(allow_unrecorded=True)


def check(num_registered=100, **changes):
    guard.check(dataclasses.replace(SPEC, **changes), STRICT, noise_source="secure", num_registered=num_registered)


@pytest.mark.parametrize("rule", CLIPPING_RULES)
def test_every_known_clipping_rule_passes(rule):
    check(clipping=rule)


@pytest.mark.parametrize("batch_size", [1, 100])
def test_batch_may_be_one_record_or_all(batch_size):
    check(batch_size=batch_size)


@given(st.integers(-5, 300), st.integers(1, 200))
def test_batch_passes_exactly_within_the_registered_records(batch_size, registered):
    if 1 <= batch_size <= registered:
        check(registered, batch_size=batch_size)
    else:
        with pytest.raises(guard.RefusedError, match=rf"batch_size = {batch_size}: must lie in 1\.\.{registered}"):
            check(registered, batch_size=batch_size)


def test_refusal_names_the_value_in_one_line():
    with pytest.raises(guard.RefusedError, match=r"clip_norm = -2\.5: must be finite and > 0") as caught:
        check(clip_norm=-2.5)
    assert "\n" not in str(caught.value)


def test_a_node_is_strict_unless_its_operator_says_otherwise():
    assert not guard.NodePolicy().allow_not_private
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRICT.allow_not_private = True


@pytest.mark.parametrize("noise_source", ["seeded", "Secure", "", "none"])
def test_only_the_secure_source_is_secure(noise_source):
    with pytest.raises(guard.RefusedError, match="noise source"):
        guard.check(SPEC, STRICT, noise_source=noise_source, num_registered=100)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_learning_rate_that_makes_no_sense_is_refused_before_the_charge(value):
    with pytest.raises(guard.RefusedError, match="learning_rate"):
        check(learning_rate=value)


def test_unknown_optimizer_is_refused_before_the_charge():
    with pytest.raises(guard.RefusedError, match="optimizer"):
        check(optimizer="lion")

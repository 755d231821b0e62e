"""What the guard refuses, where exactly it draws the line, and how it says so."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.config import RunConfig
from fedpriv.holder.vault import _charging, _guard
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.privacy.accounting.sensitivity import CLIPPING_RULES

SPEC = UpdateSpec.of(RunConfig(recipe="per-sample"))
STRICT = _charging.NodePolicy(allow_unrecorded=True)
OPEN = _charging.NodePolicy(allow_unrecorded=True, allow_not_private=True)


def check(policy=STRICT, *, noise_source="secure", num_registered=100, has_labels=True, **changes):
    spec = dataclasses.replace(SPEC, **changes)
    _guard.check_instruction(
        spec, policy, noise_source=noise_source, num_registered=num_registered, has_labels=has_labels
    )


def test_a_private_instruction_passes():
    check(num_registered=400)


@pytest.mark.parametrize("rule", CLIPPING_RULES)
def test_every_known_clipping_rule_passes(rule):
    check(clipping=rule)


@pytest.mark.parametrize("batch_size", [1, 100])
def test_a_batch_may_be_one_record_or_all(batch_size):
    check(batch_size=batch_size)


@given(st.integers(-5, 300), st.integers(1, 200))
def test_a_batch_passes_exactly_if_it_is_within_the_registered_records(batch_size, registered):
    if 1 <= batch_size <= registered:
        check(num_registered=registered, batch_size=batch_size)
    else:
        with pytest.raises(_charging.RefusedError, match=rf"batch_size = {batch_size}: must lie in 1\.\.{registered}"):
            check(num_registered=registered, batch_size=batch_size)


def test_a_refusal_names_the_value_in_one_line():
    with pytest.raises(_charging.RefusedError, match=r"clip_norm = -2\.5: must be finite and > 0") as caught:
        check(clip_norm=-2.5)
    assert "\n" not in str(caught.value)


def test_a_node_is_strict_unless_its_operator_says_otherwise():
    assert not _charging.NodePolicy().allow_not_private
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRICT.allow_not_private = True


@pytest.mark.parametrize("noise_source", ["seeded", "Secure", "", "none"])
def test_a_strict_node_refuses_every_noise_source_but_secure(noise_source):
    with pytest.raises(_charging.RefusedError, match="noise source"):
        check(noise_source=noise_source)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_an_invalid_learning_rate_is_refused(value):
    with pytest.raises(_charging.RefusedError, match="learning_rate"):
        check(learning_rate=value)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(_charging.RefusedError, match="optimizer"):
        check(optimizer="lion")


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"clip_norm": 0.0},
        {"clip_norm": math.inf},
        {"clip_norm": math.nan},
        {"local_steps": 0},
        {"batch_size": 401},
        {"batch_size": 0},
        {"clipping": "none"},
    ],
)
@pytest.mark.parametrize("policy", [STRICT, OPEN], ids=["strict", "open"])
def test_an_invalid_instruction_is_refused_by_every_node(policy, change):
    (key,) = change
    with pytest.raises(_charging.RefusedError, match=key):
        check(policy, num_registered=400, **change)


def test_only_a_node_that_allows_it_releases_without_noise_or_with_seeded_noise():
    with pytest.raises(_charging.RefusedError, match="noise_multiplier = 0"):
        check(noise_multiplier=0.0)
    with pytest.raises(_charging.RefusedError, match="seeded"):
        check(noise_source="seeded")
    check(OPEN, noise_multiplier=0.0)
    check(OPEN, noise_source="seeded")


def test_class_sums_need_labels():
    check(trains="head", objective="class-sums")
    with pytest.raises(_charging.RefusedError, match="objective = 'class-sums': needs records with labels"):
        check(trains="head", objective="class-sums", has_labels=False)

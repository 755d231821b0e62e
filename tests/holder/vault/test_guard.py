"""What the guard and a data holder's limits allow, where exactly they draw the line, and how they refuse."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.holder.vault import _guard
from fedpriv.holder.vault._charging import NodePolicy, RefusedError
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.learning.training.local_update import UpdateSpec, planned_event
from fedpriv.privacy.accounting.sensitivity import CLIPPING_RULES

SPEC = UpdateSpec.of(RunConfig(recipe="per-sample"))
STRICT = NodePolicy(allow_unrecorded=True)
OPEN = NodePolicy(allow_unrecorded=True, allow_not_private=True)
LOW = NodeLimits(max_sampling_probability=0.25)
ADAPTER = {name: torch.zeros(2, 3) for name in ("x.lora_A.weight", "x.lora_B.weight")}


def check(policy=STRICT, *, noise_source="secure", num_registered=400, has_labels=True, **changes):
    """By the guard, whose policy holds at every node."""
    facts = {"noise_source": noise_source, "num_registered": num_registered, "has_labels": has_labels}
    _guard.check_instruction(replace(SPEC, **changes), policy, **facts)


def limit(limits: NodeLimits | None = NodeLimits(), *, probability=0.1, round_=1, **changes) -> None:  # noqa: B008
    """By the limits that an operator sets."""
    spec = replace(SPEC, **changes)
    _guard.check_limits(spec, planned_event(spec, probability, ADAPTER), round_, limits)


def test_a_private_instruction_passes():
    check()
    for rule in CLIPPING_RULES:
        check(clipping=rule)
    check(trains="head", objective="class-sums")
    limit()


@given(st.integers(-5, 300), st.integers(1, 200))
def test_a_batch_passes_exactly_if_it_is_within_the_registered_records(batch_size, registered):
    if 1 <= batch_size <= registered:
        check(num_registered=registered, batch_size=batch_size)
    else:
        with pytest.raises(RefusedError, match=rf"batch_size = {batch_size}: must lie in 1\.\.{registered}"):
            check(num_registered=registered, batch_size=batch_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"noise_multiplier": value}, "noise_multiplier") for value in (-1.0, math.nan, math.inf)),
        *(({"clip_norm": c}, f"clip_norm = {c}: must be finite and > 0") for c in (-2.5, 0.0, math.inf, math.nan)),
        ({"local_steps": 0}, "local_steps"),
        ({"batch_size": 401}, "batch_size"),
        ({"clipping": "none"}, "clipping"),
        *(({"learning_rate": value}, "learning_rate") for value in (math.nan, math.inf, 0.0, -1.0)),
        ({"optimizer": "lion"}, "optimizer"),
        ({"trains": "head", "objective": "class-sums", "has_labels": False}, "class-sums': needs records with labels"),
    ],
)
def test_an_invalid_instruction_is_refused_by_every_node_in_one_line(change, message):
    for policy in (STRICT, OPEN):
        with pytest.raises(RefusedError, match=message) as caught:
            check(policy, **change)
        assert "\n" not in str(caught.value)


def test_only_a_node_that_allows_it_releases_without_noise_or_with_seeded_noise():
    assert not NodePolicy().allow_not_private, "strict unless the operator says otherwise"
    for source in ("seeded", "Secure", "", "none"):
        with pytest.raises(RefusedError, match="noise source"):
            check(noise_source=source)
    with pytest.raises(RefusedError, match="noise_multiplier = 0"):
        check(noise_multiplier=0.0)
    check(OPEN, noise_multiplier=0.0)
    check(OPEN, noise_source="seeded")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier: its effective value 0 is below this node's minimum 0.3"),
        ({"noise_multiplier": 0.4, "clipping": "split"}, "effective value 0.282843 is below"),
        ({"noise_multiplier": 1e6}, r"effective value 1e\+06 is above this node's maximum 1000"),
        ({"noise_on": "upload", "noise_multiplier": 0.59}, r"effective value 0\.295"),
        ({"local_steps": 300}, "local_steps = 300: above this node's maximum 100"),
        ({"num_rounds": 10**6}, r"num_rounds = 1e\+06: above this node's maximum 1000"),
        ({"clip_norm": 1e9}, r"clip_norm = 1e\+09: above this node's maximum 100"),
        ({"round_": 11}, r"round = 11: must lie in 1\.\.10"),
        ({"round_": 0}, r"round = 0: must lie in 1\.\.10"),
        ({"limits": LOW, "probability": 0.3}, r"sampling_probability: its value 0\.3 is above this node's maximum 0"),
        ({"limits": None, "round_": 11}, "round = 11"),
    ],
)
def test_an_instruction_less_private_than_agreed_is_refused_by_name(changes, message):
    with pytest.raises(RefusedError, match=message) as caught:
        limit(**changes)
    assert "\n" not in str(caught.value)


def test_an_instruction_exactly_at_the_limits_or_where_there_are_none_passes():
    limits = NodeLimits(min_effective_noise_multiplier=1.0, max_sampling_probability=0.25, max_clip_norm=3.0)
    limit(limits, noise_multiplier=1.0, probability=0.25, local_steps=100, num_rounds=1000, clip_norm=3.0)
    limit(noise_on="upload", noise_multiplier=0.61, probability=1.0)  # by its own factor, and it needs no sampling
    limit(None, noise_multiplier=0.0, probability=1.0, local_steps=10**6, clip_norm=1e9)


def test_a_policy_file_replaces_defaults_key_by_key_and_an_invalid_one_is_refused_in_one_line(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("max_rounds = 7\n")
    assert NodeLimits.read(path) == NodeLimits(max_rounds=7)
    for text, message in (
        ("max_rounds = 0", "max_rounds = 0: input should be greater than or equal to 1"),
        ("min_effective_noise_multiplier = -1.0", "min_effective_noise_multiplier = -1.0"),
        ("min_effective_noise_multiplier = inf", "finite"),
        ("max_round = 3", "max_round = 3: unexpected"),
        ("max_rounds = = 3", "not a TOML file"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            NodeLimits.read(path)
        assert (str(path) in str(caught.value), "\n" in str(caught.value)) == (True, False)

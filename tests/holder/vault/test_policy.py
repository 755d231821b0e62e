"""A data holder's limits: what they allow, and what they refuse by name."""

import dataclasses

import pytest
import torch

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.holder.vault import _charging, _guard
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.learning.training.local_update import UpdateSpec, planned_event

SPEC = UpdateSpec.of(RunConfig(recipe="per-sample"))
ADAPTER = {name: torch.zeros(2, 3) for name in ("x.lora_A.weight", "x.lora_B.weight")}


def check(limits: NodeLimits | None = NodeLimits(), *, probability=0.1, round_=1, **changes) -> None:  # noqa: B008
    spec = dataclasses.replace(SPEC, **changes)
    _guard.check_limits(spec, planned_event(spec, probability, ADAPTER), round_, limits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier: its effective value 0 is below this node's minimum 0.3"),
        ({"noise_multiplier": 0.4, "clipping": "split"}, "effective value 0.282843 is below"),
        ({"noise_multiplier": 1e6}, r"effective value 1e\+06 is above this node's maximum 1000"),
        ({"local_steps": 300}, "local_steps = 300: above this node's maximum 100"),
        ({"num_rounds": 10**6}, r"num_rounds = 1e\+06: above this node's maximum 1000"),
        ({"clip_norm": 1e9}, r"clip_norm = 1e\+09: above this node's maximum 100"),
        ({"round_": 11}, r"round = 11: must lie in 1\.\.10"),
        ({"round_": 0}, r"round = 0: must lie in 1\.\.10"),
    ],
)
def test_an_instruction_less_private_than_agreed_is_refused_by_name(changes, message):
    with pytest.raises(_charging.RefusedError, match=message) as caught:
        check(**changes)
    assert "\n" not in str(caught.value)


def test_a_sampling_probability_above_the_node_s_own_maximum_is_refused():
    with pytest.raises(
        _charging.RefusedError, match=r"sampling_probability: its value 0\.3 is above this node's maximum 0"
    ):
        check(NodeLimits(max_sampling_probability=0.25), probability=0.3)


def test_an_instruction_exactly_at_the_limits_passes():
    limits = NodeLimits(min_effective_noise_multiplier=1.0, max_sampling_probability=0.25, max_clip_norm=3.0)
    check(limits, noise_multiplier=1.0, probability=0.25, local_steps=100, num_rounds=1000, clip_norm=3.0)


def test_noise_on_the_upload_is_judged_by_its_own_factor_and_needs_no_sampling():
    check(noise_on="upload", noise_multiplier=0.61, probability=1.0)
    with pytest.raises(_charging.RefusedError, match=r"effective value 0\.295"):
        check(noise_on="upload", noise_multiplier=0.59)


def test_without_limits_only_an_impossible_round_is_refused():
    check(None, noise_multiplier=0.0, probability=1.0, local_steps=10**6, clip_norm=1e9)
    with pytest.raises(_charging.RefusedError, match="round = 11"):
        check(None, round_=11)


def test_a_policy_file_replaces_defaults_key_by_key(tmp_path):
    (tmp_path / "policy.toml").write_text("max_rounds = 7\n")
    assert NodeLimits.read(tmp_path / "policy.toml") == NodeLimits(max_rounds=7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_rounds = 0", "max_rounds = 0: input should be greater than or equal to 1"),
        ("min_effective_noise_multiplier = -1.0", "min_effective_noise_multiplier = -1.0"),
        ("min_effective_noise_multiplier = inf", "finite"),
        ("max_round = 3", "max_round = 3: unexpected"),
        ("max_rounds = = 3", "not a TOML file"),
    ],
)
def test_an_invalid_policy_file_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        NodeLimits.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)

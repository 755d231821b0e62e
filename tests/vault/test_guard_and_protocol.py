"""What the guard refuses, and what travels."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fedpriv import protocol
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.training.local_update import UpdateSpec
from fedpriv.vault import guard

SPEC = UpdateSpec.of(RunConfig())
STRICT = guard.NodePolicy(allow_unrecorded=True)
OPEN = guard.NodePolicy(allow_unrecorded=True, allow_not_private=True)


def check(policy=STRICT, noise_source="secure", **changes):
    guard.check(dataclasses.replace(SPEC, **changes), policy, noise_source=noise_source, num_registered=400)


def test_a_private_instruction_passes():
    check()


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
def test_what_makes_no_sense_is_refused_by_every_node(policy, change):
    (key,) = change
    with pytest.raises(guard.RefusedError, match=key):
        check(policy, **change)


def test_only_a_holder_that_agreed_releases_without_noise_or_with_seeded_noise():
    with pytest.raises(guard.RefusedError, match="noise_multiplier = 0"):
        check(noise_multiplier=0.0)
    with pytest.raises(guard.RefusedError, match="seeded"):
        check(noise_source="seeded")
    check(OPEN, noise_multiplier=0.0)
    check(OPEN, noise_source="seeded")


@pytest.mark.parametrize(
    ("public", "simulate", "comparison", "noise_multiplier", "allowed"),
    [
        (False, False, False, 1.0, True),
        (False, False, True, 1.0, False),
        (False, False, False, 0.0, False),
        (True, False, True, 0.0, True),
        (False, True, True, 0.0, True),
    ],
)
def test_runs_without_noise_need_public_data_or_simulate(public, simulate, comparison, noise_multiplier, allowed):
    arguments = {
        "public": public,
        "simulate": simulate,
        "comparison": comparison,
        "noise_multiplier": noise_multiplier,
    }
    if allowed:
        guard.check_run(**arguments)
    else:
        with pytest.raises(InputError, match="public_data"):
            guard.check_run(**arguments)


def test_instruction_round_trip():
    assert protocol.unpack_instruction(protocol.pack_instruction("run", 7, SPEC)) == ("run", 7, SPEC)


def test_registration_round_trip():
    registration = protocol.Registration(client=3, num_records=40, name="St. Anna", data_set="5eed")
    assert protocol.unpack_registration(protocol.pack_registration(registration)) == registration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version = 1"),
        ({"round": "1"}, "round = '1'"),
        ({"round": True}, "round = True"),
        ({"clip_norm": "1"}, "clip_norm = '1'"),
        ({"extra": 1}, "unknown fields extra"),
        ({"optimizer": None}, "optimizer: missing"),
    ],
)
def test_malformed_instruction_is_refused_by_name(change, message):
    fields = {**protocol.pack_instruction("run", 1, SPEC), **change}
    fields = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        protocol.unpack_instruction(fields)


@pytest.mark.parametrize("change", [{"num_records": 0}, {"client": -1}])
def test_impossible_registration_is_refused(change):
    fields = protocol.pack_registration(protocol.Registration(client=0, num_records=1, name="", data_set="5eed"))
    with pytest.raises(ValueError, match="needs client >= 0"):
        protocol.unpack_registration({**fields, **change})

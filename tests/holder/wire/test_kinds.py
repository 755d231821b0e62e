"""Messages read back exactly, and every field that is missing, mistyped or unknown is refused by name."""

import json
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.config import RunConfig
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import EVALUATE, Response
from fedpriv.holder.wire.kinds import Broadcast
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.private_evaluation import EvaluationSpec, NoisedCounts
from fedpriv.privacy.accounting.events import SubsampledGaussian

SPEC = UpdateSpec.of(RunConfig(recipe="per-sample"))
EVENT = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.25, count=3)
MESSAGES = {
    "instruction": (kinds.pack_instruction("run", 3, SPEC), partial(kinds.unpack_instruction, UpdateSpec)),
    "release": (
        kinds.pack(kinds.UploadRelease(round=3, event=EVENT, num_records=40)),
        partial(kinds.unpack, kinds.UploadRelease),
    ),
    "registration": (
        kinds.pack(kinds.Registration(client=2, num_records=40, name="St. Anna", data_set="5eed")),
        partial(kinds.unpack, kinds.Registration),
    ),
}
COUNTS = NoisedCounts(hits=0.1 + 0.2, misses=-3.5)
MESSAGES |= {
    "evaluation": (
        kinds.pack_instruction("run", 3, EvaluationSpec(noise_multiplier=4.0)),
        partial(kinds.unpack_instruction, EvaluationSpec),
    ),
    "evaluation release": (
        kinds.pack(kinds.EvaluationRelease(round=3, event=EVENT, counts=COUNTS)),
        partial(kinds.unpack, kinds.EvaluationRelease),
    ),
}
FIELDS = [(kind, field) for kind, (packed, _) in MESSAGES.items() for field in packed]


def test_instruction_reads_back_exactly():
    assert kinds.unpack_instruction(UpdateSpec, kinds.pack_instruction("run", 7, SPEC)) == ("run", 7, SPEC)


@given(st.integers(1, 10**6), st.floats(0, 1e6), st.floats(0, 1), st.integers(1, 10**9), st.booleans())
def test_release_reads_back_exactly(round_, z, q, count, silent):
    event = SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=count)
    release = kinds.UploadRelease(round=round_, event=event, num_records=count, silent=silent)
    assert kinds.unpack(kinds.UploadRelease, kinds.pack(release)) == release


@given(st.integers(0, 10**6), st.integers(1, 10**12), st.text(max_size=200))
def test_registration_reads_back_exactly(client, num_records, name):
    registration = kinds.Registration(client=client, num_records=num_records, name=name, data_set="5eed")
    assert kinds.unpack(kinds.Registration, kinds.pack(registration)) == registration


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_noised_counts_read_back_to_the_bit(hits, misses):
    release = kinds.EvaluationRelease(round=3, event=EVENT, counts=NoisedCounts(hits=hits, misses=misses))
    stored = Response.of(fields=kinds.pack(release)).frame
    assert kinds.answer_of(EVALUATE, Response(stored)) == release


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_counts_that_are_not_finite_are_refused(value):
    packed, unpack = MESSAGES["evaluation release"]
    with pytest.raises(ValueError, match="must be finite"):
        unpack({**packed, "hits": value})


def test_a_model_reads_back_without_empty_records():
    adapter = {"a": torch.ones(2, 3), "b": torch.zeros(1)}
    arrays = kinds.pack_model(Broadcast(adapter=adapter))
    assert list(arrays) == [kinds.ADAPTER]
    read = kinds.unpack_model(arrays)
    assert all(torch.equal(read.adapter[name], tensor) for name, tensor in adapter.items())
    assert not read.merged
    with pytest.raises(ValueError, match="adapter: missing"):
        kinds.unpack_model({})


@pytest.mark.parametrize("kind", MESSAGES)
def test_packed_values_are_scalars_that_survive_json(kind):
    packed, unpack = MESSAGES[kind]
    assert all(isinstance(value, str | int | float) for value in packed.values())
    assert unpack(json.loads(json.dumps(packed))) == unpack(packed)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_missing_field_is_refused_by_name(kind, field):
    packed, unpack = MESSAGES[kind]
    with pytest.raises(ValueError, match=field):
        unpack({name: value for name, value in packed.items() if name != field})


@pytest.mark.parametrize("wrong", [None, [], b"1", True], ids=repr)
@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_mistyped_field_is_refused_by_name(kind, field, wrong):
    packed, unpack = MESSAGES[kind]
    wrong = 1 if isinstance(packed[field], bool) and wrong is True else wrong
    with pytest.raises(ValueError, match=field):
        unpack({**packed, field: wrong})


@pytest.mark.parametrize("kind", MESSAGES)
def test_unknown_field_is_refused_by_name(kind):
    packed, unpack = MESSAGES[kind]
    with pytest.raises(ValueError, match="local_loss"):
        unpack({**packed, "local_loss": 0.3})


@pytest.mark.parametrize("kind", MESSAGES)
def test_reading_leaves_the_message_unchanged(kind):
    packed, unpack = MESSAGES[kind]
    before = dict(packed)
    unpack(packed)
    assert packed == before


def test_an_int_is_accepted_as_a_float_but_not_the_reverse():
    packed, unpack = MESSAGES["instruction"]
    assert unpack({**packed, "clip_norm": 2})[2].clip_norm == 2.0
    with pytest.raises(ValueError, match=r"local_steps = 2\.0: must be of type int"):
        unpack({**packed, "local_steps": 2.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "unknown fields version"),
        ({"round": "1"}, "round = '1'"),
        ({"round": True}, "round = True"),
        ({"clip_norm": "1"}, "clip_norm = '1'"),
        ({"extra": 1}, "unknown fields extra"),
        ({"optimizer": None}, "optimizer: missing"),
    ],
)
def test_a_malformed_instruction_is_refused_with_name_and_value(change, message):
    packed, unpack = MESSAGES["instruction"]
    fields = {name: value for name, value in {**packed, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        unpack(fields)


@pytest.mark.parametrize("change", [{"num_records": 0}, {"client": -1}])
def test_an_impossible_registration_is_refused(change):
    packed, unpack = MESSAGES["registration"]
    with pytest.raises(ValueError, match="needs client >= 0"):
        unpack({**packed, **change})

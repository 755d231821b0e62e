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
COUNTS = NoisedCounts(hits=0.1 + 0.2, misses=-3.5)
STATED = (
    kinds.UploadRelease(round=3, event=EVENT, num_records=40),
    kinds.Registration(client=2, num_records=40, name="St. Anna", data_set="5eed"),
    kinds.EvaluationRelease(round=3, event=EVENT, counts=COUNTS),
)
# {kind: (fields of a message, what reads them)}
MESSAGES = {type(each).__name__: (kinds.pack(each), partial(kinds.unpack, type(each))) for each in STATED}
MESSAGES |= {
    type(spec).__name__: (kinds.pack_instruction("run", 3, spec), partial(kinds.unpack_instruction, type(spec)))
    for spec in (SPEC, EvaluationSpec(noise_multiplier=4.0))
}
EACH = pytest.mark.parametrize(("packed", "unpack"), MESSAGES.values(), ids=MESSAGES)


@EACH
def test_packed_values_are_scalars_that_survive_json_and_reading_changes_none(packed, unpack):
    assert all(isinstance(value, str | int | float) for value in packed.values())
    before = dict(packed)
    assert unpack(json.loads(json.dumps(packed))) == unpack(packed)
    assert packed == before


@given(st.integers(1, 10**6), st.floats(0, 1e6), st.floats(0, 1), st.integers(1, 10**9), st.booleans())
def test_release_reads_back_exactly(round_, z, q, count, silent):
    event = SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=count)
    release = kinds.UploadRelease(round=round_, event=event, num_records=count, silent=silent)
    assert kinds.unpack(kinds.UploadRelease, kinds.pack(release)) == release


@given(st.integers(0, 10**6), st.integers(1, 10**12), st.text('aZ0"\\\n\0 éΩ\u2028\U0001f600', max_size=200))
def test_registration_reads_back_exactly(client, num_records, name):
    registration = kinds.Registration(client=client, num_records=num_records, name=name, data_set="5eed")
    assert kinds.unpack(kinds.Registration, kinds.pack(registration)) == registration


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_noised_counts_read_back_to_the_bit(hits, misses):
    release = kinds.EvaluationRelease(round=3, event=EVENT, counts=NoisedCounts(hits=hits, misses=misses))
    stored = Response.of(fields=kinds.pack(release)).frame
    assert kinds.answer_of(EVALUATE, Response(stored)) == release


def test_a_model_reads_back_without_empty_records():
    adapter = {"a": torch.ones(2, 3), "b": torch.zeros(1)}
    arrays = kinds.pack_model(Broadcast(adapter=adapter))
    assert list(arrays) == [kinds.ADAPTER]
    read = kinds.unpack_model(arrays)
    assert all(torch.equal(read.adapter[name], tensor) for name, tensor in adapter.items())
    assert not read.merged
    with pytest.raises(ValueError, match="adapter: missing"):
        kinds.unpack_model({})


@EACH
def test_a_missing_mistyped_or_unknown_field_is_refused_by_name(packed, unpack):
    for field, value in packed.items():
        with pytest.raises(ValueError, match=field):
            unpack({name: other for name, other in packed.items() if name != field})
        for wrong in (None, [], b"1", 1 if isinstance(value, bool) else True):
            with pytest.raises(ValueError, match=field):
                unpack({**packed, field: wrong})
    with pytest.raises(ValueError, match="unknown fields local_loss"):
        unpack({**packed, "local_loss": 0.3})


def test_an_instruction_reads_back_exactly_and_an_int_is_accepted_as_a_float_but_neither_the_reverse_nor_a_text():
    packed, unpack = MESSAGES["UpdateSpec"]
    assert unpack(packed) == ("run", 3, SPEC)
    assert unpack({**packed, "clip_norm": 2})[2].clip_norm == 2.0
    for field, value, said in (("local_steps", 2.0, r"2\.0: must be of type int"), ("round", "1", "'1'")):
        with pytest.raises(ValueError, match=f"{field} = {said}"):
            unpack({**packed, field: value})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("Registration", {"num_records": 0}, "needs client >= 0"),
        ("Registration", {"client": -1}, "needs client >= 0"),
        ("EvaluationRelease", {"hits": float("nan")}, "must be finite"),
        ("EvaluationRelease", {"hits": float("inf")}, "must be finite"),
    ],
)
def test_what_cannot_be_is_refused(kind, change, message):
    packed, unpack = MESSAGES[kind]
    with pytest.raises(ValueError, match=message):
        unpack({**packed, **change})

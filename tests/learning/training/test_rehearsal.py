"""A rehearsal meets every failure that no record causes, and leaves no trace."""

import dataclasses
import time

import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.learning.adapters import read
from fedpriv.learning.adapters._arithmetic import Product, factors_of
from fedpriv.learning.training import rehearsal, workbench
from fedpriv.learning.training._passes import RECORDS_OF_A_STEP, padded
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.rehearsal import synthetic_records
from fedpriv.privacy.mechanisms.sources import SecureSource
from tests.learning.training.test_sensitivity import SPEC, make_task
from tests.marks import slow


@pytest.fixture
def model(encoder):
    return TrainingModel(encoder(layers="last-1"), memory_limit=2**30, max_length=40, alone=True)


def changed(**changes):
    return dataclasses.replace(SPEC, **changes)


def rehearse(model, **changes):
    """The pace of a rehearsal, of the usual update unless told otherwise."""
    values = {"adapter": read(model.peft_model), "merged": {}, "spec": SPEC, "max_length": 40, "num_labels": 3}
    values |= {"num_registered": 40}
    return rehearsal.rehearse(model, **{**values, **changes})


def test_there_is_a_synthetic_record_of_every_padded_length(model, make_records):
    def shapes(records):
        return {(padded(len(row), 40), len(row) == 40) for row in records.features["input_ids"]}

    records = synthetic_records(model, max_length=40, num_labels=3)
    assert shapes(records) == shapes(make_records(500, shortest=1, longest=40))
    assert len(records) == len(shapes(records)) == 6


@pytest.mark.parametrize("cached", [True, False])
def test_a_failure_in_any_shape_is_raised(model, cached):
    def fail(_module, args):
        if args[0].shape[1] == 40 and (model.cache is not None) == cached:
            raise MemoryError("too long")

    layer = 1 if cached else 0
    model.peft_model.base_model.model.bert.encoder.layer[layer].register_forward_pre_hook(fail)
    if not cached:
        model.cache = None
    for _ in range(2):  # it is not remembered as rehearsed
        with pytest.raises(MemoryError, match="too long"):
            rehearse(model)


def test_what_the_request_causes_is_raised(model):
    with pytest.raises(ValueError, match="optimizer"):
        rehearse(model, spec=changed(optimizer="lion"))
    with pytest.raises(ValueError, match="on one side only"):
        rehearse(model, adapter={})
    with pytest.raises(InputError, match=r"a bert model cannot train here .*out of bounds"):
        rehearse(model, num_labels=300)
    rehearse(model)
    for _ in range(2):  # although other values worked, these are not remembered as rehearsed
        with pytest.raises(ValueError, match="clip_norm"):
            rehearse(model, spec=changed(clip_norm=1e-200))


def test_it_leaves_the_model_and_its_cache_as_they_were_and_draws_nothing(model, monkeypatch):
    monkeypatch.setattr(SecureSource, "words", lambda *_: pytest.fail("drew from a secure source"))
    before = {name: tensor.clone() for name, tensor in model.peft_model.state_dict().items()}
    merged = {name: Product(0.1 * b, a) for name, (b, a) in factors_of(model.initial).items()}
    rehearse(model, merged=merged)
    after = model.peft_model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.cache.bytes_in_memory == 40 * 40 * 4 * 64, "the room for the registered records"
    assert not model.cache._kept


HEAD = {"trains": "head", "sampling_probability": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        *({"noise_on": "upload"}, HEAD, {"sampling_probability": 0.1, "bias_scale": 0.3}),
        *slow({"clipping": "batch"}, {"optimizer": "adamw"}, {**HEAD, "objective": "class-sums"}),
    ],
)
def test_an_update_that_was_rehearsed_runs(model, make_records, changes):
    rehearse(model, spec=changed(**changes))
    rehearsal.local_update(model, make_task(model, make_records(40, shortest=1, longest=40), **changes))


@pytest.fixture
def computed(monkeypatch):
    """How many records each update on synthetic records has."""
    sizes, update = [], rehearsal.local_update

    def watched(model, task):
        sizes.append(len(task.data))
        return update(model, task)

    monkeypatch.setattr(rehearsal, "local_update", watched)
    return sizes


def test_what_was_rehearsed_is_not_rehearsed_again_and_other_values_are_tried_on_one_record(model, computed):
    rehearse(model)
    assert max(computed) > 1
    computed.clear()
    rehearse(model, adapter={name: tensor + 1 for name, tensor in read(model.peft_model).items()})
    assert not computed
    for changes in ({"learning_rate": 0.1}, {"clip_norm": 3.0}, {"noise_multiplier": 2.0}):
        computed.clear()
        rehearse(model, spec=changed(**changes))
        assert computed == [1]


@pytest.mark.parametrize(
    "changes", [{"local_steps": 1}, *slow({"clipping": "batch"}, {"batch_size": 9}, {"optimizer": "adamw"})]
)
def test_what_computes_in_another_way_is_rehearsed_in_full(model, computed, changes):
    rehearse(model)
    in_full = computed.copy()
    rehearse(model, spec=changed(**changes))
    assert computed == 2 * in_full


def test_what_a_model_remembers_is_bounded(model, monkeypatch, computed):
    monkeypatch.setattr(rehearsal, "_MOST_REMEMBERED", 4)
    for step in range(12):
        rehearse(model, spec=changed(learning_rate=0.1 + step))
    assert len(rehearsal._rehearsed[model]) == 4
    assert computed[-11:] == [1] * 11, "many learning rates made it forget what they have in common"


@pytest.mark.parametrize(
    ("changes", "reserved"),
    [
        ({"num_rounds": 1}, False),  # 3 steps a round, of 8 records in 40
        ({"num_rounds": 2}, True),
        *(({"num_rounds": 1, **HEAD, "sampling_probability": q}, q > 1 / 3) for q in (0.3, 0.4)),
    ],
)
def test_room_is_reserved_for_the_registered_records_if_the_caches_pay_off(model, changes, reserved):
    rehearse(model, spec=changed(**changes), num_registered=40)
    assert model.cache.bytes_in_memory == reserved * 40 * 40 * 4 * 64
    assert model.features.bytes_in_memory == (reserved and "trains" in changes) * 40 * 4 * 64


@pytest.mark.parametrize("place", [-1, -2])
def test_the_pace_is_that_of_the_slower_of_the_longest_records(model, monkeypatch, place):
    """The longest has no mask, and may be quicker."""
    slow = len(synthetic_records(model, max_length=40, num_labels=3).features["input_ids"][place])
    honest = TrainingModel.predictions

    def predictions(self, items, *, cached):
        if any(len(records.features["input_ids"][index]) == slow for records, index in items):
            time.sleep(0.02)
        return honest(self, items, cached=cached)

    monkeypatch.setattr(TrainingModel, "predictions", predictions)
    assert rehearse(model).record >= 0.02


def test_seconds_of_an_update_count_whole_workers_and_persons():
    pace = rehearsal.Pace(step=1.0, record=0.1, new_record=0.5, num_workers=4)
    assert pace.seconds(num_steps=2, num_drawn=10, num_new=0) == pytest.approx(2 + (10 / 4 + 2) * 0.1)
    assert pace.seconds(num_steps=2, num_drawn=10, num_new=5) == pytest.approx(2 + (10 / 4 + 2) * 0.1 + 2 * 0.5)
    assert pace.seconds(num_steps=1, num_drawn=4, num_new=0, records_each=3) == pytest.approx(1 + 2 * 3 * 0.1)


def test_a_model_that_a_length_changes_is_refused_and_not_remembered(model):
    embeddings = model.peft_model.base_model.model.bert.embeddings
    embeddings.longest = 0

    def note(module, _args, states):
        module.longest = max(module.longest, states.shape[1])

    embeddings.register_forward_hook(note)
    for _ in range(2):
        embeddings.longest = 0
        with pytest.raises(InputError, match=r"a bert model cannot train here \(a pass changes .*longest"):
            rehearse(model)


@pytest.mark.parametrize(
    "changes",
    [{}, HEAD, *slow({"noise_on": "upload"}, {"clipping": "batch"}, HEAD | {"sampling_probability": 0.1})],
)
def test_a_broadcast_with_which_no_gradient_is_finite_is_refused(model, changes):
    broken = {name: torch.full_like(tensor, 3e38) for name, tensor in read(model.peft_model).items()}
    with pytest.raises(InputError, match=r"a bert model cannot train here \(its losses or gradients are NaN"):
        rehearse(model, adapter=broken, spec=changed(**changes))
    rehearse(model, spec=changed(**changes))


@pytest.mark.slow
def test_the_speed_is_the_records_of_all_timed_updates_over_their_time(monkeypatch):
    updates = []
    compute = workbench.local_update

    def counted(model, task):
        assert len(task.data) == RECORDS_OF_A_STEP
        updates.append(time.perf_counter())
        return compute(model, task)

    monkeypatch.setattr(workbench, "local_update", counted)
    found = workbench.records_per_second(at_least_seconds=0.01)
    passed = time.perf_counter() - updates[1]
    assert len(updates) >= 2
    assert found >= (len(updates) - 1) * RECORDS_OF_A_STEP / passed
    assert found <= 1.5 * (len(updates) - 1) * RECORDS_OF_A_STEP / passed

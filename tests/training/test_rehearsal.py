"""A rehearsal meets every failure that no record causes, and leaves no trace."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from fedpriv.adapters import read
from fedpriv.adapters._arithmetic import Product, factors_of
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import SecureSource
from fedpriv.training import rehearsal
from fedpriv.training._shapes import most_small_passes
from fedpriv.training.model import TrainingModel
from fedpriv.training.rehearsal import rehearse, synthetic_records
from tests.training.test_local_update import SPEC, make_task

# So little that the largest pass has few rows, each of which a rehearsal fills.
LITTLE_MEMORY = 2**22


@pytest.fixture
def model(encoder):
    return TrainingModel(encoder(layers="last-1"), memory_limit=LITTLE_MEMORY, max_length=40)


def run(model, **changes):
    values = {"adapter": read(model.peft_model), "merged": {}, "spec": SPEC, "max_length": 40, "num_labels": 3}
    values |= {"num_registered": 40, "measures_pace": False}
    return rehearse(model, **{**values, **changes})


def test_synthetic_records_fill_the_largest_pass_of_every_length(model, make_records):
    records = synthetic_records(model, max_length=40, num_labels=3)
    shapes = {together.shape: len(together.positions) for together in model.passes(records.items())}
    real = {together.shape for together in model.passes(make_records(500, shortest=1, longest=40).items())}
    assert {(shape.tokens, shape.full) for shape in shapes} == {(shape.tokens, shape.full) for shape in real}
    assert all(shape.rows == model.sizes(shape.tokens)[-1] for shape in shapes)
    assert all(shape.rows == num for shape, num in shapes.items())
    assert max(len(row) for row in records.features["input_ids"]) == 40


# Every day a step of more records than fill the caches at once is one of few.
@pytest.mark.parametrize(
    ("num_registered", "records_of_a_step", "memory_limit"),
    [
        (8, 1, LITTLE_MEMORY),
        *(pytest.param(num, rehearsal.RECORDS_OF_A_STEP, 2**30, marks=pytest.mark.slow) for num in (8, 400)),
    ],
)
def test_the_largest_passes_of_the_step_are_rehearsed(
    encoder, make_records, monkeypatch, num_registered, records_of_a_step, memory_limit
):
    monkeypatch.setattr(rehearsal, "RECORDS_OF_A_STEP", records_of_a_step)
    model = TrainingModel(encoder(layers="last-1"), memory_limit=memory_limit, max_length=40)
    # Before the layer is watched, since numbers of rows are tried for it.
    items = make_records(num_registered, shortest=40, longest=40).items()
    needed = {(p.shape.rows, p.shape.tokens) for p in model.passes(items, num_registered)}
    rows = []
    layer = model.peft_model.base_model.model.bert.encoder.layer[1]
    layer.register_forward_pre_hook(lambda _module, args: rows.append(tuple(args[0].shape[:2])))
    run(model, spec=changed(sampling_probability=1.0), num_registered=num_registered)
    assert max(needed) in rows


@pytest.mark.parametrize("cached", [True, False])
def test_a_failure_in_any_shape_is_raised(model, cached):
    def fail(_module, args):
        if args[0].shape[1] == 40 and (model.cache is not None) == cached:
            raise MemoryError("too long")

    layer = 1 if cached else 0
    model.peft_model.base_model.model.bert.encoder.layer[layer].register_forward_pre_hook(fail)
    if not cached:
        model.cache = None
    with pytest.raises(MemoryError, match="too long"):
        run(model)
    with pytest.raises(MemoryError, match="too long"):  # it was not remembered as rehearsed
        run(model)


def test_what_the_request_causes_is_raised(model):
    with pytest.raises(ValueError, match="optimizer"):
        run(model, spec=dataclasses.replace(SPEC, optimizer="lion"))
    with pytest.raises(ValueError, match="on one side only"):
        run(model, adapter={})
    with pytest.raises(InputError, match=r"a bert model cannot train here .*out of bounds"):
        run(model, num_labels=300)


def test_it_leaves_the_model_and_its_cache_as_they_were(model, make_records):
    before = {name: tensor.clone() for name, tensor in model.peft_model.state_dict().items()}
    merged = {name: Product(0.1 * b, a) for name, (b, a) in factors_of(model.initial).items()}
    run(model, merged=merged)
    after = model.peft_model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.cache.bytes_in_memory == 40 * 40 * 4 * 64, "the room for the registered records"
    assert not model.cache._kept


def test_nothing_is_drawn_from_a_secure_source(model, monkeypatch):
    def drawn(*_):
        raise AssertionError("a rehearsal drew from a secure source")

    monkeypatch.setattr(SecureSource, "words", drawn)
    run(model)


def test_what_was_rehearsed_is_not_rehearsed_again(model, monkeypatch):
    run(model)
    monkeypatch.setattr(rehearsal, "local_update", lambda *_: pytest.fail("rehearsed again"))
    moved = {name: tensor + 1 for name, tensor in read(model.peft_model).items()}
    run(model, adapter=moved)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_on": "upload"},
        {"clipping": "batch"},
        {"optimizer": "adamw"},
        {"trains": "head", "sampling_probability": 1.0},
        {"trains": "head", "objective": "class-sums", "sampling_probability": 1.0},
        {"sampling_probability": 0.1, "bias_scale": 0.3},
    ],
)
def test_an_update_that_was_rehearsed_runs(model, make_records, changes):
    run(model, spec=dataclasses.replace(SPEC, **changes))
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


def changed(**changes):
    return dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize("changes", [{"learning_rate": 0.1}, {"clip_norm": 3.0}, {"noise_multiplier": 2.0}])
def test_other_values_are_tried_on_one_record(model, computed, changes):
    run(model)
    assert max(computed) > 1
    computed.clear()
    run(model, spec=changed(**changes))
    assert computed == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"local_steps": 1},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in ({"clipping": "batch"}, {"batch_size": 9}, {"optimizer": "adamw"})
        ),
    ],
)
def test_what_computes_in_another_way_is_rehearsed_in_full(model, computed, changes):
    run(model)
    in_full = computed.copy()
    run(model, spec=changed(**changes))
    assert computed == 2 * in_full


def test_values_that_cannot_work_are_raised_although_others_did(model):
    run(model)
    for _ in range(2):  # they are not remembered as rehearsed
        with pytest.raises(ValueError, match="clip_norm"):
            run(model, spec=changed(clip_norm=1e-200))


def test_what_a_model_remembers_is_bounded(model, monkeypatch, computed):
    monkeypatch.setattr(rehearsal, "_MOST_REMEMBERED", 4)
    for step in range(12):
        run(model, spec=changed(learning_rate=0.1 + step))
    assert len(rehearsal._rehearsed[model]) == 4
    assert computed[-11:] == [1] * 11, "many learning rates made it forget what they have in common"


@pytest.mark.parametrize(("num_rounds", "reserved"), [(1, False), (2, True)])
def test_room_is_reserved_for_the_registered_records_if_the_cache_pays_off(model, num_rounds, reserved):
    run(model, spec=changed(num_rounds=num_rounds), num_registered=40)  # 3 steps a round, of 8 records
    assert model.cache.bytes_in_memory == reserved * 40 * 40 * 4 * 64


@pytest.mark.parametrize(("probability", "reserved"), [(0.3, False), (0.4, True), (1.0, True)])
def test_a_sampling_probability_decides_whether_the_caches_pay_off(model, probability, reserved):
    run(model, spec=changed(num_rounds=1, trains="head", sampling_probability=probability), num_registered=17)
    assert model.cache.bytes_in_memory == reserved * 17 * 40 * 4 * 64
    assert model.features.bytes_in_memory == reserved * 17 * 4 * 64


def test_passes_follow_the_rank_that_is_trained(encoder):
    model = TrainingModel(encoder(layers="last-1"), memory_limit=2**24, max_length=40)
    values = sum(parameter.numel() for parameter in model.parameters.values())
    factors = (1, 20, 200, 10**6)
    rows = [model.sizes(8, 1000, values * factor)[-1] for factor in factors]
    assert model.sizes(8, 1000)[-1] == rows[0] > rows[1] > rows[2] > rows[3] == 1
    assert all(2 * 4 * num * values * factor <= 2**24 for num, factor in zip(rows[:3], factors, strict=False))


@pytest.mark.parametrize("place", [0, pytest.param(-1, marks=pytest.mark.slow)])
def test_the_pace_is_that_of_the_slowest_length(model, monkeypatch, place):
    """A trial may find no larger pass than one record at some lengths alone."""
    lengths = model.lengths()
    slow = lengths.padded(lengths.up_to(40)[place])[0]
    honest, sizes = TrainingModel.predictions, TrainingModel.sizes
    monkeypatch.setattr(
        TrainingModel, "sizes", lambda self, tokens, *a, **k: (1,) if tokens == slow else sizes(self, tokens, *a, **k)
    )

    def predictions(self, items, *, cached, shape=None):
        if shape is not None and shape.tokens == slow:
            time.sleep(0.05)  # for each pass, so for each record
        return honest(self, items, cached=cached, shape=shape)

    monkeypatch.setattr(TrainingModel, "predictions", predictions)
    assert run(model, measures_pace=True).pace.record >= 0.05


@pytest.mark.parametrize(("sizes", "most"), [((1,), 1), ((8,), 1), ((2, 4, 8), 2), ((2, 16), 6)])
def test_the_number_of_passes_that_are_not_the_largest_is_bounded(sizes, most):
    assert most_small_passes(sizes) == most

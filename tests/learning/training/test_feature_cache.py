"""Head rounds: features are computed once, and neither the cache nor another record changes a bit of a gradient."""

import dataclasses
import gc
from functools import partial

import pytest
import torch

from fedpriv.learning.adapters import LoraSettings, attach, lora, read
from fedpriv.learning.adapters._arithmetic import Product, factors_of
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import stacked
from fedpriv.learning.training._passes import predictions
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.rehearsal import rehearse
from fedpriv.learning.training.stacked import local_update, stacked_updates
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.learning.training.test_isolation import with_tokens
from tests.learning.training.test_local_update import SPEC, make_task
from tests.tiny import tiny_causal

HEAD = dataclasses.replace(SPEC, trains="head", local_steps=1, sampling_probability=1.0)
WIDTH = 64


@pytest.fixture
def build(encoder):
    """A model whose last layer alone is trained."""
    return partial(TrainingModel, encoder(layers="last-1"), max_length=40)


@pytest.fixture
def model(build):
    return build(memory_limit=2**22, alone=True)


def head_task(model, records, *, num_registered=40, **changes):
    spec = dataclasses.replace(HEAD, **changes)
    sampler = spec.sampler(num_registered, SeededSource(0, "inclusion"))
    return dataclasses.replace(make_task(model, records), spec=spec, sampler=sampler)


def rows_of(model, records, drawn, **changes):
    """The clipped sum of each drawn record by itself, and that of all of them, [records + 1, values]."""
    clients = stacked._Clients.of(model, [head_task(model, records, **changes)])
    sets = [[[index]] for index in drawn] + [[[index] for index in drawn]]
    return torch.cat([stacked._sums(clients, clients.broadcast, [units], is_clipped=True) for units in sets])


@pytest.fixture
def passes(model):
    """How many passes went through the model's last layer."""
    count = []
    model.peft_model.base_model.model.bert.encoder.layer[1].register_forward_hook(lambda *_: count.append(1))
    return count


@pytest.mark.parametrize("centred", [False, True], ids=["", "centred"])
@pytest.mark.parametrize("room", ["kept", "reserved for some", "none"])
def test_neither_the_cache_nor_other_records_change_a_bit(build, make_records, room, centred):
    num = 20
    records, chosen = make_records(num, longest=40), list(range(0, num, 2))
    model = build(memory_limit=2**22, alone=True)
    expected = rows_of(model, records, chosen, centred=centred)
    assert (expected.norm(dim=1) > 0).all()
    model = build(memory_limit=2**22, alone=True)
    if room != "kept":
        model.features._memory_limit = {"reserved for some": 2**30, "none": 0}[room]
        model.features.reserve(11)
    for drawn in (chosen[1:], chosen[:1], chosen[::-1], list(range(num))):
        *found, total = rows_of(model, records, drawn, centred=centred)
        for index in set(drawn) & set(chosen):
            assert torch.equal(found[drawn.index(index)], expected[chosen.index(index)])
        assert torch.equal(total, torch.stack(found).sum(dim=0)), "a record counts in a sum as by itself"
    others = make_records(num, longest=40, seed=7)
    tokens = [(records if i < 9 else others).features["input_ids"][i] for i in range(num)]
    found = rows_of(model, Records({"input_ids": tuple(tokens)}, records.labels, 0), chosen, centred=centred)
    assert torch.equal(found[:5], expected[:5])


def test_features_are_computed_once_until_a_b_or_the_merged_base_change(model, build, make_records, passes):
    task = head_task(model, make_records(40))
    local_update(model, task)
    assert passes
    passes.clear()
    head = {n: t + 1 for n, t in task.adapter.items() if "lora" not in n}
    merged = {name: Product(0.1 * b, a) for name, (b, a) in factors_of(model.initial).items()}
    moved = {n: t if "lora" not in n else t + 0.1 for n, t in task.adapter.items()}
    for change, computed in (
        ({"adapter": {**task.adapter, **head}}, False),
        ({"adapter": moved}, True),
        ({"merged": merged}, True),
    ):
        changed = dataclasses.replace(task, **change)
        found = local_update(model, changed).adapter
        assert bool(passes) == computed
        if "merged" not in change:
            expected = local_update(build(memory_limit=2**30, alone=True), changed).adapter
            assert all(torch.equal(found[name], expected[name]) for name in found)
        passes.clear()


def test_clients_with_different_bodies_each_have_their_own(model, build, make_records):
    sets = [make_records(12, seed=seed) for seed in range(3)]
    tasks = [head_task(model, records) for records in sets]
    tasks[1] = dataclasses.replace(tasks[1], adapter={n: t + 0.1 for n, t in tasks[1].adapter.items()})
    together = stacked_updates(model, tasks)
    for task, update in zip(tasks, together, strict=True):
        alone = local_update(build(memory_limit=2**30), task)
        for name in update.adapter:
            torch.testing.assert_close(update.adapter[name], alone.adapter[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["unusable", "fails"])
def test_a_record_that_is_unusable_or_fails_counts_as_zero_and_no_other(model, make_records, how):
    records = make_records(12)
    *expected, total = rows_of(model, records, [i for i in range(12) if i != 3])
    broken = dataclasses.replace(records, unusable=torch.arange(12) == 3)
    if how == "fails":
        broken = with_tokens(records, 3, [10**6])
    *found, whole = rows_of(model, broken, list(range(12)))
    assert not found[3].any()
    assert all(map(torch.equal, [*found[:3], *found[4:]], expected))
    assert torch.equal(whole, total)
    update = local_update(model, head_task(model, broken)).adapter
    assert all(torch.isfinite(tensor).all() for tensor in update.values())


def test_room_is_reserved_by_the_registered_number_alone(model, make_records):
    values = {"merged": {}, "max_length": 40, "num_labels": 3, "num_registered": 17}
    rehearse(model, adapter=read(model.peft_model), spec=HEAD, **values)
    assert model.features.bytes_in_memory == 17 * WIDTH * 4
    for num in (3, 30):
        local_update(model, head_task(model, make_records(num), num_registered=30))
        assert model.features.bytes_in_memory == 17 * WIDTH * 4


@pytest.mark.parametrize("trains", ["head", "all"])
def test_a_rehearsal_leaves_what_is_kept_of_records(model, make_records, passes, trains):
    values = {"merged": {}, "max_length": 40, "num_labels": 3, "num_registered": 40}
    spec = dataclasses.replace(HEAD, trains=trains, num_rounds=1000)
    task = head_task(model, make_records(40), trains=trains, num_rounds=1000)
    rehearse(model, adapter=task.adapter, spec=spec, **values)
    local_update(model, task)
    prefix = model.cache.prefix.layers[0].register_forward_hook(lambda *_: passes.append(0))
    rehearse(model, adapter=task.adapter, spec=dataclasses.replace(spec, clipping="per-tensor"), **values)
    passes.clear()
    local_update(model, task)
    prefix.remove()
    assert 0 not in passes, "the states below the first trained layer were computed again"
    assert not (passes and trains == "head"), "the features were computed again"


def test_features_are_freed_with_their_records_and_stay_within_the_limit(build, make_records, caplog):
    model = build(memory_limit=20 * WIDTH * 4)
    one, other = make_records(15), make_records(15, seed=1)
    for records in (one, other):
        local_update(model, head_task(model, records))
    assert model.features.bytes_in_memory == 15 * WIDTH * 4
    assert "computed each time" in caplog.text
    del one, records
    gc.collect()
    assert model.features.bytes_in_memory == 0


def test_an_evaluation_gives_what_the_whole_model_gives(model, make_records, passes):
    records = make_records(100)
    for shift in (0.0, 0.1):
        lora.write_parameters(model.parameters, {n: t + shift for n, t in model.initial.items()})
        logits, batch = model.logits(records.items(), cached=False)
        expected = predictions(logits.detach(), batch)
        found = evaluate(model, records, keep_features=True)
        assert evaluate(model, records).loss == pytest.approx(found.loss, abs=1e-5)
        assert found.loss == pytest.approx(float(expected.losses.mean()), abs=1e-5)
        assert found.accuracy == pytest.approx(float(expected.hits.mean()), abs=1e-6)
        passes.clear()
        assert evaluate(model, records, keep_features=True) == found
        assert not passes


def test_it_works_when_nothing_but_the_head_is_trainable(encoder, make_records):
    model = TrainingModel(encoder(trains="head"), memory_limit=2**30, max_length=40)
    task = head_task(model, make_records(40), trains="all")
    update = local_update(model, task)
    assert model.features.bytes_in_memory == 40 * WIDTH * 4
    assert all(not torch.equal(update.adapter[name], task.adapter[name]) for name in update.adapter)
    llama = attach(tiny_causal("llama"), LoraSettings(task="CAUSAL_LM"))
    assert TrainingModel(llama, memory_limit=2**30).features is None, "a language model has no such head"

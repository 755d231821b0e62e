"""Kept states and features: the same numbers as without, computed once, and no bit depends on other records."""

import dataclasses
import errno
import gc
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

from fedpriv.learning.adapters import LoraSettings, attach, lora
from fedpriv.learning.adapters._arithmetic import Product, factors_of
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import stacked
from fedpriv.learning.training._caches import find_prefix
from fedpriv.learning.training._passes import predictions
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from fedpriv.learning.training.stacked import local_update, stacked_updates
from tests.learning.training.test_isolation import with_tokens
from tests.learning.training.test_rehearsal import rehearse
from tests.learning.training.test_sensitivity import SPEC, make_task
from tests.marks import slow
from tests.tiny import tiny_causal

# The tiny BERT's states have 64 values.
WIDTH = 64
BYTES_OF_A_TOKEN = 4 * WIDTH
ROOM = 12 * 40 * BYTES_OF_A_TOKEN  # of twelve records, each as long as may be


@pytest.fixture
def build(encoder):
    """A model whose last layer alone is trained."""
    return partial(TrainingModel, encoder(layers="last-1"), max_length=40)


@pytest.fixture
def model(build):
    return build(memory_limit=2**30)


def assert_same(model, records):
    items = records.items([3, 0, 11, 7])
    plain, cached = (
        per_sample_gradients(model.layers, lambda flag=flag: model.predictions(items, cached=flag).losses)[0]
        for flag in (False, True)
    )
    for name in plain:
        torch.testing.assert_close(cached[name], plain[name], atol=1e-5, rtol=1e-4, msg=name)


def states_of(model, records, first=0):
    return [model.cache.hidden(records.items([index]), (1, 40)) for index in range(first, len(records))]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("layers", ["last-1", "1"])
def test_causal_gradients_are_the_same_with_the_cache(causal, make_records, kind, layers):
    model = TrainingModel(causal(kind, layers=layers), memory_limit=2**22)
    assert model.cache is not None
    assert_same(model, make_records(12, classes=0))


@pytest.mark.parametrize("reserved", [False, True])
def test_sets_that_are_kept_together_share_passes_and_keep_their_own_states(model, make_records, monkeypatch, reserved):
    sets, passes, told, real = [make_records(size, seed=size) for size in (7, 1, 5)], [], [], model.passes
    monkeypatch.setattr(model, "passes", lambda items: passes.append(len(items)) or real(items))
    monkeypatch.setattr(model, "tell", lambda what, done, total: told.append((what, done, total)))
    if reserved:  # room for one set at a time
        assert model.cache.reserve(7, 64)
    model.cache.fill([records.items([0])[0] for records in sets])
    assert passes == ([7, 1, 5] if reserved else [13])
    assert told[-1] == ("reading records", passes[-1], passes[-1])
    for item in [item for records in sets for item in records.items()]:
        (own,) = model.cache._computed([item])
        torch.testing.assert_close(model.cache.hidden([item], (1, len(own)))[0], own, msg=str(len(own)))
    assert passes == ([7, 1, 5, 7, 1, 5] if reserved else [13]), "others are read again where they had no room"


def test_sets_that_are_kept_together_share_the_memory_limit_and_fail_together(build, make_records, monkeypatch):
    sets = [make_records(12, seed=seed) for seed in range(3)]
    sizes = [BYTES_OF_A_TOKEN * sum(map(len, records.features["input_ids"])) for records in sets]
    model = build(memory_limit=sizes[0] + sizes[1])
    first = [records.items([0])[0] for records in sets]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.cache.fill(first)
    assert model.cache.bytes_in_memory == 0, "nothing is kept that was not computed to the end"
    model.cache.fill(first)
    assert model.cache.bytes_in_memory == sizes[0] + sizes[1]
    assert_same(model, sets[2])


def test_a_cached_pass_does_not_run_the_prefix_and_states_are_freed_with_their_records(model, make_records):
    records = make_records(12)
    model.logits(records.items([0, 1]), cached=True)
    assert model.cache.bytes_in_memory == BYTES_OF_A_TOKEN * sum(map(len, records.features["input_ids"]))
    first_layer = model.cache.prefix.layers[0]
    calls = []
    first_layer.register_forward_hook(lambda *_: calls.append(1))
    model.logits(records.items([0, 1]), cached=True)
    assert not calls
    model.logits(records.items([0, 1]), cached=False)
    assert calls
    del records
    gc.collect()
    assert model.cache.bytes_in_memory == 0


def mapped_files(folder):
    """The files in a folder that this process has mapped into its memory, with or without a name."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_beyond_the_memory_limit_a_nameless_file_holds_the_same_states(build, make_records, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    records = make_records(12)
    model = build(memory_limit=1)
    assert_same(model, records)
    assert model.cache.bytes_in_memory == 0
    (line,) = mapped_files(tmp_path)
    assert line.endswith("(deleted)")
    assert not list(tmp_path.iterdir()), "others could open the states, and a killed process would leave them"
    del records
    gc.collect()
    assert not mapped_files(tmp_path)


def test_reserved_room_depends_on_public_numbers_alone_and_serves_one_set_after_the_other(build, make_records):
    sets = [make_records(1, longest=2), make_records(12), make_records(12, seed=1), make_records(12)]
    expected = [states_of(build(memory_limit=2**30), records) for records in sets]
    model = build(memory_limit=2**30)
    for records, states in zip(sets, expected, strict=True):
        model.reserve_cache(12)  # after the first set the room is there already
        assert all(map(torch.equal, states_of(model, records), states))
        assert model.cache.bytes_in_memory == ROOM
    assert not torch.equal(expected[1][0], expected[2][0])
    del records, sets
    gc.collect()
    assert model.cache.bytes_in_memory == ROOM


@pytest.mark.parametrize(("limit", "in_memory"), [(ROOM, True), (ROOM - 1, False)])
def test_room_beyond_the_limit_is_a_file_of_all_its_blocks(
    build, make_records, tmp_path, monkeypatch, limit, in_memory
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = build(memory_limit=limit)
    blocks, allocate = [], os.posix_fallocate

    def watched(file, offset, size):
        allocate(file, offset, size)
        blocks.append(512 * os.fstat(file).st_blocks)

    monkeypatch.setattr(os, "posix_fallocate", watched)
    model.reserve_cache(12)
    assert bool(mapped_files(tmp_path)) != in_memory
    assert len(blocks) == (not in_memory)
    assert all(size >= ROOM for size in blocks)
    assert_same(model, make_records(12))


def test_without_room_there_is_no_cache_and_records_train_all_the_same(build, make_records, caplog, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert_same(build(memory_limit=1), make_records(12))  # public records, for which nothing is reserved
    model = build(memory_limit=1)
    model.reserve_cache(12)
    assert model.cache is None
    assert "no room" in caplog.text
    assert_same(model, make_records(12))


def test_states_are_the_same_to_the_bit_with_and_without_room_and_beside_a_record_that_is_too_long(build, make_records):
    model = build(memory_limit=2**30, alone=True)
    records = make_records(12, longest=40)
    expected = states_of(model, records)
    model.reserve_cache(5)
    calls = []
    model.cache.prefix.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert all(map(torch.equal, states_of(model, records), expected))
    calls.clear()
    states_of(model, records)
    assert len(calls) == 7, "those beyond the registered number are computed each time, the others are not"
    tokens = records.features["input_ids"]
    one_long = Records({"input_ids": (torch.full((60,), 5), *tokens[1:])}, records.labels, 0)
    assert all(map(torch.equal, states_of(model, one_long, first=1), expected[1:]))


def test_there_is_no_prefix_if_the_first_layer_is_trained(encoder):
    assert find_prefix(encoder(layers="all")) is None
    assert TrainingModel(encoder(layers="0"), memory_limit=2**30).cache is None


def test_a_records_states_do_not_depend_on_its_batch(model, make_records):
    records = make_records(12)
    alone = model.cache.hidden(records.items([5]), (1, 16))[0]
    together = model.cache.hidden(records.items([5, 0, 1, 2]), (4, 16))[0]
    assert torch.equal(alone, together)


# ---------------------------------------------------------------- features of a head

HEAD = dataclasses.replace(SPEC, trains="head", local_steps=1, sampling_probability=1.0)


@pytest.fixture
def node(build):
    """A model whose records each have a pass of their own."""
    return build(memory_limit=2**22, alone=True)


head_task = partial(make_task, spec=HEAD)


def rows_of(node, records, drawn, **changes):
    """The clipped sum of each drawn record by itself, and that of all of them, [records + 1, values]."""
    clients = stacked._Clients.of(node, [head_task(node, records, **changes)])
    sets = [[[index]] for index in drawn] + [[[index] for index in drawn]]
    return torch.cat([stacked._sums(clients, clients.broadcast, [units], is_clipped=True) for units in sets])


@pytest.fixture
def passes(node):
    """How many passes went through the model's last layer."""
    count = []
    node.peft_model.base_model.model.bert.encoder.layer[1].register_forward_hook(lambda *_: count.append(1))
    return count


@pytest.mark.parametrize("centred", [True, *slow(False)], ids=["centred", ""])
@pytest.mark.parametrize("room", ["kept", "reserved for some", "none"])
def test_neither_the_cache_nor_other_records_change_a_bit(build, make_records, room, centred):
    num = 10
    records, chosen = make_records(num, longest=40), list(range(0, num, 2))
    node = build(memory_limit=2**22, alone=True)
    expected = rows_of(node, records, chosen, centred=centred)
    assert (expected.norm(dim=1) > 0).all()
    node = build(memory_limit=2**22, alone=True)
    if room != "kept":
        node.features._memory_limit = {"reserved for some": 2**30, "none": 0}[room]
        node.features.reserve(6)
    for drawn in (chosen[1:], chosen[:1], chosen[::-1], list(range(num))):
        *found, total = rows_of(node, records, drawn, centred=centred)
        for index in set(drawn) & set(chosen):
            assert torch.equal(found[drawn.index(index)], expected[chosen.index(index)])
        assert torch.equal(total, torch.stack(found).sum(dim=0)), "a record counts in a sum as by itself"
    others = make_records(num, longest=40, seed=7)
    tokens = [(records if i < 5 else others).features["input_ids"][i] for i in range(num)]
    found = rows_of(node, Records({"input_ids": tuple(tokens)}, records.labels, 0), chosen, centred=centred)
    assert torch.equal(found[:3], expected[:3])


def test_features_are_computed_once_until_a_b_or_the_merged_base_change(node, build, make_records, passes):
    task = head_task(node, make_records(40))
    local_update(node, task)
    assert passes
    passes.clear()
    head = {n: t + 1 for n, t in task.adapter.items() if "lora" not in n}
    merged = {name: Product(0.1 * b, a) for name, (b, a) in factors_of(node.initial).items()}
    moved = {n: t if "lora" not in n else t + 0.1 for n, t in task.adapter.items()}
    for change, computed in (
        ({"adapter": {**task.adapter, **head}}, False),
        ({"adapter": moved}, True),
        ({"merged": merged}, True),
    ):
        changed = dataclasses.replace(task, **change)
        found = local_update(node, changed).adapter
        assert bool(passes) == computed
        if "merged" not in change:
            expected = local_update(build(memory_limit=2**30, alone=True), changed).adapter
            assert all(torch.equal(found[name], expected[name]) for name in found)
        passes.clear()


def test_clients_with_different_bodies_each_have_their_own(node, build, make_records):
    sets = [make_records(12, seed=seed) for seed in range(3)]
    tasks = [head_task(node, records) for records in sets]
    tasks[1] = dataclasses.replace(tasks[1], adapter={n: t + 0.1 for n, t in tasks[1].adapter.items()})
    together = stacked_updates(node, tasks)
    for task, update in zip(tasks, together, strict=True):
        alone = local_update(build(memory_limit=2**30), task)
        for name in update.adapter:
            torch.testing.assert_close(update.adapter[name], alone.adapter[name], atol=1e-6, rtol=1e-5)


def test_a_record_that_is_unusable_or_fails_counts_as_zero_and_no_other(node, make_records):
    records = make_records(8)
    *expected, total = rows_of(node, records, [i for i in range(8) if i != 3])
    unusable = dataclasses.replace(records, unusable=torch.arange(8) == 3)
    for broken in (unusable, with_tokens(records, 3, [10**6])):
        *found, whole = rows_of(node, broken, list(range(8)))
        assert not found[3].any()
        assert all(map(torch.equal, [*found[:3], *found[4:]], expected))
        assert torch.equal(whole, total)


def test_room_is_reserved_by_the_registered_number_alone(node, make_records):
    rehearse(node, spec=HEAD, num_registered=17)
    assert node.features.bytes_in_memory == 17 * WIDTH * 4
    for num in (3, 30):
        local_update(node, head_task(node, make_records(num), num_registered=30))
        assert node.features.bytes_in_memory == 17 * WIDTH * 4


@pytest.mark.parametrize("trains", ["head", "all"])
def test_a_rehearsal_leaves_what_is_kept_of_records(node, make_records, passes, trains):
    spec = dataclasses.replace(HEAD, trains=trains, num_rounds=1000)
    task = head_task(node, make_records(40), trains=trains, num_rounds=1000)
    rehearse(node, adapter=task.adapter, spec=spec)
    local_update(node, task)
    prefix = node.cache.prefix.layers[0].register_forward_hook(lambda *_: passes.append(0))
    rehearse(node, adapter=task.adapter, spec=dataclasses.replace(spec, clipping="per-tensor"))
    passes.clear()
    local_update(node, task)
    prefix.remove()
    assert 0 not in passes, "the states below the first trained layer were computed again"
    assert not (passes and trains == "head"), "the features were computed again"


def test_features_are_freed_with_their_records_and_stay_within_the_limit(build, make_records, caplog):
    node = build(memory_limit=20 * WIDTH * 4)
    one, other = make_records(15), make_records(15, seed=1)
    for records in (one, other):
        local_update(node, head_task(node, records))
    assert node.features.bytes_in_memory == 15 * WIDTH * 4
    assert "computed each time" in caplog.text
    del one, records
    gc.collect()
    assert node.features.bytes_in_memory == 0


def test_an_evaluation_gives_what_the_whole_model_gives(node, make_records, passes):
    records = make_records(40)
    for shift in (0.0, 0.1):
        lora.write_parameters(node.parameters, {n: t + shift for n, t in node.initial.items()})
        logits, batch = node.logits(records.items(), cached=False)
        expected = predictions(logits.detach(), batch)
        found = evaluate(node, records, keep_features=True)
        assert evaluate(node, records).loss == pytest.approx(found.loss, abs=1e-5)
        assert found.loss == pytest.approx(float(expected.losses.mean()), abs=1e-5)
        assert found.accuracy == pytest.approx(float(expected.hits.mean()), abs=1e-6)
        passes.clear()
        assert evaluate(node, records, keep_features=True) == found
        assert not passes


def test_it_works_when_nothing_but_the_head_is_trainable(encoder, make_records):
    node = TrainingModel(encoder(trains="head"), memory_limit=2**30, max_length=40)
    task = head_task(node, make_records(40), trains="all")
    update = local_update(node, task)
    assert node.features.bytes_in_memory == 40 * WIDTH * 4
    assert all(not torch.equal(update.adapter[name], task.adapter[name]) for name in update.adapter)
    llama = attach(tiny_causal("llama"), LoraSettings(task="CAUSAL_LM"))
    assert TrainingModel(llama, memory_limit=2**30).features is None, "a language node has no such head"

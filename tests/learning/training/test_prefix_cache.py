"""The frozen-prefix cache gives the same numbers as the whole model, from memory and from a file."""

import errno
import gc
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

from fedpriv.learning.data.records import Records
from fedpriv.learning.training._caches import find_prefix
from fedpriv.learning.training._passes import predictions
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients


@pytest.fixture
def build(encoder):
    """A model whose last layer alone is trained."""
    return partial(TrainingModel, encoder(layers="last-1"))


@pytest.fixture
def model(build):
    return build(memory_limit=2**30)


def gradients(model, records, indices, *, cached):
    def losses():
        logits, batch = model.logits(records.items(indices), cached=cached)
        return predictions(logits, batch).losses

    return per_sample_gradients(model.layers, losses)[0]


def assert_same(model, records):
    indices = [3, 0, 11, 7]
    plain, cached = (gradients(model, records, indices, cached=flag) for flag in (False, True))
    for name in plain:
        torch.testing.assert_close(cached[name], plain[name], atol=1e-5, rtol=1e-4, msg=name)


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
    sizes = [4 * 64 * sum(map(len, records.features["input_ids"])) for records in sets]
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


def test_a_cached_pass_does_not_run_the_prefix(model, make_records):
    records = make_records(12)
    model.logits(records.items([0, 1]), cached=True)
    first_layer = model.cache.prefix.layers[0]
    calls = []
    first_layer.register_forward_hook(lambda *_: calls.append(1))
    model.logits(records.items([0, 1]), cached=True)
    assert not calls
    model.logits(records.items([0, 1]), cached=False)
    assert calls


def mapped_files(folder, process="self"):
    """The files in a folder that a process has mapped into its memory, with or without a name."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


def test_beyond_the_memory_limit_states_go_to_a_nameless_file_and_gradients_stay_the_same(
    build, make_records, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    records = make_records(12)
    model = build(memory_limit=1)
    assert_same(model, records)
    assert model.cache.bytes_in_memory == 0
    (line,) = mapped_files(tmp_path)
    assert line.endswith("(deleted)")
    assert not list(tmp_path.iterdir()), "other processes could open the states"
    del records
    gc.collect()
    assert not mapped_files(tmp_path)


# The tiny BERT's states have 64 values.
BYTES_OF_A_TOKEN = 4 * 64


@pytest.mark.parametrize(("num", "longest"), [(1, 2), (12, 12)])
def test_reserved_room_depends_on_public_numbers_alone(build, make_records, num, longest):
    model = build(memory_limit=2**30, max_length=40)
    model.reserve_cache(12)
    records = make_records(num, longest=longest)
    model.logits(records.items([0]), cached=True)
    assert model.cache.bytes_in_memory == 12 * 40 * BYTES_OF_A_TOKEN
    del records
    gc.collect()
    assert model.cache.bytes_in_memory == 12 * 40 * BYTES_OF_A_TOKEN


@pytest.mark.parametrize(
    ("limit", "in_memory"), [(12 * 40 * BYTES_OF_A_TOKEN, True), (12 * 40 * BYTES_OF_A_TOKEN - 1, False)]
)
def test_reserved_room_beyond_the_memory_limit_is_a_file_with_all_of_its_blocks(
    build, make_records, tmp_path, monkeypatch, limit, in_memory
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = build(memory_limit=limit, max_length=40)
    blocks, allocate = [], os.posix_fallocate

    def watched(file, offset, size):
        allocate(file, offset, size)
        blocks.append(512 * os.fstat(file).st_blocks)

    monkeypatch.setattr(os, "posix_fallocate", watched)
    model.reserve_cache(12)
    assert bool(mapped_files(tmp_path)) != in_memory
    assert len(blocks) == (not in_memory)
    assert all(size >= 12 * 40 * BYTES_OF_A_TOKEN for size in blocks)
    assert_same(model, make_records(12))


def test_without_room_there_is_no_cache_and_records_train_all_the_same(build, make_records, caplog, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert_same(build(memory_limit=1), make_records(12))  # public records, for which nothing is reserved
    model = build(memory_limit=1, max_length=40)
    model.reserve_cache(12)
    assert model.cache is None
    assert "no room" in caplog.text
    assert_same(model, make_records(12))


def states_of(model, records, first=0):
    return [model.cache.hidden(records.items([index]), (1, 40)) for index in range(first, len(records))]


def test_states_are_the_same_to_the_bit_with_and_without_room_and_beside_a_record_that_is_too_long(build, make_records):
    model = build(memory_limit=2**30, max_length=40, alone=True)
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


def test_reserved_room_serves_one_set_of_records_after_the_other(build, make_records):
    model = build(memory_limit=2**30, max_length=16)
    sets = [make_records(3, seed=seed) for seed in (0, 1, 0)]
    expected = [states_of(model, records) for records in sets]
    model.reserve_cache(3)
    for records, states in zip(sets, expected, strict=True):
        model.reserve_cache(3)  # the room is there already
        assert all(map(torch.equal, states_of(model, records), states))
    assert not torch.equal(expected[0][0], expected[1][0])
    assert model.cache.bytes_in_memory == 3 * 16 * BYTES_OF_A_TOKEN


# Caches states in a file of the folder that it is given, says so, and waits.
HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[2]
from fedpriv.learning.adapters import LoraSettings, attach, load_base
from fedpriv.learning.training.model import TrainingModel
from tests.tiny import random_records
base = load_base(sys.argv[1], task="SEQ_CLS", num_labels=3)
model = TrainingModel(attach(base, LoraSettings(rank=4, layers="last-1")), memory_limit=1)
records = random_records(12)
model.logits(records.items([0]), cached=True)
print("cached", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_process_leaves_no_states_behind(tiny_bert, tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tiny_bert), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        assert "cached\n" in lines
        assert mapped_files(tmp_path, process.pid), "nothing was cached, so the test would prove nothing"
        process.kill()
    assert not list(tmp_path.iterdir())


def test_cached_states_are_freed_with_their_records(model, make_records):
    records = make_records(12)
    model.logits(records.items([0]), cached=True)
    tokens = sum(len(row) for row in records.features["input_ids"])
    assert model.cache.bytes_in_memory == 4 * tokens * 64
    del records
    gc.collect()
    assert model.cache.bytes_in_memory == 0


def test_there_is_no_prefix_if_the_first_layer_is_trained(encoder):
    assert find_prefix(encoder(layers="all")) is None
    assert TrainingModel(encoder(layers="0"), memory_limit=2**30).cache is None


def test_a_records_states_do_not_depend_on_its_batch(model, make_records):
    records = make_records(12)
    alone = model.cache.hidden(records.items([5]), (1, 16))[0]
    together = model.cache.hidden(records.items([5, 0, 1, 2]), (4, 16))[0]
    assert torch.equal(alone, together)

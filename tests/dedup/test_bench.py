"""The benchmark of serving loads what it says, within the memory that it says, and tells when cold is not cold."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

from fedpriv.dedup import bench as measuring
from fedpriv.dedup.bench import bench, restore_all
from fedpriv.dedup.bench_page_cache import drop, num_cached_pages, release_mapped_pages
from fedpriv.dedup.bench_plain_files import PlainFiles
from fedpriv.dedup.blocks import layout_of
from fedpriv.dedup.serving import Registry
from fedpriv.dedup.store import Store
from fedpriv.errors import InputError, StoreError

SIZE = 64
NUM_VARIANTS = 6
NUM_QUERIES = 40


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)).eval()


def variant(number: int) -> dict[str, np.ndarray]:
    """One network with rows and a bias of its own."""
    tensors = {name: tensor.numpy().copy() for name, tensor in network(0).state_dict().items()}
    tensors["0.weight"][2 * number : 2 * number + 3] = number
    tensors["2.bias"][:] = number
    return tensors


@pytest.fixture
def store(tmp_path) -> Path:
    with Store(tmp_path / "store") as opened:
        for number in range(NUM_VARIANTS):
            layout = layout_of(variant(number), SIZE)
            opened.add(f"v{number}", layout, *layout.to_blocks(variant(number)))
    return tmp_path / "store"


@pytest.fixture
def files(store, tmp_path) -> dict[str, Path]:
    (tmp_path / "files").mkdir()
    return restore_all(store, tmp_path / "files")


def size_of(number: int = 0) -> int:
    return sum(values.nbytes for values in variant(number).values())


def lru_misses(queries: list[str], capacity: int) -> int:
    held: OrderedDict[str, None] = OrderedDict()
    misses = 0
    for name in queries:
        if name not in held:
            misses += 1
            if len(held) == capacity:
                held.popitem(last=False)
        held[name] = None
        held.move_to_end(name)
    return misses


def queries(seed: int = 0) -> list[str]:
    return [f"v{number}" for number in np.random.default_rng(seed).integers(NUM_VARIANTS, size=NUM_QUERIES)]


class Counting:
    """A workload that notes for which variant it was called: its bias is the variant's number."""

    def __init__(self) -> None:
        self.model = network(1)
        self.seen: list[str] = []

    def infer(self) -> None:
        self.seen.append(f"v{int(self.model[2].bias[0])}")


def test_restored_files_are_the_variants(files):
    for number in range(NUM_VARIANTS):
        found = safetensors.numpy.load_file(files[f"v{number}"])
        assert all(np.array_equal(found[name], values) for name, values in variant(number).items())


@pytest.mark.parametrize("capacity", [1, 2, 3, NUM_VARIANTS])
def test_misses_of_both_arms_are_those_of_a_least_recently_used_cache(store, files, capacity):
    with Store(store, read_only=True) as opened:
        memory = capacity * opened.manifest("v0").layout.padded_bytes
        stored = opened.bytes_stored
    found = bench(store, files, num_queries=NUM_QUERIES, memory_bytes=memory, seed=3)
    twice = queries(3) * 2
    second_round = lru_misses(twice, capacity) - lru_misses(queries(3), capacity)
    assert found.warm.plain.misses == found.warm.store.misses == second_round
    assert found.warm.plain.bytes_read == second_round * size_of()
    assert found.cold.plain.misses == lru_misses(queries(3), capacity)
    left = (memory - stored) // (memory // capacity)
    assert found.cold.store.misses == lru_misses(queries(3), left if left >= 1 else capacity)
    assert 0 < found.warm.store.bytes_read < found.warm.plain.bytes_read or capacity == NUM_VARIANTS
    assert found.warm.plain.infer_seconds is None
    assert found.warm.total_ratio is None
    assert found.warm.load_ratio == found.warm.plain.load_seconds / found.warm.store.load_seconds


def test_memory_is_a_third_of_the_variants_by_default(store, files):
    with Store(store, read_only=True) as opened:
        one = opened.manifest("v0").layout.padded_bytes
    assert bench(store, files, num_queries=2, cold=False).memory_bytes == NUM_VARIANTS * one // 3


@pytest.mark.parametrize(("cold", "num_rounds"), [(True, 4), (False, 2)])
def test_workload_runs_once_for_each_timed_query_with_the_weights_asked_for(store, files, cold, num_rounds):
    workload = Counting()
    found = bench(store, files, num_queries=NUM_QUERIES, cold=cold, workload=workload)
    assert workload.seen == queries() * num_rounds
    assert (found.cold is None) is not cold
    assert found.warm.plain.infer_seconds > 0
    assert found.warm.store.infer_seconds > 0
    assert found.warm.total_ratio > 0


@pytest.mark.parametrize("reader", ["direct", "safetensors"])
@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_plain_files_keep_to_their_memory_and_give_the_bits_of_the_file(files, capacity, reader):
    loaded = PlainFiles(files, capacity * size_of() + 5, reader)
    for name in queries():
        tensors = loaded.get(name)
        expected = variant(int(name[1:]))
        assert tensors.keys() == expected.keys()
        assert all(np.array_equal(tensors[key].numpy(), values) for key, values in expected.items())
        assert loaded.used_bytes == capacity * size_of()
        assert len(loaded.names) <= capacity
        assert loaded.names[-1] == name
    assert loaded.misses == lru_misses(queries(), capacity)


def test_plain_files_of_two_architectures_and_all_types_share_one_memory(files, tmp_path):
    rng = np.random.default_rng(0)
    kinds = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "f2", "f4", "f8")
    other = {kind: rng.integers(0, 2, size=(3, 1)).astype(kind) for kind in kinds}
    other |= {"none": np.empty((0, 4), "f4"), "one": np.array(7, "i8")}
    safetensors.numpy.save_file(other, tmp_path / "other", metadata={"made": "elsewhere"})
    loaded = PlainFiles({**files, "other": tmp_path / "other"}, size_of() + 10)
    for name in ("v1", "other", "v2", "other"):
        tensors = loaded.get(name)
        assert loaded.used_bytes <= size_of() + 10
        expected = other if name == "other" else variant(int(name[1:]))
        for key, values in expected.items():
            assert tensors[key].numpy().dtype == values.dtype
            assert np.array_equal(tensors[key].numpy(), values)


def test_files_of_metadata_of_their_own_reuse_memory(tmp_path):
    paths = {name: tmp_path / name for name in ("one", "another")}
    for number, (name, path) in enumerate(paths.items()):
        safetensors.numpy.save_file(variant(number), path, metadata={"name": name})
    loaded = PlainFiles(paths, size_of())
    before = loaded.get("one")["0.weight"].data_ptr()
    assert loaded.get("another")["0.weight"].data_ptr() == before
    assert np.array_equal(loaded.get("another")["0.weight"].numpy(), variant(1)["0.weight"])


def test_originals_may_differ_in_values_from_what_was_stored(store, files):
    tensors = variant(2)
    tensors["0.weight"][40] += 1
    safetensors.numpy.save_file(tensors, files["v2"])
    assert bench(store, files, num_queries=NUM_QUERIES).cold is not None


@pytest.mark.parametrize("broken", [Registry, PlainFiles])
def test_a_load_of_anything_else_is_refused(store, files, monkeypatch, broken):
    right = broken.get
    monkeypatch.setattr(broken, "get", lambda self, name: right(self, "v0" if name == "v3" else name))
    with pytest.raises(StoreError, match="variant 'v3': was not loaded bit for bit"):
        bench(store, files, num_queries=NUM_QUERIES, cold=False)


def test_page_cache_is_dropped_and_seen_to_be(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10**6))
    if not drop([path]):
        pytest.skip("this system keeps the file in its page cache")
    assert num_cached_pages(path) == 0
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    assert num_cached_pages(path) > 0
    assert not drop([path])
    release_mapped_pages(mapped[10:20])
    assert drop([path])
    assert mapped.sum() == 0


@pytest.mark.parametrize("memory_in_models", [1, 5])
def test_cold_is_cold_whether_or_not_the_blocks_fit_beside_a_model(store, files, monkeypatch, memory_in_models):
    if not drop(files.values()):
        pytest.skip("this system keeps files in its page cache")
    with Store(store, read_only=True) as opened:
        memory = memory_in_models * opened.manifest("v0").layout.padded_bytes
        assert (opened.bytes_stored + memory / memory_in_models <= memory) == (memory_in_models == 5)
    calls: list[int] = []
    monkeypatch.setattr(measuring, "drop", lambda paths: calls.append(1) or drop(paths))
    assert bench(store, files, num_queries=NUM_QUERIES, memory_bytes=memory).page_cache_dropped is True
    assert len(calls) == NUM_QUERIES + 1 + (NUM_QUERIES if memory_in_models == 1 else 0)
    assert bench(store, files, num_queries=2, cold=False).page_cache_dropped is None


def test_system_that_cannot_drop_is_told_of(store, files, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert bench(store, files, num_queries=2).page_cache_dropped is False


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda files: files.pop("v4"), {}, "files: none for variant 'v4'; give one for each of the store's 6"),
        (lambda files: files["v4"].unlink(), {}, "v4.safetensors: cannot be read"),
        (lambda files: cut(files["v4"]), {}, "v4.safetensors: cannot be read"),
        (
            lambda files: safetensors.numpy.save_file({"0.bias": np.ones(64, "f4")}, files["v4"]),
            {},
            "variant 'v4' has another architecture than the stored one: tensor '0.weight'",
        ),
        (
            lambda files: safetensors.torch.save_file({"w": torch.ones(2, dtype=torch.bfloat16)}, files["v4"]),
            {},
            "values of type 'BF16'",
        ),
        (lambda _: None, {"num_queries": 0}, "num_queries = 0: must be >= 1"),
        (lambda _: None, {"memory_bytes": 1000}, "memory_bytes = 1000: file 'v0' alone needs"),
    ],
)
def test_what_cannot_be_measured_is_one_line(store, files, change, options, said):
    change(files)
    with pytest.raises(InputError, match=said) as caught:
        bench(store, files, **{"num_queries": 2, **options})
    assert "\n" not in str(caught.value)


def test_model_of_another_architecture_is_refused(store, files):
    workload = Counting()
    workload.model = nn.Linear(64, 64)
    with pytest.raises(InputError, match=r"model: another architecture: tensor '0\.bias'"):
        bench(store, files, workload=workload)


def test_empty_store_is_refused(tmp_path):
    with Store(tmp_path / "empty"):
        pass
    with pytest.raises(InputError, match="holds no variants"):
        bench(tmp_path / "empty", {})

"""Serving is measured on what it says, within the memory that it says, and tells when cold is not cold."""

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

from fedpriv.errors import InputError, StoreError
from fedpriv.models.variants.store import Store
from simulations.benchmarks import _bounded_memory
from simulations.benchmarks import dedup_loading as measuring
from simulations.benchmarks._bounded_memory import clock, drop, num_cached_pages, read_speed, slowed, temporary_group
from simulations.benchmarks._dedup_process import StoreArm, check_loads, digest, give_up, plain_arm
from simulations.benchmarks._plain_files import MappedFiles, PlainFiles
from simulations.benchmarks._store_registry import StoreRegistry, targets_in
from simulations.benchmarks.dedup_loading import ARMS, LoadingReport, bench, restore_all
from tests.simulations.test_store_registry import add
from tests.simulations.workloads import LARGE, Greedy, Reading, Workload, network

NUM_VARIANTS = 6
NUM_QUERIES = 40


def variant(number: int) -> dict[str, np.ndarray]:
    """One network with rows and a bias of its own."""
    tensors = {name: tensor.numpy().copy() for name, tensor in network(0).state_dict().items()}
    tensors["0.weight"][2 * number : 2 * number + 3] = number
    tensors["2.bias"][:] = number
    return tensors


@contextmanager
def on_a_disk() -> Iterator[Path]:
    """A folder on a disk: what lies in memory is never cold."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with on_a_disk() as folder:
        yield folder


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A folder with a store and the files of its variants."""
    with on_a_disk() as folder:
        with Store(folder / "store") as opened:
            for number in range(NUM_VARIANTS):
                add(opened, f"v{number}", variant(number))
        (folder / "files").mkdir()
        restore_all(folder / "store", folder / "files")
        yield folder


@pytest.fixture
def store(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


@pytest.fixture
def files(made, tmp_path) -> dict[str, Path]:
    return files_in(shutil.copytree(made / "files", tmp_path / "files"))


def files_in(folder: Path) -> dict[str, Path]:
    return {f"v{number}": folder / f"v{number}.safetensors" for number in range(NUM_VARIANTS)}


@pytest.fixture(scope="module")
def measured(made) -> LoadingReport:
    """What every arm takes, cold and warm, in a process of its own and with a workload."""
    files = files_in(made / "files")
    workloads = dict.fromkeys(files, Workload())
    return bench(made / "store", files, num_queries=NUM_QUERIES, workloads=workloads)


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


def test_restored_files_are_the_variants(files):
    for number in range(NUM_VARIANTS):
        found = safetensors.numpy.load_file(files[f"v{number}"])
        assert all(np.array_equal(found[name], values) for name, values in variant(number).items())


def small(store: Path, files: dict[str, Path], **options: object) -> LoadingReport:
    """A measurement of few queries, warm only and of plain files and store, unless told otherwise."""
    return bench(store, files, **{"num_queries": 3, "cold": False, "arms": ("store", "straight"), **options})


def test_every_arm_serves_every_query_in_a_process_of_its_own(measured):
    assert measured.failures == {}
    assert measured.cold.keys() == measured.warm.keys() == measured.limit_bytes.keys() == set(ARMS)
    for arm in (*measured.cold.values(), *measured.warm.values()):
        assert arm.load_seconds > 0
        assert arm.infer_seconds > 0
    straight, store = measured.cold["straight"], measured.cold["store"]
    assert measured.load_ratios("cold")["mmap"] == measured.cold["mmap"].load_seconds / store.load_seconds
    assert straight.misses == lru_misses(queries(), NUM_VARIANTS // 3)
    assert straight.bytes_read == straight.misses * size_of()
    assert 0 < store.bytes_read < straight.bytes_read
    assert min(measured.limit_bytes.values()) > measured.memory_bytes


def test_cold_is_cold_and_the_disk_is_read_once(measured):
    if not measured.page_cache_dropped:
        pytest.skip("this system keeps files in its page cache")
    assert measured.cold["straight"].disk_bytes >= size_of()
    assert measured.warm["straight"].disk_bytes == 0 or measured.limited_by == "address space"
    assert measured.cold["store"].cached_bytes > 0


def test_memory_is_a_third_of_the_variants_by_default_and_originals_may_differ_from_what_was_stored(store, files):
    tensors = variant(2)
    tensors["0.weight"][40] += 1
    safetensors.numpy.save_file(tensors, files["v2"])
    with Store(store, read_only=True) as opened:
        one = opened.manifest("v0").layout.padded_bytes
    found = small(store, files, num_queries=NUM_QUERIES)
    assert found.failures == {}
    assert found.memory_bytes == NUM_VARIANTS * one // 3
    assert (found.cold, found.page_cache_dropped) == ({}, None)
    assert found.warm["store"].infer_seconds is None


@pytest.mark.slow
def test_variants_of_two_architectures_are_served_from_one_store(store, files, tmp_path):
    # Without workloads mapped files would read nothing, and are left out.
    assert set(small(store, files, arms=ARMS).warm) == {"store", "safetensors", "straight"}
    other = {"weight": np.arange(640, dtype="f4").reshape(64, 10).T.copy(), "bias": np.ones(10, "f4")}
    with Store(store) as opened:
        add(opened, "other", other)
    files = restore_all(store, tmp_path)
    workloads = dict.fromkeys(files, Workload()) | {"other": Workload(nn.Linear(64, 10))}
    found = bench(store, files, num_queries=NUM_QUERIES, workloads=workloads, seed=1)
    assert (found.failures, set(found.warm)) == ({}, set(ARMS))
    with pytest.raises(InputError, match="model: another architecture"):
        small(store, files, workloads=dict.fromkeys(files, Workload()))
    with pytest.raises(InputError, match="workloads: none for variant 'other'; give one for each of the store's 7"):
        small(store, files, workloads={f"v{number}": Workload() for number in range(NUM_VARIANTS)})


@pytest.mark.parametrize("arm", ["store", "safetensors", "straight"])
def test_models_of_two_architectures_hold_no_more_than_the_arm_may(store, tmp_path, arm):
    others = {f"o{number}": {"weight": np.full((97, 64), number, "f4")} for number in range(3)}
    with Store(store) as opened:
        for name, tensors in others.items():
            add(opened, name, tensors)
    files = restore_all(store, tmp_path)
    models = {name: nn.Linear(64, 97, bias=False) if name in others else network(1) for name in files}
    with Store(store, read_only=True) as opened:
        targets = {name: targets_in(model, opened.manifest(name).layout) for name, model in models.items()}
        memory = max(opened.manifest(name).layout.padded_bytes for name in files) + 1024
        loader = (
            StoreArm(opened, memory, models, targets)
            if arm == "store"
            else plain_arm(arm, files, memory, targets, maps_count=False)
        )
        give_up(target for own in targets.values() for target in own.values())
        for name in ("v1", "o0", "v2", "o1", "v1", "v3", "o2", "o0"):
            loaded = loader.load(name)
            expected = others.get(name) or variant(int(name[1:]))
            assert all(np.array_equal(loaded[key].detach().numpy(), values) for key, values in expected.items())
            storages = [target.untyped_storage() for own in targets.values() for target in own.values()]
            held = {storage.data_ptr(): storage.nbytes() for storage in storages}
            assert sum(size for size in held.values() if size > 8) <= memory


@pytest.mark.parametrize("in_group", [True, False])
def test_a_process_that_takes_more_than_its_limit_is_stopped_and_the_report_says_so(
    store, files, monkeypatch, in_group
):
    with temporary_group() as group:
        if in_group and group is None:
            pytest.skip("no control group can be made here")
    if not in_group:
        monkeypatch.setattr(measuring, "temporary_group", nullcontext)
    found = small(store, files, workloads=dict.fromkeys(files, Greedy()), arms=["straight"])
    (line,) = found.failures.values()
    assert ("was ended by the system" if in_group else "was refused memory") in line
    assert "\n" not in line
    assert found.warm == found.load_ratios("warm") == {}
    assert list(Path("/sys/fs/cgroup").rglob(f"fedpriv-bench-{os.getpid()}-*")) == []


@pytest.mark.slow
def test_the_limit_includes_what_the_system_caches_for_the_process(store, files, tmp_path):
    with temporary_group() as group:
        if group is None:
            pytest.skip("no control group can be made here")
    (tmp_path / "large").write_bytes(bytes(LARGE))
    assert drop([tmp_path / "large"])
    found = small(store, files, workloads=dict.fromkeys(files, Reading(tmp_path / "large")), arms=["straight"])
    assert found.failures == {}
    cached = num_cached_pages(tmp_path / "large") * mmap.PAGESIZE
    assert 0 < cached < found.limit_bytes["straight"] < LARGE


@pytest.mark.slow
def test_the_address_space_is_bounded_where_no_group_can_be_made(store, files, monkeypatch):
    monkeypatch.setattr(measuring, "temporary_group", nullcontext)
    found = bench(store, files, num_queries=3, workloads=dict.fromkeys(files, Workload()))
    assert (found.limited_by, found.failures) == ("address space", {})
    assert set(found.cold) == set(ARMS)


@pytest.mark.parametrize(
    ("mounts", "own", "said"),
    [
        ("cgroup {root} cgroup rw,memory 0 0", "4:memory:/a/b", ("a/b", 1)),
        ("cgroup {root} cgroup rw,memory 0 0", "4:memory:/of/another/namespace", (".", 1)),
        ("cgroup2 {root} cgroup2 rw 0 0", "0::/a/b", ("a", 2)),
        ("cgroup2 {root} cgroup2 rw 0 0", "0::/a", None),
        ("cgroup {root} cgroup rw,cpu 0 0", "4:cpu:/a/b", None),
    ],
)
def test_a_group_is_looked_for_below_that_of_the_process(tmp_path, mounts, own, said):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cgroup.subtree_control").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    (tmp_path / "mounts").write_text(mounts.format(root=tmp_path) + "\n")
    (tmp_path / "cgroup").write_text(own + "\n")
    found = [(parent, version) for parent, version in _bounded_memory._parents(tmp_path)]
    assert found == ([] if said is None else [(tmp_path / said[0], said[1])])


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


@pytest.mark.parametrize("memory_bytes", [None, 2 * 10**4])
def test_mapped_files_give_the_bits_of_the_file_within_their_memory(files, memory_bytes):
    mapped = MappedFiles(files, memory_bytes)
    for name in queries():
        expected = variant(int(name[1:]))
        assert all(np.array_equal(mapped.get(name)[key].numpy(), values) for key, values in expected.items())
    size = files["v0"].stat().st_size
    assert mapped.misses == lru_misses(queries(), NUM_VARIANTS if memory_bytes is None else memory_bytes // size)


@pytest.mark.parametrize("broken", [StoreRegistry, PlainFiles])
def test_a_load_of_anything_else_is_refused(store, files, monkeypatch, broken):
    right = broken.get
    monkeypatch.setattr(broken, "get", lambda self, name: right(self, "v0" if name == "v3" else name))
    expected = {name: digest(safetensors.numpy.load_file(path)) for name, path in files.items()}
    with Store(store, read_only=True) as opened:
        arm = {
            StoreRegistry: lambda: StoreArm(opened, 10**6, {}, {}),
            PlainFiles: lambda: plain_arm("straight", files, 10**6, {}, maps_count=False),
        }[broken]()
        check_loads(arm, ["v0", "v1", "v5"], expected)
        with pytest.raises(StoreError, match="variant 'v3': was not loaded bit for bit"):
            check_loads(arm, queries(), expected)


def test_a_wrong_load_in_another_process_is_the_users_error(store, files):
    path = next(store.glob("blocks.*.npy"))
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1

    class Damaging(dict):
        """Files whose last look-up, after the store was read, changes a block of it."""

        def __getitem__(self, name: str) -> Path:
            if name == f"v{NUM_VARIANTS - 1}":
                path.write_bytes(damaged)
            return super().__getitem__(name)

    with pytest.raises(StoreError, match="was not loaded bit for bit"):
        small(store, Damaging(files), num_queries=NUM_QUERIES, arms=["store"])


def test_page_cache_is_dropped_and_seen_to_be(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(10**6))
    if not drop([path]):
        pytest.skip("this system keeps the file in its page cache")
    assert num_cached_pages(path) == 0
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    assert num_cached_pages(path) > 0
    assert not drop([path])
    del mapped
    assert drop([path])
    assert read_speed(path) > 0
    assert num_cached_pages(path) > 0
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert drop([path]) is False


READ = """
import os, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
began = time.perf_counter()
with open(sys.argv[2], "rb", buffering=0) as file:
    while file.read(2**16):
        pass
print(time.perf_counter() - began)
"""


def test_a_disk_is_slowed_for_the_processes_of_a_group(tmp_path):
    path, rate = tmp_path / "file", 10e6
    path.write_bytes(os.urandom(5_000_000))
    try:
        with temporary_group() as made, slowed(made, tmp_path, rate) as group:
            if group is None or not drop([path]):
                pytest.skip("no control group can be made here, or the file stays cached")
            words = [sys.executable, "-c", READ, group.slow, path]
            seconds = float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    except InputError as error:
        pytest.skip(str(error))
    assert 5e6 / seconds < 1.5 * rate, "the system lets a little through at first"
    assert not group.slow.exists()


def test_a_disk_that_no_group_slows_is_one_line():
    with pytest.raises(InputError, match="takes a control group, and none"), slowed(None, Path("/proc"), 90e6):
        pass
    told = pytest.raises(InputError, match=r"disk = 90 MB/s: no control group slows /proc")
    with told, slowed(_bounded_memory.Group(Path("/none"), 1), Path("/proc"), 90e6):
        pass


def test_time_in_which_others_have_the_processor_is_not_counted():
    began, own, cpu = time.perf_counter(), clock(), time.thread_time()
    while time.thread_time() - cpu < 0.2:
        pass
    taken = clock() - own
    assert 0.19 < taken <= time.perf_counter() - began


def unpicklable() -> Workload:
    workload = Workload()
    workload.opened = lambda: None
    return workload


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda files: files.pop("v4"), {}, "files: none for variant 'v4'; give one for each of the store's 6"),
        (lambda files: files["v4"].unlink(), {}, "v4.safetensors: cannot be read"),
        (lambda files: files["v4"].write_bytes(files["v4"].read_bytes()[:-4]), {}, "v4.safetensors: cannot be read"),
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
        (lambda _: None, {"memory_bytes": 1000}, "memory_bytes = 1000: variant 'v0' alone needs"),
        (lambda _: None, {"arms": ["pickle"]}, "arm = 'pickle': must be one of store, safetensors, straight, mmap"),
        (lambda _: None, {"workload": unpicklable()}, "workloads: cannot be pickled for a process of their own"),
        (lambda _: None, {"workload": Workload(nn.Linear(64, 64))}, r"another architecture: tensor '0\.bias'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(store, files, change, options, said):
    change(files)
    if "workload" in options:
        options = {"workloads": dict.fromkeys(files, options["workload"])}
    with pytest.raises(InputError, match=said) as caught:
        bench(store, files, **{"num_queries": 2, **options})
    assert "\n" not in str(caught.value)


def test_empty_store_is_refused(tmp_path):
    Store(tmp_path / "empty").close()
    with pytest.raises(InputError, match="holds no variants"):
        bench(tmp_path / "empty", {})

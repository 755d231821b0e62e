"""One arm of `simulations.benchmarks.dedup_loading`, in a process of its own whose memory is bounded.

An arm is a way of serving variants: from a store, or from plain files that are read in one of three ways.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.errors import InputError, StoreError
from fedpriv.models.variants.blocks import BlockLayout
from fedpriv.models.variants.store import Store
from simulations.benchmarks._bounded_memory import (
    Group,
    bound,
    bytes_from_disk,
    clock,
    drop,
    enter,
    num_cached_pages,
    used_bytes,
)
from simulations.benchmarks._plain_files import MappedFiles, PlainFiles
from simulations.benchmarks._store_registry import StoreRegistry, memory_for_models, targets_in


class Workload(Protocol):
    """A use of served variants, pickled for the processes that are measured.

    Attributes:
        model: on the CPU; the names in its state_dict are those of the stored tensors. Its weights are overwritten.
    """

    model: nn.Module

    def infer(self) -> None:
        """Run one batch through the model with its current weights."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Times and bytes of one way of serving, for all queries.

    Attributes:
        load_seconds: spent loading weights.
        infer_seconds: of the workloads; None without any.
        misses: queries whose variant was not in memory as a whole.
        bytes_read: copied from files or blocks on these misses.
        disk_bytes: that the process made the disk read, loading and inference; None where the system does not say.
        cached_bytes: of the arm's files, in the system's cache after the last query.
    """

    load_seconds: float
    infer_seconds: float | None
    misses: int
    bytes_read: int
    disk_bytes: int | None
    cached_bytes: int

    @property
    def total_seconds(self) -> float:
        """Loading and inference."""
        return self.load_seconds + (self.infer_seconds or 0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ArmJob:
    """An order to a process: measure this.

    Attributes:
        arm: one of `ARMS`.
        store: folder of a store.
        files: {variant: its safetensors file}.
        layouts: {variant: its layout}.
        expected: {variant: `digest` of its tensors in this arm}; empty where loads are not checked.
        queries: variants, in the order in which they are requested.
        memory_bytes: beyond what the process needs without any weights.
        cold, warm: whether to measure each.
        workloads: pickled {variant: Workload}.
        group: that bounds the process; None to bound its address space.
    """

    arm: str
    store: Path
    files: Mapping[str, Path]
    layouts: Mapping[str, BlockLayout]
    expected: Mapping[str, str]
    queries: Sequence[str]
    memory_bytes: int
    cold: bool
    warm: bool
    workloads: bytes
    group: Group | None


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """Findings of a process, as in `simulations.benchmarks.dedup_loading.LoadingReport`."""

    cold: Arm | None
    warm: Arm | None
    limit_bytes: int
    page_cache_dropped: bool | None


def run(job: ArmJob, sender: Connection) -> None:
    """Measure, and send `ArmFigures`, or the error that a user should see, or the line that says why memory ended."""
    try:
        enter(job.group)
        found: ArmFigures | InputError | StoreError | str = measure(job)
    except (InputError, StoreError) as error:
        found = error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        found = "was refused memory beyond its limit"
    sender.send(found)


def measure(job: ArmJob) -> ArmFigures:
    """Measure an arm in this process, whose memory stays bounded afterwards.

    Raises:
        StoreError: the store is damaged, or a load did not give the variant.
    """
    _return_freed_memory()
    workloads: dict[str, Workload] = pickle.loads(job.workloads)
    for workload in {id(workload): workload for workload in workloads.values()}.values():
        workload.infer()  # which allocates what the first inference needs
    models = {name: workload.model for name, workload in workloads.items()}
    targets = {name: targets_in(model, job.layouts[name]) for name, model in models.items()}
    _release_weights(targets)
    limit_bytes = used_bytes(job.group) + job.memory_bytes + IN_FLIGHT_BYTES
    limit_bytes += _mapped_at_once(job) if job.group is None else 0
    bound(job.group, limit_bytes)
    dropped: list[bool] = []
    with _opened(job, models, targets, dropped) as (loader, before, opening_seconds):
        first = _timed(loader, job, workloads, before)
        cold = replace(first, load_seconds=first.load_seconds + opening_seconds) if job.cold else None
        warm = _timed(loader, job, workloads) if job.warm else None
        check_loads(loader, job.queries if job.expected else (), job.expected)
    return ArmFigures(
        cold=cold, warm=warm, limit_bytes=limit_bytes, page_cache_dropped=all(dropped) if job.cold else None
    )


@contextmanager
def _opened(
    job: ArmJob, models: Mapping[str, nn.Module], targets: Targets, dropped: list[bool]
) -> Iterator[tuple[Loader, Callable[[str], object], float]]:
    """The arm, what comes before each cold query, and the time of opening.

    The page cache is emptied in any case: pages that another process has read would not count in this one's group.
    """

    def drop_all(paths: Sequence[Path]) -> None:
        dropped.append(drop(paths))

    def nothing(_name: str) -> None:
        pass

    if job.arm != "store":
        loader = plain_arm(job.arm, job.files, job.memory_bytes, targets, maps_count=job.group is None)
        drop_all([*job.files.values()])
        yield loader, nothing if job.group else lambda name: drop_all([job.files[name]]), 0.0
        return
    drop_all(_files_of(job.store))
    started = clock()
    with Store(job.store, read_only=True) as store:
        shared = StoreArm(store, job.memory_bytes, models, targets)
        fits = store.bytes_stored <= job.memory_bytes - shared.models_bytes
        held = _files_of(job.store)
        yield shared, nothing if job.group or fits else lambda _: drop_all(held), clock() - started


def _timed(
    loader: Loader, job: ArmJob, workloads: Mapping[str, Workload], before: Callable[[str], object] = lambda _: None
) -> Arm:
    """The time of all queries; `before` is called ahead of each and is not timed."""
    load_seconds = infer_seconds = 0.0
    (misses, copied), read = loader.counts(), bytes_from_disk()
    for name in job.queries:
        before(name)
        started = clock()
        loader.load(name)
        loaded = clock()
        load_seconds += loaded - started
        if name in workloads:
            workloads[name].infer()
            infer_seconds += clock() - loaded
    (misses_after, copied_after), read_after = loader.counts(), bytes_from_disk()
    paths = _files_of(job.store) if job.arm == "store" else [*job.files.values()]
    return Arm(
        load_seconds=load_seconds,
        infer_seconds=infer_seconds if workloads else None,
        misses=misses_after - misses,
        bytes_read=copied_after - copied,
        disk_bytes=None if read is None or read_after is None else read_after - read,
        cached_bytes=sum(map(num_cached_pages, paths)) * mmap.PAGESIZE,
    )


def check_loads(loader: Loader, queries: Sequence[str], expected: Mapping[str, str]) -> None:
    """Refuse a loader that does not give every variant bit for bit.

    Raises:
        StoreError: names the first variant that it does not give.
    """
    for name in queries:
        loaded = {tensor: values.detach().numpy() for tensor, values in loader.load(name).items()}
        if digest(loaded) != expected[name]:
            raise StoreError(f"variant {name!r}: was not loaded bit for bit; `verify` shows whether it is damaged")


def digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        found.update(f"{name} {values.dtype} {values.shape} ".encode())
        found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _release_weights(targets: Targets) -> None:
    """Give up the memory of weights that every load replaces, so that it does not count as the process's own."""
    for tensors in targets.values():
        give_up(tensors.values())
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _return_freed_memory() -> None:
    """Have the C library give back every large block that is freed; by itself it keeps those of sizes seen before.

    Models of several architectures take turns, and what it kept of one would not serve another.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 2**17)


def _mapped_at_once(job: ArmJob) -> int:
    """The address space of files that an arm maps while it reads them, which holds no weights of its own."""
    paths = _files_of(job.store) if job.arm == "store" else [*job.files.values()]
    sizes = [path.stat().st_size for path in paths]
    return 2 * sum(sizes) if job.arm == "store" else 2 * max(sizes)


def _files_of(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file()]


ARMS = ("store", "safetensors", "straight", "mmap")
"""The store's registry; safetensors' `load_file`, copied into the model; the file read straight into the model's
memory; and the file mapped, its tensors taken as they are"""


_MMAP_THRESHOLD = -3  # of glibc's malloc.h

IN_FLIGHT_BYTES = 16 * 2**20
"""Added to every arm's memory, for pages under way."""
_READ_AHEAD_BYTES = 32 * 2**20

Targets = Mapping[str, Mapping[str, Tensor]]


class Loader(Protocol):
    """One arm: loads variants and counts misses and bytes."""

    def load(self, name: str) -> Mapping[str, Tensor]:
        """The variant's tensors, which its workload's model then has, if there is one."""

    def counts(self) -> tuple[int, int]:
        """Variants that were not in memory, and bytes copied for them, so far."""


def give_up(targets: Iterable[Tensor]) -> None:
    """Give up the memory of weights that every load replaces, so that only what loads them holds it."""
    for target in targets:
        target.data = torch.zeros((), dtype=target.dtype).expand(target.shape)


class _HeldModels:
    """The models that hold loaded weights: all of one architecture, since memory is reused for equal shapes only.

    A model of another one would keep memory that its arm has given up and no longer counts.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets, self._names = targets, set[str]()
        self._shapes = {
            name: {tensor: (value.shape, value.dtype) for tensor, value in own.items()} for name, own in targets.items()
        }

    def prepare(self, name: str) -> None:
        """Give up the weights of models of other architectures, before this variant is loaded."""
        if name in self._targets:
            for other in [each for each in self._names if self._shapes[each] != self._shapes[name]]:
                give_up(self._targets[other].values())
                self._names.remove(other)
            self._names.add(name)


class StoreArm:
    """A registry that loads into the workloads' models.

    Args:
        store: open.
        memory_bytes: for models and the system's cache of the store's files.
        models: {variant: the model that it is loaded into}; empty to load dicts of tensors.
        targets: {variant: {tensor: the model's parameter or buffer}}.
    """

    def __init__(self, store: Store, memory_bytes: int, models: Mapping[str, nn.Module], targets: Targets) -> None:
        self._models, self._targets = models, targets
        self.models_bytes = memory_for_models(store, memory_bytes)
        self._registry = StoreRegistry(store, self.models_bytes)
        self._used: nn.Module | None = None
        self._served = _HeldModels(targets)

    def load(self, name: str) -> Mapping[str, Tensor]:
        if name not in self._models:
            return self._registry.get(name)
        if self._used not in (None, self._models[name]):
            self._registry.release(self._used)  # one model computes at a time, whatever its architecture
        self._used = self._models[name]
        self._served.prepare(name)
        self._registry.load_into(self._used, name)
        return self._targets[name]

    def counts(self) -> tuple[int, int]:
        return self._registry.statistics.misses, self._registry.statistics.bytes_read


class PlainArm:
    """Files whose tensors become those of the workloads' models.

    Args:
        files: loads them.
        targets: as `StoreArm`; empty to load dicts of tensors.
    """

    def __init__(self, files: PlainFiles | MappedFiles, targets: Targets) -> None:
        self._files, self._targets, self._served = files, targets, _HeldModels(targets)

    def load(self, name: str) -> Mapping[str, Tensor]:
        self._served.prepare(name)
        tensors = self._files.get(name)
        if name not in self._targets:
            return tensors
        for tensor_name, target in self._targets[name].items():
            target.data = tensors[tensor_name]
        return self._targets[name]

    def counts(self) -> tuple[int, int]:
        return self._files.misses, self._files.bytes_read


def plain_arm(
    arm: str, files: Mapping[str, Path], memory_bytes: int, targets: Targets, *, maps_count: bool
) -> PlainArm:
    """An arm that serves plain files, with its memory allocated and all headers read.

    Args:
        arm: one of `ARMS`, except the store.
        files: {variant: its safetensors file}.
        memory_bytes: for loaded models, and for pages of the file that is being read.
        targets: as `StoreArm`.
        maps_count: whether files that are mapped count as memory.
    """
    if arm == "mmap":
        return PlainArm(MappedFiles(files, memory_bytes if maps_count else None), targets)
    # What load_file maps, or the system reads ahead, must be used before it has to be given back, or it is read twice,
    # which costs more than one model less in memory.
    largest = max(path.stat().st_size for path in files.values())
    under_way = 0 if largest <= IN_FLIGHT_BYTES else largest if arm == "safetensors" else _READ_AHEAD_BYTES
    models_bytes = max(largest, memory_bytes - under_way)
    return PlainArm(PlainFiles(files, models_bytes, "safetensors" if arm == "safetensors" else "direct"), targets)


def in_a_process(job: ArmJob) -> ArmFigures | str:
    """Measure in a process of its own; a line of text says why it found nothing.

    Raises:
        InputError, StoreError: as `measure`.
    """
    found: ArmFigures | Exception | str
    context = multiprocessing.get_context("forkserver")  # a process without threads, or the weights of this one
    context.set_forkserver_preload(["__main__", run.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(job, sender))
    process.start()
    try:
        sender.close()
        found = receiver.recv()
    except EOFError:
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        found = "was ended by the system at its memory limit" if killed else f"failed, exit status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if isinstance(found, Exception):
        raise found
    return found

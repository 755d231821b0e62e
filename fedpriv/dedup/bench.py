"""What serving from a store costs against serving plain safetensors files from the same memory.

Random queries each want one of the store's variants, loaded and, with a workload, used once. Both arms keep the
variants that were asked for last, and both load in place.

Warm: all files are in the page cache, and the same queries were run once before. Cold: none is when the first query
comes. A plain file, for which no memory is left beside the loaded ones, is dropped again before each query. The
store's blocks count as memory: where they fit into it beside one model they may stay once they are read, and the
registry has so much less; else they are dropped before each query too. The store's cold time includes opening it and
taking the memory; the plain arm has its memory, and has read all headers, before.

Source: Guan et al. 2025, Figures 5 and 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.dedup.bench_page_cache import drop, let_go
from fedpriv.dedup.bench_plain_files import PlainFiles, Reader, read_header
from fedpriv.dedup.serving import Registry, targets_in
from fedpriv.dedup.store import Store
from fedpriv.errors import InputError, StoreError


class Workload(Protocol):
    """What variants are served for.

    Attributes:
        model: on the CPU; the names in its state_dict are those of the stored tensors. Its weights change.
    """

    model: nn.Module

    def infer(self) -> None:
        """One batch through the model as it now is."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one way to serve took for all queries.

    Attributes:
        load_seconds: until the weights were there.
        infer_seconds: of the workload; None without one.
        misses: queries whose variant was not in memory.
        bytes_read: copied for them out of files or blocks.
    """

    load_seconds: float
    infer_seconds: float | None
    misses: int
    bytes_read: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The two ways to serve beside each other."""

    plain: Arm
    store: Arm

    @property
    def load_ratio(self) -> float:
        """Loading from plain files over loading from the store, the larger the better."""
        return self.plain.load_seconds / self.store.load_seconds

    @property
    def total_ratio(self) -> float | None:
        """The same of loading and inference together; None without a workload."""
        if self.plain.infer_seconds is None or self.store.infer_seconds is None:
            return None
        plain, store = (arm.load_seconds + (arm.infer_seconds or 0.0) for arm in (self.plain, self.store))
        return plain / store

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the ratios among them."""
        return {**asdict(self), "load_ratio": self.load_ratio, "total_ratio": self.total_ratio}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        num_variants: of the store, among which the queries choose.
        memory_bytes: that each arm might use.
        page_cache_dropped: whether the files were seen to be out of the page cache when they should be, or else the
            cold figures are not cold; None where nothing cold was measured.
        cold, warm: None where not measured.
    """

    num_queries: int
    num_variants: int
    memory_bytes: int
    page_cache_dropped: bool | None
    cold: Comparison | None
    warm: Comparison | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        kinds = {"cold": self.cold, "warm": self.warm}
        return {**vars(self), **{kind: found and found.as_dict() for kind, found in kinds.items()}}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Setting:
    """What both arms are given; `targets` are the parameters and buffers of the workload's model."""

    store: Path
    files: Mapping[str, Path]
    queries: Sequence[str]
    memory_bytes: int
    reader: Reader
    workload: Workload | None
    targets: Mapping[str, Tensor]


class _Loader(Protocol):
    """One arm: loads a variant, and tells what that took so far."""

    def load(self, name: str) -> Mapping[str, Tensor]:
        """The variant's tensors, in the workload's model where there is one."""

    def counts(self) -> tuple[int, int]:
        """Misses, and bytes copied."""


def bench(
    store: Path,
    files: Mapping[str, Path],
    *,
    num_queries: int = 100,
    memory_bytes: int | None = None,
    seed: int = 0,
    cold: bool = True,
    warm: bool = True,
    reader: Reader = "direct",
    workload: Workload | None = None,
) -> Report:
    """What serving random variants takes from a store and from plain files, after a check of what is loaded.

    All queries are run once before, untimed, and every load of them, in both arms, has to give the variant bit for bit:
    as it is stored, or as it is in its file.

    Args:
        store: folder of a store.
        files: {variant: safetensors file} for every variant of the store.
        num_queries: >= 1.
        memory_bytes: bound for each arm; by default a third of all variants, or the largest of them if that is more.
        seed: of the queries.
        cold, warm: what is measured.
        reader: how plain files are read.
        workload: what is measured besides loading; without one, a variant is loaded as a dict of tensors.

    Raises:
        InputError: one of these cannot be used: no variant, a file that is missing or of another architecture than its
            variant, a model of another one, or memory for less than one variant.
        StoreError: the store is damaged, or a load gave anything but the variant.
    """
    if num_queries < 1:
        raise InputError(f"num_queries = {num_queries}: must be >= 1")
    setting, stored = _prepared(store, files, num_queries, memory_bytes, seed, reader, workload)
    in_files = {name: _digest(safetensors.numpy.load_file(path)) for name, path in setting.files.items()}
    found = _warm(setting, in_files, stored)
    measured, dropped = _cold(setting) if cold else (None, None)
    return Report(
        num_queries=num_queries,
        num_variants=len(setting.files),
        memory_bytes=setting.memory_bytes,
        page_cache_dropped=dropped,
        cold=measured,
        warm=found if warm else None,
    )


def restore_all(store: Path, folder: Path) -> dict[str, Path]:
    """{variant: safetensors file in the folder, restored from the store}.

    Raises:
        StoreError: the store is damaged.
    """
    with Store(store, read_only=True) as opened:
        files = {name: folder / f"{name}.safetensors" for name in opened.names}
        for name, path in files.items():
            safetensors.numpy.save_file(opened.restore(name), path)
    return files


def _prepared(
    path: Path,
    files: Mapping[str, Path],
    num_queries: int,
    memory_bytes: int | None,
    seed: int,
    reader: Reader,
    workload: Workload | None,
) -> tuple[_Setting, dict[str, str]]:
    """What both arms are given, checked, and {variant: digest of what is stored}.

    Nothing of the store stays mapped, which would keep it in the page cache.
    """
    with Store(path, read_only=True) as store:
        sizes = _sizes(store)
        numbers = np.random.default_rng(seed).integers(len(sizes), size=num_queries)
        setting = _Setting(
            store=path,
            files=_checked(files, store),
            queries=[store.names[number] for number in numbers],
            memory_bytes=max(max(sizes), sum(sizes) // 3) if memory_bytes is None else memory_bytes,
            reader=reader,
            workload=workload,
            targets=_targets(store, workload),
        )
        return setting, {name: _digest(store.restore(name)) for name in store.names}


class _Plain:
    """Plain files, assigned to the workload's model."""

    def __init__(self, setting: _Setting) -> None:
        self._files = PlainFiles(setting.files, setting.memory_bytes, setting.reader)
        self._targets = setting.targets

    def load(self, name: str) -> Mapping[str, Tensor]:
        tensors = self._files.get(name)
        for tensor_name, target in self._targets.items():
            target.data = tensors[tensor_name]
        return self._targets or tensors

    def counts(self) -> tuple[int, int]:
        return self._files.misses, self._files.bytes_read


class _Shared:
    """A registry, which loads into the workload's model."""

    def __init__(self, store: Store, memory_bytes: int, setting: _Setting) -> None:
        self._registry, self._setting = Registry(store, memory_bytes), setting

    def load(self, name: str) -> Mapping[str, Tensor]:
        if self._setting.workload is None:
            return self._registry.get(name)
        self._registry.load_into(self._setting.workload.model, name)
        return self._setting.targets

    def counts(self) -> tuple[int, int]:
        return self._registry.statistics.misses, self._registry.statistics.bytes_copied


def _warm(setting: _Setting, in_files: Mapping[str, str], stored: Mapping[str, str]) -> Comparison:
    """Both arms after a round of the same queries, in which every load is checked."""

    def arm(loader: _Loader, expected: Mapping[str, str]) -> Arm:
        _check_loads(loader, setting.queries, expected)
        return _timed(loader, setting)

    plain = arm(_Plain(setting), in_files)
    with Store(setting.store, read_only=True) as store:
        return Comparison(plain=plain, store=arm(_Shared(store, setting.memory_bytes, setting), stored))


def _cold(setting: _Setting) -> tuple[Comparison, bool]:
    """Both arms with an empty page cache, and whether it was empty."""
    seen = []
    plain = _timed(_Plain(setting), setting, lambda name: seen.append(drop([setting.files[name]])))
    seen.append(drop(_files_of(setting.store)))
    started = perf_counter()
    with Store(setting.store, read_only=True) as store:
        left = setting.memory_bytes - store.bytes_stored
        fits = left >= max(_sizes(store))
        shared = _Shared(store, left if fits else setting.memory_bytes, setting)
        opening = perf_counter() - started

        def before(_name: str) -> None:
            if not fits:
                let_go(store.blocks)
                seen.append(drop(path for path in _files_of(setting.store) if not path.match("catalogue.*.npy")))

        arm = _timed(shared, setting, before)
    return Comparison(plain=plain, store=replace(arm, load_seconds=arm.load_seconds + opening)), all(seen)


def _timed(loader: _Loader, setting: _Setting, before: Callable[[str], object] = lambda _: None) -> Arm:
    """All queries, without the time of what is done before each."""
    load_seconds = infer_seconds = 0.0
    misses, copied = loader.counts()
    for name in setting.queries:
        before(name)
        started = perf_counter()
        loader.load(name)
        loaded = perf_counter()
        load_seconds += loaded - started
        if setting.workload is not None:
            setting.workload.infer()
            infer_seconds += perf_counter() - loaded
    misses_after, copied_after = loader.counts()
    return Arm(
        load_seconds=load_seconds,
        infer_seconds=None if setting.workload is None else infer_seconds,
        misses=misses_after - misses,
        bytes_read=copied_after - copied,
    )


def _check_loads(loader: _Loader, queries: Sequence[str], expected: Mapping[str, str]) -> None:
    for name in queries:
        loaded = {tensor: values.detach().numpy() for tensor, values in loader.load(name).items()}
        if _digest(loaded) != expected[name]:
            raise StoreError(f"variant {name!r}: was not loaded bit for bit; `verify` tells whether it is damaged")


def _digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {values.shape} ".encode())
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _sizes(store: Store) -> list[int]:
    """The memory that each variant takes in a registry."""
    if not store.names:
        raise InputError(f"store = {str(store.path)!r}: holds no variants")
    return [store.manifest(name).layout.padded_bytes for name in store.names]


def _checked(files: Mapping[str, Path], store: Store) -> dict[str, Path]:
    """The files of the store's variants, each of its variant's architecture."""
    for name in store.names:
        if name not in files:
            raise InputError(f"files: none for variant {name!r}; give one for each of the store's {len(store.names)}")
        layout, (_, content) = store.manifest(name).layout, read_header(files[name])
        if found := layout.difference(replace(layout, tensors=tuple(content.tensors))):
            raise InputError(f"files: variant {name!r} has another architecture than the stored one: {found}")
    return {name: files[name] for name in store.names}


def _targets(store: Store, workload: Workload | None) -> Mapping[str, Tensor]:
    """The parameters and buffers of the workload's model, which can hold every variant."""
    if workload is None:
        return {}
    found: Mapping[str, Tensor] = {}
    for name in store.names:
        found = targets_in(workload.model, store.manifest(name).layout)
    return found


def _files_of(store: Path) -> Iterator[Path]:
    return (path for path in store.rglob("*") if path.is_file())

"""The cost of serving from a store compared with serving plain safetensors files in the same amount of memory.

Each random query requests one of the store's variants, which is loaded and, with a workload, used once. Both arms
keep the most recently used variants, and both load in place.

Warm: all files are in the page cache, and the same queries have been run once before. Cold: no file is in the page
cache when the first query arrives. Plain files get no memory besides that of the loaded variants, so a file is
dropped from the page cache again before each query. The store's blocks count as memory: if they fit beside one model,
they may stay once they have been read, and the registry gets that much less; otherwise they too are dropped before
each query. The store's cold time includes opening it and allocating memory; the plain arm has allocated its memory
and read all headers beforehand.

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

from fedpriv.dedup.bench_page_cache import drop, release_mapped_pages
from fedpriv.dedup.bench_plain_files import PlainFiles, Reader, read_header
from fedpriv.dedup.serving import Registry, targets_in
from fedpriv.dedup.store import Store
from fedpriv.errors import InputError, StoreError


class Workload(Protocol):
    """What the served variants are used for.

    Attributes:
        model: on the CPU; the names in its state_dict are those of the stored tensors. Its weights are overwritten.
    """

    model: nn.Module

    def infer(self) -> None:
        """Run one batch through the model with its current weights."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one way of serving took for all queries.

    Attributes:
        load_seconds: spent loading weights.
        infer_seconds: of the workload; None without one.
        misses: queries whose variant was not in memory.
        bytes_read: copied from files or blocks on these misses.
    """

    load_seconds: float
    infer_seconds: float | None
    misses: int
    bytes_read: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both ways of serving, side by side."""

    plain: Arm
    store: Arm

    @property
    def load_ratio(self) -> float:
        """Load time of plain files over load time of the store; larger is better."""
        return self.plain.load_seconds / self.store.load_seconds

    @property
    def total_ratio(self) -> float | None:
        """The same ratio for loading and inference together; None without a workload."""
        if self.plain.infer_seconds is None or self.store.infer_seconds is None:
            return None
        plain, store = (arm.load_seconds + (arm.infer_seconds or 0.0) for arm in (self.plain, self.store))
        return plain / store

    def as_dict(self) -> dict[str, Any]:
        """Plain values, including the ratios."""
        return {**asdict(self), "load_ratio": self.load_ratio, "total_ratio": self.total_ratio}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        num_variants: in the store; queries choose among them.
        memory_bytes: available to each arm.
        page_cache_dropped: whether the files were verified to be out of the page cache when they should be; if not,
            the cold figures are not cold. None if nothing cold was measured.
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
        return {**vars(self), **{kind: measured and measured.as_dict() for kind, measured in kinds.items()}}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Setting:
    """The input of both arms; `targets` are the parameters and buffers of the workload's model."""

    store: Path
    files: Mapping[str, Path]
    queries: Sequence[str]
    memory_bytes: int
    reader: Reader
    workload: Workload | None
    targets: Mapping[str, Tensor]


class _Loader(Protocol):
    """One arm: loads variants and counts misses and bytes."""

    def load(self, name: str) -> Mapping[str, Tensor]:
        """The variant's tensors, loaded into the workload's model if there is one."""

    def counts(self) -> tuple[int, int]:
        """Misses and bytes copied so far."""


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
    """The time and traffic of serving random variants from a store and from plain files.

    All queries are first run once, untimed, and every load, in both arms, must give the variant bit for bit as it is
    stored or as it is in its file.

    Args:
        store: folder of a store.
        files: {variant: safetensors file} for every variant of the store.
        num_queries: >= 1.
        memory_bytes: bound for each arm; by default a third of the size of all variants, or the size of the largest
            one if that is more.
        seed: of the queries.
        cold, warm: whether to measure each.
        reader: how plain files are read.
        workload: measured in addition to loading; without one, a variant is loaded as a dict of tensors.

    Raises:
        InputError: there is no variant, a file is missing or has another architecture than its variant, the
            workload's model has another architecture, or the memory does not hold one variant.
        StoreError: the store is damaged, or a load did not give the variant.
    """
    if num_queries < 1:
        raise InputError(f"num_queries = {num_queries}: must be >= 1")
    setting, stored = _prepared(store, files, num_queries, memory_bytes, seed, reader, workload)
    in_files = {name: _digest(safetensors.numpy.load_file(path)) for name, path in setting.files.items()}
    warm_result = _warm(setting, in_files, stored)
    cold_result, dropped = _cold(setting) if cold else (None, None)
    return Report(
        num_queries=num_queries,
        num_variants=len(setting.files),
        memory_bytes=setting.memory_bytes,
        page_cache_dropped=dropped,
        cold=cold_result,
        warm=warm_result if warm else None,
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
    """The checked input of both arms, and {variant: digest of its stored tensors}.

    The store does not stay mapped, because that would keep it in the page cache.
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


class _PlainArm:
    """The plain files, loaded into the workload's model."""

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


class _StoreArm:
    """A registry that loads into the workload's model."""

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
    """Both arms, after a first pass over the same queries in which every load is checked."""

    def arm(loader: _Loader, expected: Mapping[str, str]) -> Arm:
        _check_loads(loader, setting.queries, expected)
        return _timed(loader, setting)

    plain = arm(_PlainArm(setting), in_files)
    with Store(setting.store, read_only=True) as store:
        return Comparison(plain=plain, store=arm(_StoreArm(store, setting.memory_bytes, setting), stored))


def _cold(setting: _Setting) -> tuple[Comparison, bool]:
    """Both arms with an empty page cache, and whether it was verified to be empty."""
    dropped = []
    plain = _timed(_PlainArm(setting), setting, lambda name: dropped.append(drop([setting.files[name]])))
    dropped.append(drop(_files_of(setting.store)))
    started = perf_counter()
    with Store(setting.store, read_only=True) as store:
        remaining_bytes = setting.memory_bytes - store.bytes_stored
        fits = remaining_bytes >= max(_sizes(store))
        shared = _StoreArm(store, remaining_bytes if fits else setting.memory_bytes, setting)
        opening = perf_counter() - started

        def before(_name: str) -> None:
            if not fits:
                release_mapped_pages(store.blocks)
                dropped.append(drop(path for path in _files_of(setting.store) if not path.match("catalogue.*.npy")))

        arm = _timed(shared, setting, before)
    return Comparison(plain=plain, store=replace(arm, load_seconds=arm.load_seconds + opening)), all(dropped)


def _timed(loader: _Loader, setting: _Setting, before: Callable[[str], object] = lambda _: None) -> Arm:
    """The time of all queries; `before` is called ahead of each and is not timed."""
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
            raise StoreError(f"variant {name!r}: was not loaded bit for bit; `verify` shows whether it is damaged")


def _digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {values.shape} ".encode())
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _sizes(store: Store) -> list[int]:
    """The memory of each variant in a registry, bytes."""
    if not store.names:
        raise InputError(f"store = {str(store.path)!r}: holds no variants")
    return [store.manifest(name).layout.padded_bytes for name in store.names]


def _checked(files: Mapping[str, Path], store: Store) -> dict[str, Path]:
    """The files of the store's variants, each checked to have its variant's architecture."""
    for name in store.names:
        if name not in files:
            raise InputError(f"files: none for variant {name!r}; give one for each of the store's {len(store.names)}")
        layout, (_, content) = store.manifest(name).layout, read_header(files[name])
        if difference := layout.difference(replace(layout, tensors=tuple(content.tensors))):
            raise InputError(f"files: variant {name!r} has another architecture than the stored one: {difference}")
    return {name: files[name] for name in store.names}


def _targets(store: Store, workload: Workload | None) -> Mapping[str, Tensor]:
    """The parameters and buffers of the workload's model, checked to fit every variant."""
    if workload is None:
        return {}
    targets: Mapping[str, Tensor] = {}
    for name in store.names:
        targets = targets_in(workload.model, store.manifest(name).layout)
    return targets


def _files_of(store: Path) -> Iterator[Path]:
    return (path for path in store.rglob("*") if path.is_file())

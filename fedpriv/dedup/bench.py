"""What serving from a store takes, and what serving plain safetensors files takes, in equally bounded processes.

Each random query requests one of the store's variants, which is loaded and, with workloads, used once. Every arm
(`fedpriv.dedup.bench_arms.ARMS`) has a process of its own, whose whole memory is bounded: by what it needs without any
weights (Python, torch, the built models, one inference), `memory_bytes`, and 16 MiB for pages that are under way. Where
a control group can be made, the bound includes what the process brings into the system's cache; elsewhere it is on the
address space, and since the cache is not bounded then, files for which there would be no memory are dropped from it
before each cold query.

Arms with plain files keep the most recently used models, as many as their memory holds; the maps of files stay as long
as the system keeps their pages. Cold: no file is in the cache when the first query arrives; afterwards the system does
what it does. The store's cold time includes opening it and allocating memory; the other arms have allocated their
memory and read all headers beforehand. Warm: the same queries after a first pass.

Source: Guan et al. 2025, Figures 5 and 8.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from fedpriv.dedup.bench_arms import ARMS
from fedpriv.dedup.bench_limit import kind_of, temporary_group
from fedpriv.dedup.bench_page_cache import read_speed
from fedpriv.dedup.bench_plain_files import read_header
from fedpriv.dedup.bench_process import Arm, Job, Measured, Workload, digest, run
from fedpriv.dedup.blocks import Layout
from fedpriv.dedup.serving import targets_in
from fedpriv.dedup.store import Store
from fedpriv.errors import InputError

__all__ = ["ARMS", "KINDS", "Arm", "Kind", "Report", "Workload", "bench", "restore_all"]

Kind = Literal["cold", "warm"]
KINDS: tuple[Kind, ...] = ("cold", "warm")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        num_variants: in the store; queries choose among them.
        memory_bytes: of each arm, for models and, in a control group, cached files.
        limited_by: "cgroup v1", "cgroup v2" or "address space".
        limit_bytes: {arm: bound on its whole process}.
        disk_bytes_per_second: of one of the files, read in one piece by a process without a bound.
        page_cache_dropped: whether the files were verified to be out of the page cache when they should be; if not,
            the cold figures are not cold. None if nothing cold was measured.
        cold, warm: {arm: what it took}; empty where not measured.
        failures: {arm that gave no figures: why, in one line}.
    """

    num_queries: int
    num_variants: int
    memory_bytes: int
    limited_by: str
    limit_bytes: Mapping[str, int]
    disk_bytes_per_second: float
    page_cache_dropped: bool | None
    cold: Mapping[str, Arm]
    warm: Mapping[str, Arm]
    failures: Mapping[str, str]

    def arms(self, kind: Kind) -> Mapping[str, Arm]:
        """{arm: what it took}, cold or warm."""
        return self.cold if kind == "cold" else self.warm

    def load_ratios(self, kind: Kind) -> dict[str, float]:
        """{arm with plain files: its load time over that of the store}; larger is better for the store."""
        return self._ratios(kind, "load_seconds")

    def total_ratios(self, kind: Kind) -> dict[str, float]:
        """The same for loading and inference together."""
        return self._ratios(kind, "total_seconds")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, including the ratios."""
        ratios = {kind: {"load": self.load_ratios(kind), "total": self.total_ratios(kind)} for kind in KINDS}
        return {**asdict(self), "ratios": ratios}

    def _ratios(self, kind: Kind, figure: str) -> dict[str, float]:
        arms = self.arms(kind)
        if "store" not in arms:
            return {}
        store: float = getattr(arms["store"], figure)
        return {name: getattr(arm, figure) / store for name, arm in arms.items() if name != "store"}


def bench(
    store: Path,
    files: Mapping[str, Path],
    *,
    num_queries: int = 100,
    memory_bytes: int | None = None,
    seed: int = 0,
    cold: bool = True,
    warm: bool = True,
    workloads: Mapping[str, Workload] | None = None,
    arms: Sequence[str] = ARMS,
) -> Report:
    """The time and traffic of serving random variants from a store and from plain files.

    In an untimed pass over all queries every load of every arm must give the variant bit for bit, as it is stored or
    as it is in its file.

    Args:
        store: folder of a store.
        files: {variant: safetensors file} for every variant of the store.
        num_queries: >= 1.
        memory_bytes: of each arm; by default a third of the size of all variants, or the size of the largest one if
            that is more.
        seed: of the queries.
        cold, warm: whether to measure each.
        workloads: {variant: what it is used for} for every variant, measured in addition to loading; several variants
            may share one. Without any, a variant is loaded as a dict of tensors, and `mmap`, which then would read
            nothing, is left out.
        arms: of `ARMS`.

    Raises:
        InputError: there is no variant, a file is missing or has another architecture than its variant, a workload's
            model has another architecture, or the memory does not hold one variant.
        StoreError: the store is damaged, or a load did not give the variant.
    """
    if num_queries < 1:
        raise InputError(f"num_queries = {num_queries}: must be >= 1")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise InputError(f"arm = {unknown[0]!r}: must be one of {', '.join(ARMS)}")
    layouts, stored = _stored(store)
    checked = _checked(files, layouts)
    sizes = [layout.padded_bytes for layout in layouts.values()]
    job = Job(
        arm="store",
        store=store,
        files=checked,
        layouts=layouts,
        expected=stored,
        queries=_queries(list(layouts), num_queries, seed),
        memory_bytes=max(max(sizes), sum(sizes) // 3) if memory_bytes is None else memory_bytes,
        cold=cold,
        warm=warm,
        workloads=_pickled(workloads or {}, layouts),
        group=None,
    )
    _check_memory(job)
    in_files = {name: digest(safetensors.numpy.load_file(path)) for name, path in checked.items()}
    found: dict[str, Measured | str] = {}
    limited_by = ""
    for arm in arms:
        if arm != "mmap" or workloads:
            with temporary_group() as group:
                limited_by = kind_of(group)
                expected = stored if arm == "store" else in_files
                found[arm] = _in_a_process(replace(job, arm=arm, expected=expected, group=group))
    measured = {arm: result for arm, result in found.items() if isinstance(result, Measured)}
    dropped = [result.page_cache_dropped for result in measured.values()]
    return Report(
        num_queries=num_queries,
        num_variants=len(layouts),
        memory_bytes=job.memory_bytes,
        limited_by=limited_by,
        limit_bytes={arm: result.limit_bytes for arm, result in measured.items()},
        disk_bytes_per_second=read_speed(next(iter(checked.values()))),
        page_cache_dropped=all(dropped) if cold else None,
        cold={arm: result.cold for arm, result in measured.items() if result.cold is not None},
        warm={arm: result.warm for arm, result in measured.items() if result.warm is not None},
        failures={arm: result for arm, result in found.items() if isinstance(result, str)},
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


def _in_a_process(job: Job) -> Measured | str:
    """What a process of its own finds, or why it found nothing."""
    found: Measured | Exception | str
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


def _stored(path: Path) -> tuple[dict[str, Layout], dict[str, str]]:
    """{variant: layout} and {variant: digest of its tensors}.

    The store does not stay mapped, because that would keep it in the page cache.
    """
    with Store(path, read_only=True) as store:
        if not store.names:
            raise InputError(f"store = {str(path)!r}: holds no variants")
        layouts = {}
        for name in store.names:
            manifest = store.manifest(name)
            if manifest.basis is not None:
                raise InputError(f"variant {name!r}: is stored by a shared basis, without blocks that could be served")
            layouts[name] = manifest.layout
        return layouts, {name: digest(store.restore(name)) for name in store.names}


def _queries(names: Sequence[str], num_queries: int, seed: int) -> list[str]:
    return [names[number] for number in np.random.default_rng(seed).integers(len(names), size=num_queries)]


def _checked(files: Mapping[str, Path], layouts: Mapping[str, Layout]) -> dict[str, Path]:
    """The files of the store's variants, each checked to have its variant's architecture."""
    for name, layout in layouts.items():
        if name not in files:
            raise InputError(f"files: none for variant {name!r}; give one for each of the store's {len(layouts)}")
        _, content = read_header(files[name])
        if difference := layout.difference(replace(layout, tensors=tuple(content.tensors))):
            raise InputError(f"files: variant {name!r} has another architecture than the stored one: {difference}")
    return {name: files[name] for name in layouts}


def _check_memory(job: Job) -> None:
    for name, layout in job.layouts.items():
        if layout.padded_bytes > job.memory_bytes:
            raise InputError(f"memory_bytes = {job.memory_bytes}: variant {name!r} alone needs {layout.padded_bytes}")


def _pickled(workloads: Mapping[str, Workload], layouts: Mapping[str, Layout]) -> bytes:
    """The workloads of all variants, checked to fit them, for another process."""
    for name, layout in layouts.items() if workloads else ():
        if name not in workloads:
            raise InputError(f"workloads: none for variant {name!r}; give one for each of the store's {len(layouts)}")
        targets_in(workloads[name].model, layout)
    try:
        return pickle.dumps({name: workloads[name] for name in layouts if name in workloads})
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(f"workloads: cannot be pickled for a process of their own ({error})") from None

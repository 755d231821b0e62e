"""How fast variants that share blocks are loaded: a store against three ways of loading plain safetensors files.

    python -m simulations.benchmarks.dedup_loading [--cases cluster scattered adapters] [--queries 100] [--repeats 3]

It makes models of MiniLM's shape (22.7 million float32 values), in two cases. `cluster`: eight models with equal
embeddings and first four layers (84 % of the values); of the blocks of 1,024 values in the rest, two thirds are a
model's own, and so are all small tensors there. `scattered`: twelve models, in each of which a tenth of all blocks of
16,384 values is its own, at random. Each random query loads one of them into a built model, which then runs one batch.

`adapters` is fifty small models: LoRA of MiniLM (61 kB), of whose blocks of 64 values 40 % are a model's own. A
server reads such models once and keeps them, so both of its readers load each query's model from files that the system
has cached, checked against its digest; safetensors' `load_file`, which checks nothing, is shown next to them.

Every arm (`ARMS`) has a process of its own, whose whole memory is bounded: by what it needs without any weights
(Python, torch, the built models, one inference), the given memory, and 16 MiB for pages that are under way. Where a
control group can be made, the bound includes what the process brings into the system's cache; elsewhere it is on the
address space, and since the cache is not bounded then, files for which there would be no memory are dropped from it
before each cold query.

Arms with plain files keep the most recently used models, as many as their memory holds; the maps of files stay as long
as the system keeps their pages. Cold: no file is in the cache when the first query arrives; afterwards the system does
what it does. The store's cold time includes opening it and allocating memory; the other arms have allocated their
memory and read all headers beforehand. Warm: the same queries after a first pass. No time is counted in which other
processes had the processor.

Source: Guan et al. 2025, Figures 5 and 8.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertModel

from fedpriv.errors import InputError
from fedpriv.models.variants.blocks import BlockLayout, layout_of
from fedpriv.models.variants.store import Store
from simulations.benchmarks import _adapter_readers
from simulations.benchmarks._bounded_memory import kind_of, read_speed, slowed, temporary_group
from simulations.benchmarks._dedup_process import ARMS, Arm, ArmFigures, ArmJob, Workload, digest, in_a_process
from simulations.benchmarks._measuring import claim
from simulations.benchmarks._plain_files import read_header
from simulations.benchmarks._store_registry import targets_in

BATCH, TOKENS = 1, 16
TARGETS = {("cold", "safetensors"): 10.0, ("cold", "straight"): 3.0}

Kind = Literal["cold", "warm"]
KINDS: tuple[Kind, ...] = ("cold", "warm")

__all__ = ["ARMS", "KINDS", "Arm", "LoadingReport", "Workload", "bench", "restore_all"]


@dataclass(frozen=True, kw_only=True)
class LoadingReport:
    """The times and bytes of every arm.

    Attributes:
        num_variants: in the store; queries choose among them.
        memory_bytes: of each arm, for models and, in a control group, cached files.
        limited_by: "cgroup v1", "cgroup v2" or "address space".
        limit_bytes: {arm: bound on its whole process}.
        disk_bytes_per_second: of one of the files, read in one piece by a process without a bound.
        page_cache_dropped: whether the files were verified to be out of the page cache when they should be; if not,
            the cold figures are not cold. None if nothing cold was measured.
        cold, warm: {arm: its times and bytes}; empty where not measured.
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
        """{arm: its times and bytes}, cold or warm."""
        return self.cold if kind == "cold" else self.warm

    def load_ratios(self, kind: Kind) -> dict[str, float]:
        """{arm with plain files: its load time over that of the store}; larger is better for the store."""
        return self._ratios(kind, "load_seconds")

    def total_ratios(self, kind: Kind) -> dict[str, float]:
        """The same for loading and inference together."""
        return self._ratios(kind, "total_seconds")

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
    bytes_per_second: float | None = None,
    checked: bool = True,
) -> LoadingReport:
    """Measure serving random variants from a store and from plain files.

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
        bytes_per_second: of the disk, at most; None for what it gives.
        checked: whether there is the untimed pass.

    Raises:
        InputError: there is no variant, a file is missing or has another architecture than its variant, a workload's
            model has another architecture, or the memory does not hold one variant.
        StoreError: the store is damaged, or a load did not give the variant.
    """
    if num_queries < 1:
        raise InputError(f"num_queries = {num_queries}: must be >= 1")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise InputError(f"arm = {unknown[0]!r}: must be one of {', '.join(ARMS)}")
    layouts, stored = _stored(store, checked=checked)
    fitting = _fitting(files, layouts)
    sizes = [layout.padded_bytes for layout in layouts.values()]
    job = ArmJob(
        arm="store",
        store=store,
        files=fitting,
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
    in_files = {name: digest(safetensors.numpy.load_file(path)) for name, path in fitting.items() if checked}
    found: dict[str, ArmFigures | str] = {}
    limited_by = ""
    for arm in arms:
        if arm != "mmap" or workloads:
            with temporary_group() as made, slowed(made, store, bytes_per_second) as group:
                limited_by = kind_of(group)
                expected = stored if arm == "store" else in_files
                found[arm] = in_a_process(replace(job, arm=arm, expected=expected, group=group))
    measured = {arm: result for arm, result in found.items() if isinstance(result, ArmFigures)}
    dropped = [result.page_cache_dropped for result in measured.values()]
    return LoadingReport(
        num_queries=num_queries,
        num_variants=len(layouts),
        memory_bytes=job.memory_bytes,
        limited_by=limited_by,
        limit_bytes={arm: result.limit_bytes for arm, result in measured.items()},
        disk_bytes_per_second=bytes_per_second or read_speed(next(iter(fitting.values()))),
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
            safetensors.numpy.save_file(opened.tensors(name), path)
    return files


def _stored(path: Path, *, checked: bool) -> tuple[dict[str, BlockLayout], dict[str, str]]:
    """{variant: layout} and {variant: digest of its tensors}, of none if they are not checked.

    The store does not stay mapped, because that would keep it in the page cache.
    """
    with Store(path, read_only=True) as store:
        if not store.names:
            raise InputError(f"store = {str(path)!r}: holds no variants")
        layouts = {}
        for name in store.names:
            manifest = store.manifest(name)
            if manifest.basis is not None:
                raise InputError(f"variant {name!r}: is restored from a basis, without blocks that could be served")
            layouts[name] = manifest.layout
        return layouts, {name: digest(store.tensors(name)) for name in store.names if checked}


def _queries(names: Sequence[str], num_queries: int, seed: int) -> list[str]:
    return [names[number] for number in np.random.default_rng(seed).integers(len(names), size=num_queries)]


def _fitting(files: Mapping[str, Path], layouts: Mapping[str, BlockLayout]) -> dict[str, Path]:
    """The files of the store's variants, each checked to have its variant's architecture."""
    for name, layout in layouts.items():
        if name not in files:
            raise InputError(f"files: none for variant {name!r}; give one for each of the store's {len(layouts)}")
        _, content = read_header(files[name])
        if difference := layout.difference(replace(layout, tensors=tuple(content.tensors))):
            raise InputError(f"files: variant {name!r} has another architecture than the stored one: {difference}")
    return {name: files[name] for name in layouts}


def _check_memory(job: ArmJob) -> None:
    for name, layout in job.layouts.items():
        if layout.padded_bytes > job.memory_bytes:
            raise InputError(f"memory_bytes = {job.memory_bytes}: variant {name!r} alone needs {layout.padded_bytes}")


def _pickled(workloads: Mapping[str, Workload], layouts: Mapping[str, BlockLayout]) -> bytes:
    """The workloads of all variants, checked to fit them, for another process."""
    for name, layout in layouts.items() if workloads else ():
        if name not in workloads:
            raise InputError(f"workloads: none for variant {name!r}; give one for each of the store's {len(layouts)}")
        targets_in(workloads[name].model, layout)
    try:
        return pickle.dumps({name: workloads[name] for name in layouts if name in workloads})
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(f"workloads: cannot be pickled for a process of their own ({error})") from None


class Encoding:
    """A `Workload`: one batch of random tokens through a model of MiniLM's shape."""

    def __init__(self) -> None:
        config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        self.model = BertModel(config).eval()
        self._tokens = torch.randint(config.vocab_size, (BATCH, TOKENS))

    @torch.inference_mode()
    def infer(self) -> None:
        """Run one batch."""
        self.model(self._tokens)


@dataclass(frozen=True, kw_only=True)
class VariantKind:
    """A kind of variants.

    Attributes:
        num_variants: with the base.
        block_size: values in a block.
        share: of the blocks that may differ from the base's, how many do.
        may_differ: whether a tensor of this name may.
    """

    num_variants: int
    block_size: int
    share: float
    may_differ: Callable[[str], bool]


def is_late(name: str) -> bool:
    """Whether a tensor is in the last two layers, or behind them."""
    return name.startswith(("encoder.layer.4.", "encoder.layer.5.", "pooler."))


ADAPTERS = "adapters"
CASES = {
    "cluster": VariantKind(num_variants=8, block_size=1024, share=2 / 3, may_differ=is_late),
    "scattered": VariantKind(num_variants=12, block_size=16_384, share=0.1, may_differ=lambda _name: True),
}


def make_variants(folder: Path, model: torch.nn.Module, case: VariantKind, num_variants: int) -> None:
    """A store with the base and its variants."""
    base = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    layout = layout_of(base, case.block_size)
    with Store(folder) as store:
        for number in range(num_variants):
            tensors = changed(base, layout, case, np.random.default_rng(number)) if number else base
            store.add(f"v{number}", layout, *layout.to_blocks(tensors))


def changed(
    base: dict[str, NDArray[Any]], layout: BlockLayout, case: VariantKind, generator: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """A variant of the base."""
    blocks, extras = layout.to_blocks(base)
    for name, positions in layout.blocked.items():
        if case.may_differ(name):
            own = positions.start + np.flatnonzero(generator.random(len(positions)) < case.share)
            blocks[own] += generator.standard_normal((len(own), case.block_size), np.float32)
    late = {name: values + np.float32(generator.normal()) for name, values in extras.items() if is_late(name)}
    return dict(layout.from_blocks(blocks, {**extras, **late}))


def told(case: str, reports: list[LoadingReport]) -> None:
    """Print claims with the medians and ranges of the ratios."""
    for kind in KINDS:
        for name in reports[0].load_ratios(kind):
            loads = [report.load_ratios(kind)[name] for report in reports]
            claim(
                f"{case}: {kind} loading of variants, plain files by {name} / registry",
                at_least=TARGETS.get((kind, name)),
                ratio=float(np.median(loads)),
                range=[min(loads), max(loads)],
                with_inference=float(np.median([report.total_ratios(kind)[name] for report in reports])),
            )


def lines_of(found: LoadingReport) -> list[str]:
    """Lines for a reader: the times and bytes of one repetition."""
    lines = [
        f"{found.num_queries} queries over {found.num_variants} variants, {found.memory_bytes} bytes for each arm "
        f"on top of its process, bounded by {found.limited_by}; "
        f"the disk reads {found.disk_bytes_per_second / 1e6:.0f} MB/s"
    ]
    for kind in KINDS:
        arms, loads = found.arms(kind), found.load_ratios(kind)
        lines += [f"{kind}, {_line(name, arm, loads.get(name))}" for name, arm in arms.items()]
        if "store" in arms and arms["store"].infer_seconds is not None:
            totals = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.total_ratios(kind).items())
            lines.append(f"{kind}, with inference, over the store's time: {totals}")
    lines += [f"{name}: {why}" for name, why in found.failures.items()]
    if found.page_cache_dropped is False:
        lines.append("the page cache kept files that it was told to drop: the cold measurement was not cold")
    return lines


def _line(name: str, arm: Arm, ratio: float | None) -> str:
    disk = "" if arm.disk_bytes is None else f", {arm.disk_bytes} bytes from the disk"
    inference = "" if arm.infer_seconds is None else f", inference {arm.infer_seconds:.4f} s"
    return (
        f"{name}: {arm.load_seconds:.4f} s for {arm.misses} loads of {arm.bytes_read} bytes{inference}{disk}, "
        f"{arm.cached_bytes} cached at the end" + ("" if ratio is None else f"; ratio {ratio:.1f}")
    )


def measure_cases(arguments: argparse.Namespace) -> dict[str, list[LoadingReport]]:
    """{case: its repetitions}, each printed when it is done."""
    workload = Encoding()
    measured: dict[str, list[LoadingReport]] = {}
    for name in filter(CASES.__contains__, arguments.cases):
        case = CASES[name]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            store = Path(temporary) / "store"
            make_variants(store, workload.model, case, arguments.variants or case.num_variants)
            files = restore_all(store, Path(temporary))
            measured[name] = []
            for _ in range(arguments.repeats):
                report = bench(store, files, num_queries=arguments.queries, workloads=dict.fromkeys(files, workload))
                measured[name].append(report)
                print(f"{name}: " + "\n  ".join(lines_of(report)), flush=True)
    return measured


def main() -> None:
    """Print a line for each measurement, and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [*CASES, ADAPTERS]
    parser.add_argument("--queries", type=int, default=100, help="number of random variants to load")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--variants", type=int, help=f"in each case; default 8, 12 and {_adapter_readers.NUM_ADAPTERS}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a folder with 1.3 GB free; default the system's temporary one")
    arguments = parser.parse_args()
    for name, reports in measure_cases(arguments).items():
        told(name, reports)
    if ADAPTERS in arguments.cases:
        number = arguments.variants or _adapter_readers.NUM_ADAPTERS
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            _adapter_readers.measure_adapters(Path(temporary), number, arguments.queries, arguments.repeats)


if __name__ == "__main__":
    main()

"""`fedpriv dedup bench`: how long serving from a store takes, compared with plain files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import AsJson, StorePath, result_of, show
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.dedup.bench import Arm, Report, Workload


def bench(
    store: StorePath,
    files: Annotated[
        Path | None, typer.Option(help="Folder of the variants that were deduplicated; by default they are restored.")
    ] = None,
    queries: Annotated[int, typer.Option(help="Number of random variants to load.", min=1)] = 100,
    memory_mb: Annotated[
        float | None, typer.Option(help="MiB for loaded variants; by default a third of what all of them need.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the queries.", min=0)] = 0,
    cold: Annotated[
        bool | None, typer.Option("--cold/--warm", help="With files out of the page cache, or in it; by default both.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="MODULE:FUNCTION that returns a fedpriv.dedup.bench.Workload, or one for each variant as a dict, to "
            "measure inference too; by default the run's."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """How long loading random variants takes from a store, and from plain safetensors files, in as much memory.

    Each way has a process of its own, whose whole memory is bounded. Every load is checked against the variant, bit for
    bit. The store is only read.

    Example: fedpriv dedup bench store --queries 100

    Example: fedpriv dedup bench store --files variants --workload study:workload --cold --json
    """
    from fedpriv.dedup import bench as measuring

    if memory_mb is not None and not memory_mb * 2**20 >= 1:
        raise InputError(f"--memory-mb {memory_mb}: must be > 0")
    used = _workloads(workload, store)
    # Beside the store, so on the same disk: the system's temporary folder may be on another one.
    with tempfile.TemporaryDirectory(dir=store.absolute().parent if store.is_dir() else None) as temporary:
        found = measuring.bench(
            store,
            measuring.restore_all(store, Path(temporary)) if files is None else _files(files),
            num_queries=queries,
            memory_bytes=None if memory_mb is None else int(memory_mb * 2**20),
            seed=seed,
            cold=cold is not False,
            warm=cold is not True,
            workloads=used,
        )
    show(found.as_dict(), _lines(found), as_json)


def _lines(found: Report) -> list[str]:
    from fedpriv.dedup.bench import KINDS

    lines = [
        f"{found.num_queries} queries over {found.num_variants} variants, {found.memory_bytes} bytes for each arm "
        f"beside its process, bounded by {found.limited_by}; "
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


def _files(folder: Path) -> dict[str, Path]:
    """{variant: its safetensors file}."""
    from fedpriv.dedup import variants

    found = {}
    for described in sorted(folder.glob("*/variant.json")):
        tensors = sorted(described.parent.glob("*.safetensors"))
        if len(tensors) != 1:
            raise InputError(f"{described.parent}: holds {len(tensors)} safetensors files; a variant is one")
        found[variants.read(described.parent).name] = tensors[0]
    if not found:
        raise InputError(f"files = {str(folder)!r}: holds no variants; each is a folder with a variant.json")
    return found


def _workloads(name: str, store: Path) -> Mapping[str, Workload]:
    """{variant: its workload}: the named ones, or that of the run that the store belongs to, or none."""
    made: Any
    if name:
        made = result_of("workload", name)
    elif (store.absolute().parent / "config.toml").exists():
        from fedpriv.adapter_variants import AdapterWorkload

        made = AdapterWorkload(store.absolute().parent)
    else:
        return {}
    from fedpriv.dedup.store import Store

    with Store(store, read_only=True) as opened:
        workloads = made if isinstance(made, Mapping) else dict.fromkeys(opened.names, made)
    for workload in workloads.values():
        if missing := [part for part in ("model", "infer") if not hasattr(workload, part)]:
            raise InputError(
                f"workload = {name!r}: what it returns has no {missing[0]}; see fedpriv.dedup.bench.Workload"
            )
    return workloads

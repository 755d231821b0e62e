"""`fedpriv dedup bench`: how long serving from a store takes, compared with plain files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from fedpriv.cli.options import OneOf, StorePath, result_of
from fedpriv.cli.output import AsJson, show
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.dedup.bench import Comparison, Report, Workload


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
    reader: Annotated[
        str,
        typer.Option(
            click_type=OneOf("fedpriv.dedup.bench_plain_files:Reader", check=False),
            help="How plain files are read: directly, in one piece, or by safetensors, which is slower.",
        ),
    ] = "direct",
    workload: Annotated[
        str,
        typer.Option(
            help="MODULE:FUNCTION that returns a fedpriv.dedup.bench.Workload, to measure inference too; by default "
            "the run's."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """How long loading random variants takes from a store, and from plain safetensors files within the same memory.

    Every load is checked against the variant, bit for bit. The store is only read.

    Example: fedpriv dedup bench store --queries 100

    Example: fedpriv dedup bench store --files variants --workload study:workload --cold --json
    """
    from fedpriv.dedup import bench as measuring
    from fedpriv.dedup.bench_plain_files import Reader

    if memory_mb is not None and not memory_mb * 2**20 >= 1:
        raise InputError(f"--memory-mb {memory_mb}: must be > 0")
    if reader not in get_args(Reader):
        raise InputError(f"--reader {reader}: must be one of {', '.join(get_args(Reader))}")
    used = _workload(workload, store)
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
            reader=cast(Reader, reader),
            workload=used,
        )
    show(found.as_dict(), _lines(found), as_json)


def _lines(found: Report) -> list[str]:
    lines = [f"{found.num_queries} queries over {found.num_variants} variants, {found.memory_bytes} bytes for each arm"]
    lines += [_line(kind, taken) for kind, taken in (("cold", found.cold), ("warm", found.warm)) if taken is not None]
    if found.page_cache_dropped is False:
        lines.append("the page cache kept files that it was told to drop: the cold measurement was not cold")
    return lines


def _line(kind: str, taken: Comparison) -> str:
    arms = [
        f"{name} {arm.load_seconds:.4f} s for {arm.misses} loads of {arm.bytes_read} bytes"
        for name, arm in (("plain files", taken.plain), ("store", taken.store))
    ]
    line = f"{kind}: {', '.join(arms)}, ratio {taken.load_ratio:.1f}"
    return line if taken.total_ratio is None else f"{line}; with inference {taken.total_ratio:.2f}"


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


def _workload(name: str, store: Path) -> Workload | None:
    """The named workload, or that of the run that the store belongs to, or None."""
    if not name:
        if not (store.absolute().parent / "config.toml").exists():
            return None
        from fedpriv.adapter_variants import AdapterEvaluator, AdapterWorkload

        return AdapterWorkload(AdapterEvaluator.of_run(store.absolute().parent))
    made = result_of("workload", name)
    if missing := [part for part in ("model", "infer") if not hasattr(made, part)]:
        raise InputError(f"workload = {name!r}: what it returns has no {missing[0]}; see fedpriv.dedup.bench.Workload")
    checked: Workload = made
    return checked

"""Loading and inference of 100 queries, by a store and by plain files, in equally bounded processes: Figures 5 and 8.

The models are made: as many of MiniLM's shape (91 MB) as the paper served, each with as many blocks of its own as the
paper's DRD left, at random places, and all others a base's. What a load takes depends on the blocks' number and size,
not on who chose them. Memory is the paper's in proportion: what its instance leaves for models, over what these take as
plain files. The disk is slowed to what its volumes read at most. See `simulations.benchmarks.dedup_loading` for what is
measured and how.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedpriv.models.variants.store import Store
from simulations.benchmarks.dedup_loading import Encoding, LoadingReport, VariantKind, bench, make_variants, restore_all
from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.results import DedupResults, section
from simulations.studies.harness import Line, run_missing, table

STORE, PLAIN = "store", ("mmap", "safetensors")
NUM_QUERIES = 100
# About 350 in a model; the paper's have 238 to 288.
BLOCK_SIZE = 2**16

DISKS: Mapping[str, float | None] = {"hard disk": 90e6, "SSD": 250e6, "this disk": None}
"""{volume: the most bytes a second that Amazon's magnetic and gp2 volumes read}; None for what this machine gives."""

# Bytes of float32 weights, and what an instance of 8 or 16 GiB leaves for models: 1.5 GB are ours for all else.
_ROBERTA, _VIT, _RESNET = (4e6 * millions for millions in (124.6, 304.3, 60.2))
_XLARGE, _2XLARGE = (num * 2**30 - 1.5e9 for num in (8, 16))


@dataclass(frozen=True)
class ServingCell:
    """Models that the paper served.

    Attributes:
        scenario: its name.
        num_models: their number.
        plain_bytes: of all as plain files.
        memory_bytes: for models.
    """

    scenario: str
    num_models: int
    plain_bytes: float
    memory_bytes: float

    @property
    def key(self) -> str:
        """Unique among the cells, and among those of deduplication."""
        return f"{self.scenario}_served"

    @property
    def own_share(self) -> float:
        """The share of its blocks that every model but the base has for itself, which gives the paper's C.R."""
        ratio, _ = paper.of_search("drd", self.scenario) or (100.0, 0)
        return (ratio / 100 * self.num_models - 1) / (self.num_models - 1)


SERVED = (
    ServingCell("A2", 5, 5 * _ROBERTA, _XLARGE),
    ServingCell("A3", 5, 5 * _ROBERTA, _XLARGE),
    ServingCell("B1", 10, 10 * _ROBERTA, _XLARGE),
    ServingCell("B2", 10, 10 * _VIT, _XLARGE),
    ServingCell("B3", 20, 20 * _RESNET, _XLARGE),
    ServingCell("hetero", 6, 3 * _ROBERTA + 3 * _VIT, _XLARGE),
    ServingCell("fifty", 50, 20 * _ROBERTA + 10 * _VIT + 20 * _RESNET, _2XLARGE),
)


def serve_all(out: Path, scenarios: Sequence[str]) -> None:
    """Measure each of these scenarios that the paper served and that has no line in `serving.jsonl` yet."""
    chosen = [cell for cell in SERVED if cell.scenario in scenarios]
    tell = "{0[arms][1][times]:.1f} times as fast as mapped files from a hard disk".format
    run_missing(out / "serving.jsonl", chosen, partial(_measured, out), tell, key=itemgetter("key"))


def _measured(out: Path, cell: ServingCell) -> Line:
    workload = Encoding()
    with tempfile.TemporaryDirectory(dir=out, prefix="serving-") as folder:
        store, reports = Path(folder) / "store", dict[str, LoadingReport]()
        kind = VariantKind(
            num_variants=cell.num_models, block_size=BLOCK_SIZE, share=cell.own_share, may_differ=lambda _: True
        )
        make_variants(store, workload.model, kind, cell.num_models)
        files = restore_all(store, Path(folder))
        num_bytes = sum(path.stat().st_size for path in files.values())
        for disk, bytes_per_second in DISKS.items():
            reports[disk] = bench(
                store,
                files,
                num_queries=NUM_QUERIES,
                memory_bytes=int(num_bytes * cell.memory_bytes / cell.plain_bytes),
                warm=False,
                workloads=dict.fromkeys(files, workload),
                arms=(STORE, *PLAIN),
                bytes_per_second=bytes_per_second,
                checked=False,
            )
            print(f"{cell.scenario}, {disk}: {reports[disk].total_ratios('cold')}", flush=True)
        return line_of(cell.scenario, store, reports)


def line_of(name: str, store: Path, reports: Mapping[str, LoadingReport]) -> dict[str, Any]:
    """The arms that did not fail, disk by disk, each with its time and its bytes over the store's."""
    with Store(store, read_only=True) as opened:
        sizes = {"bytes_of_models": opened.tensor_bytes, "bytes_of_store": opened.bytes_stored}
        num_models = len(opened.names)
    arms = []
    for disk, report in reports.items():
        times = {STORE: 1.0, **report.total_ratios("cold")}
        read = report.cold[STORE].disk_bytes if STORE in report.cold else None
        for arm, taken in report.cold.items():
            bytes_over = taken.disk_bytes / read if taken.disk_bytes and read else None
            found = {"times": times.get(arm), "times_bytes": bytes_over}
            arms.append({"disk": disk, "arm": arm, **asdict(taken), **found})
    return {
        "scenario": name,
        "num_models": num_models,
        **sizes,
        "limit_bytes": max((num for report in reports.values() for num in report.limit_bytes.values()), default=0),
        "memory_bytes": max(report.memory_bytes for report in reports.values()),
        "limit": next(iter(reports.values())).limited_by,
        "num_queries": NUM_QUERIES,
        "disk_mb_per_second": {disk: report.disk_bytes_per_second / 1e6 for disk, report in reports.items()},
        "page_cache_dropped": all(report.page_cache_dropped for report in reports.values()),
        "failures": {arm: why for report in reports.values() for arm, why in report.failures.items()},
        "arms": arms,
    }


def serving(results: DedupResults) -> str:
    """Loading and inference of the store and of plain files."""
    if not results.serving:
        return ""
    headers = ("cold", "disk", "store, s", *(f"`{arm}` over it" for arm in PLAIN), "bytes over the store's", "paper's")
    rows = [_row(line, disk) for line in results.serving for disk in DISKS]
    return section(
        "Serving 100 queries under a limit of memory (Figures 5 and 8)",
        "\n".join(_setting(line) for line in results.serving),
        "Each query asks a random model one question. Seconds of loading and inference, with no file in the page cache "
        "at first; the bytes read from the disk are in the order of the times. The machine was busy: seconds leave out "
        "those in which others had the processor, while the disk could read on, and the bytes are exact.",
        table(headers, rows),
        "As many models of MiniLM's shape as the paper served, with as many blocks of their own as its DRD left, under "
        "its memory in proportion, from disks as fast as its volumes are at most. From a slow disk a store gains in "
        "the order of the ratio of bytes, from a fast one little or none: a load copies the blocks that models share.",
    )


def _setting(line: Line) -> str:
    failed = dict[str, str]()
    for arm, why in line["failures"].items():
        failed[why] = f"{failed[why]}, `{arm}`" if why in failed else f"`{arm}`"
    return (
        f"- {line['scenario']}: {line['num_models']} models, {line['bytes_of_models'] / 1e6:.0f} MB, in the store "
        f"{line['bytes_of_store'] / 1e6:.0f} MB; memory for models {line['memory_bytes'] / 1e6:.0f} MB "
        f"({line['limit']}); this disk {line['disk_mb_per_second']['this disk']:.0f} MB/s"
        + "".join(f". {arms}: {why}" for why, arms in failed.items())
        + ("" if line["page_cache_dropped"] else ". **Not cold**: the page cache kept files that it was told to drop")
    )


def _row(line: Line, disk: str) -> Sequence[str]:
    """The store's seconds, and the times and bytes of the other arms over them."""
    arms = {arm["arm"]: arm for arm in line["arms"] if arm["disk"] == disk}
    store = arms.get(STORE)
    seconds = f"{store['load_seconds'] + store['infer_seconds']:.2f}" if store else ""
    times, read = ([_over(arms.get(arm), key) for arm in PLAIN] for key in ("times", "times_bytes"))
    return line["scenario"], disk, seconds, *times, ", ".join(read), paper.SPEEDUPS[line["scenario"]].get(disk, "")


def _over(arm: Line | None, key: str) -> str:
    return f"{arm[key]:.1f}" if arm and arm[key] else ""

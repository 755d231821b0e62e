"""Serving the models of a scenario, deduplicated by `drd`, compared with plain files in equally bounded processes.

MiniLM is served whole, as a user without deduplication would keep it: four frozen layers, which all models share, and
the two that were trained. See `simulations.benchmarks.dedup_loading` for what is measured and how.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from fedpriv.errors import InputError
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.store import Store
from simulations.benchmarks.dedup_loading import KINDS, LoadingReport, Workload, bench, restore_all
from simulations.studies.dedup.cells import cells
from simulations.studies.dedup.data import records
from simulations.studies.dedup.networks import encoder, network, whole
from simulations.studies.dedup.report.paper import SPEEDUPS, SPEEDUPS_OF_CLUSTERS
from simulations.studies.dedup.report.results import DedupResults, section
from simulations.studies.dedup.scenarios import SCENARIOS, Model
from simulations.studies.harness import Line, lines, run_missing, table

SERVED = ("minilm", "hetero", "fifty")
"""The scenarios of Figures 5 and 8 whose models take at least some megabytes together."""

REPEATS, NUM_QUERIES, TOKENS = 3, 100, 16


STORE = "store"
# What loading and inference must be of the store's, cold, at least.
WANTED = {"safetensors": 10, "straight": 3}


@dataclass(frozen=True)
class ServingCell:
    """A scenario, by name, that is served."""

    scenario: str

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return self.scenario


def serve_all(out: Path) -> None:
    """Measure every scenario that has no line in `serving.jsonl` yet.

    Raises:
        InputError: there is no store of `drd`.
    """
    path, served = out / "serving.jsonl", map(ServingCell, SERVED)
    run_missing(path, served, partial(_measured, out), lambda _: f"{REPEATS} repeats", key=itemgetter("scenario"))


def _measured(out: Path, cell: ServingCell) -> Line:
    with tempfile.TemporaryDirectory(dir=out, prefix="serving-") as folder:
        return _measured_in(Path(folder), out, cell.scenario)


def _measured_in(folder: Path, out: Path, name: str) -> Line:
    store = _whole_store(out, name, folder / "store") if name == "minilm" else _store_of(out, name)
    files = restore_all(store, folder)
    models = {model.name: model for model in SCENARIOS[name].all_models}
    workloads = {each: _workload(out, name, model) for each, model in models.items()}
    reports = []
    for seed in range(REPEATS):
        reports.append(bench(store, files, num_queries=NUM_QUERIES, seed=seed, workloads=workloads))
        print(f"{name}, {seed + 1} of {REPEATS}: cold load ratios {reports[-1].load_ratios('cold')}", flush=True)
    return line_of(name, store, reports)


def line_of(name: str, store: Path, reports: list[LoadingReport]) -> dict[str, Any]:
    """Medians over repetitions, each with other queries, of the arms that never failed."""
    with Store(store, read_only=True) as opened:
        sizes = {"bytes_of_models": opened.tensor_bytes, "bytes_of_store": opened.bytes_stored}
        num_models = len(opened.names)
    first = reports[0]
    arms = []
    for temperature in KINDS:
        for arm in (arm for arm in first.cold if not any(arm in report.failures for report in reports)):
            taken = [asdict(report.arms(temperature)[arm]) for report in reports]
            loads = [each["load_seconds"] for each in taken]
            middle = {key: median(each[key] for each in taken) for key, value in taken[0].items() if value is not None}
            arms.append(
                {"arm": arm, "temperature": temperature, **middle, "load_seconds_range": [min(loads), max(loads)]}
            )
    return {
        "scenario": name,
        "num_models": num_models,
        **sizes,
        "memory_bytes": first.memory_bytes,
        "limit_bytes": max((num for report in reports for num in report.limit_bytes.values()), default=0),
        "limit": first.limited_by,
        "num_queries": first.num_queries,
        "disk_mb_per_second": median(report.disk_bytes_per_second for report in reports) / 1e6,
        "page_cache_dropped": all(report.page_cache_dropped for report in reports),
        "failures": {arm: why for report in reports for arm, why in report.failures.items()},
        "arms": arms,
    }


class InferenceQuery:
    """A `Workload`: a model answers one record. Another process builds the model again.

    Args:
        build: makes the model, for inference.
        inputs: of the model.
    """

    def __init__(self, build: Callable[[], nn.Module], inputs: torch.Tensor) -> None:
        self.model, self._build, self._inputs = build().eval(), build, inputs

    def __reduce__(self) -> tuple[type[InferenceQuery], tuple[Callable[[], nn.Module], torch.Tensor]]:
        return InferenceQuery, (self._build, self._inputs)

    @torch.inference_mode()
    def infer(self) -> None:
        """Answer it."""
        self.model(self._inputs)


def _whole_minilm() -> nn.Module:
    model: nn.Module = encoder().model
    return model


def _workload(out: Path, name: str, model: Model) -> Workload:
    if name == "minilm":
        return InferenceQuery(_whole_minilm, torch.arange(1, TOKENS + 1).unsqueeze(0))
    inputs, _ = next(iter(records(out, model.architecture, model.task, "validation").passes()))
    return InferenceQuery(partial(network, model.architecture), inputs[:1].clone())


def _store_of(out: Path, name: str) -> Path:
    """The store of `drd` on public validation.

    Raises:
        InputError: it is missing.
    """
    (cell,) = (each for each in cells(SCENARIOS[name]) if (each.table, each.row) == ("algorithms", "drd"))
    store = out / "cells" / cell.key / "store"
    if cell.key not in {line["key"] for line in lines(out / "runs.jsonl")}:
        raise InputError(f"out = {str(out)!r}: holds no store of drd for {name}; run comes first")
    return store


def _whole_store(out: Path, name: str, path: Path) -> Path:
    """A store of the whole models: equal blocks of frozen layers are stored once."""
    with Store(_store_of(out, name), read_only=True) as trained, Store(path) as store:
        for each in trained.names:
            tensors = {key: value.numpy() for key, value in whole(trained.tensors(each)).items()}
            layout = layout_of(tensors, SCENARIOS[name].block_size)
            store.add(each, layout, *layout.to_blocks(tensors))
    return path


def serving(results: DedupResults) -> str:
    """Loading and inference of the store and of plain files."""
    if not results.serving:
        return ""
    headers = ("cold, over the store", "store, s", *(f"`{arm}` (target)" for arm in WANTED), "`mmap`")
    return section(
        "Serving 100 queries under a limit of memory (Figures 5 and 8)",
        "\n".join(_setting(line) for line in results.serving),
        "Each query asks a random model one question; medians of the repeats of loading and inference, with no file in "
        "the page cache at first.",
        table(headers, [_row(line["scenario"], cold) for line in results.serving if STORE in (cold := _cold(line))]),
        f"The paper's speed-ups: {SPEEDUPS_OF_CLUSTERS} (Figure 5).",
    )


def _setting(line: Line) -> str:
    papers, failed = SPEEDUPS.get(line["scenario"]), dict[str, str]()
    for arm, why in line["failures"].items():
        failed[why] = f"{failed[why]}, `{arm}`" if why in failed else f"`{arm}`"
    return (
        f"- {line['scenario']}: {line['num_models']} models, {_mb(line['bytes_of_models'])} MB; limit "
        f"{_mb(line['limit_bytes'])} MB ({line['limit']}), disk {line['disk_mb_per_second']:.0f} MB/s"
        + (f". The paper's speed-up: {papers}" if papers else "")
        + "".join(f". {arms}: {why}" for why, arms in failed.items())
        + ("" if line["page_cache_dropped"] else ". **Not cold**: the page cache kept files that it was told to drop")
    )


def _cold(line: Line) -> dict[str, float]:
    """The seconds of every arm that never failed."""
    return {arm["arm"]: _total(arm) for arm in line["arms"] if arm["temperature"] == "cold"}


def _row(scenario: str, cold: Mapping[str, float]) -> Sequence[str]:
    """The store's seconds, cold, and those of the other arms over them; a target that is missed is marked."""
    store = cold[STORE]
    cells = [scenario, f"{store:.2f}"]
    for arm in (*WANTED, "mmap"):
        ratio = cold[arm] / store if arm in cold else None
        wanted = f" ({'' if (ratio or 0) >= WANTED[arm] else '**not** '}{WANTED[arm]})" if arm in WANTED else ""
        cells.append("" if ratio is None else f"{ratio:.1f}{wanted}")
    return cells


def _mb(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.0f}"


def _total(arm: Line) -> float:
    return float(arm["load_seconds"] + arm["infer_seconds"])

"""Deduplication of the scenarios in every way of the study, with one line and one store for each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedpriv.dedup import variants
from fedpriv.dedup.blocks import layout_of
from fedpriv.dedup.outcomes import Outcome
from fedpriv.dedup.pipeline import deduplicate
from fedpriv.dedup.planning import Settings
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PrivateRecords, PrivateValidation
from fedpriv.dedup.variants import Described
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import SeededSource
from simulations.studies.dedup.cells import ALGORITHMS, Cell, cells
from simulations.studies.dedup.data import records
from simulations.studies.dedup.evaluator import RecordsEvaluator
from simulations.studies.dedup.lines import append, lines
from simulations.studies.dedup.records import Tensors
from simulations.studies.dedup.scenarios import DELTA, Model, Scenario
from simulations.studies.dedup.train import SPLITS, accuracies

# Public records on which saliency is measured where the validation records count as private.
SALIENCY_RECORDS = 600


def run_all(out: Path, scenarios: Sequence[Scenario]) -> None:
    """Run every cell that has no line in `runs.jsonl` yet.

    Raises:
        InputError: a scenario's models have not been trained.
    """
    for scenario in scenarios:
        if not (out / "variants" / scenario.name).is_dir():
            raise InputError(f"scenario = {scenario.name}: {out} holds no models of it; train comes first")
    done = {line["key"] for line in lines(out / "runs.jsonl")}
    for scenario in scenarios:
        for cell in cells(scenario):
            if cell.key not in done:
                line = run_cell(out, scenario, cell)
                append(out / "runs.jsonl", line)
                print(
                    f"{cell.key}: compression ratio {line['block_ratio']:.3f}, {line['num_validations']} validations, "
                    f"largest drop {max(line['drops']['validation'].values()):.4f}, {line['seconds']:.1f} s",
                    flush=True,
                )


def run_cell(out: Path, scenario: Scenario, cell: Cell) -> dict[str, Any]:
    """Deduplicate into a fresh store under `cells`, next to the descriptions with its bounds; the line of results."""
    folder, originals = out / "cells" / cell.key, out / "variants" / scenario.name
    if folder.exists():  # left by an interrupted run
        shutil.rmtree(folder)
    paths = {path.name: path for path in sorted(originals.iterdir())}
    tensors: dict[str, Tensors] = {name: variants.read_tensors(path) for name, path in paths.items()}
    described = bounded([variants.read(path) for path in paths.values()], cell)
    for each in described:
        (folder / "variants" / each.name).mkdir(parents=True)
        variants.describe(folder / "variants" / each.name, each)
    began = time.perf_counter()
    with Store(folder / "store") as store:
        outcomes = deduplicated(out, described, tensors, scenario, cell, store)
        return {
            "key": cell.key,
            "cell": asdict(cell),
            "seconds": time.perf_counter() - began,
            "num_validations": sum(outcome.num_validations for outcome in outcomes),
            "bytes_ratio": store.compression_ratio,
            "block_ratio": block_ratio(store, tensors, cell.block_size),
            "drops": drops(out, store, scenario),
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }


def bounded(described: Sequence[Described], cell: Cell) -> list[Described]:
    """The descriptions as a cell needs them.

    Where utilities need not keep their order, all variants state the least one; on private records none is stated.
    """
    least = min(each.utility for each in described if each.utility is not None)
    stated = None if cell.cutoff else least
    return [
        replace(
            each,
            utility=each.utility if cell.ordered else stated,
            epsilon_bound=each.epsilon_bound if cell.epsilon_bound is None else cell.epsilon_bound,
            utility_bound=each.utility_bound if cell.utility_bound is None else cell.utility_bound,
        )
        for each in described
    ]


def deduplicated(
    out: Path,
    described: Sequence[Described],
    tensors: Mapping[str, Tensors],
    scenario: Scenario,
    cell: Cell,
    store: Store,
) -> list[Outcome]:
    """The outcome for each variant; all variants are stored."""
    name, options = ALGORITHMS[cell.algorithm]
    settings = Settings(
        block_size=cell.block_size,
        algorithm=name,
        options=options,
        aggregation=cell.aggregation,
        metric=cell.metric,
        strategy=cell.strategy,
        fairness="outcome" if cell.epsilon_bound is not None else scenario.fairness,
    )
    evaluator = evaluator_of(out, scenario.models[0], cell)
    private = None
    if cell.cutoff:
        private = PrivateValidation(
            epsilon=scenario.validation_epsilon,
            charge=lambda target, event: None,  # no ledger: the records are public, and the check counts anew
            source=SeededSource("dedup study", cell.key),
            cutoff=cell.cutoff,
        )
    return deduplicate(described, tensors.__getitem__, evaluator, store, settings, private=private)


def evaluator_of(out: Path, model: Model, cell: Cell) -> RecordsEvaluator:
    """What a model is validated by in a cell: on its task's validation records."""
    validation = records(out, model.architecture, model.task, "validation")
    # Saliency measured on public records costs private ones nothing.
    public = records(out, model.architecture, model.task, "public").first(SALIENCY_RECORDS)
    return RecordsEvaluator(
        model.architecture,
        validation,
        saliency_records=public if cell.cutoff else validation,
        saliency=cell.saliency,
        private=PrivateRecords(data_set="validation", delta=DELTA) if cell.cutoff else None,
    )


def block_ratio(store: Store, tensors: Mapping[str, Tensors], block_size: int) -> float:
    """The paper's compression ratio: distinct blocks of all models, after over before (section 5.1.3)."""
    before = {row.tobytes() for each in tensors.values() for row in layout_of(each, block_size).to_blocks(each)[0]}
    return int((store.reference_counts > 0).sum()) / len(before)


def drops(out: Path, store: Store, scenario: Scenario) -> dict[str, dict[str, float]]:
    """{split: {variant that may be a target: by how much its accuracy fell}}; the records are in truth public."""
    result: dict[str, dict[str, float]] = {split: {} for split in SPLITS}
    known = {line["name"]: line["accuracy"] for line in lines(out / "models.jsonl")}
    for model in scenario.models:
        before, after = known[model.name], accuracies(out, model, store.restore(model.name))
        for split in SPLITS:
            result[split][model.name] = before[split] - after[split]
    return result

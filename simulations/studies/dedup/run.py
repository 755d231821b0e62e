"""Deduplication of the scenarios in every way of the study, with one line and one store for each cell."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.models.dedup.pipeline import deduplicate
from fedpriv.models.dedup.planning import DedupSettings
from fedpriv.models.dedup.saliency import MEASURES, Saliency
from fedpriv.models.dedup.validation import PrivateQueries, PrivateRecords, Utilities, Utility
from fedpriv.models.dedup.work import Outcome
from fedpriv.models.variants import folders
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.studies.dedup.cells import SEARCH_OF_ROW, DedupCell, cells
from simulations.studies.dedup.data import Split, Task, records
from simulations.studies.dedup.dp_sgd import losses
from simulations.studies.dedup.networks import Architecture, load, network
from simulations.studies.dedup.records import Pass, StudyRecords, Tensors
from simulations.studies.dedup.scenarios import DELTA, SCENARIOS, Model, Scenario
from simulations.studies.dedup.train import right, right_answers
from simulations.studies.harness import Line, lines, run_missing

# Public records on which saliency is measured where the validation records count as private.
SALIENCY_RECORDS = 600

# Those that take longest first, so that no process is left with one at the end.
_BY_TIME = ("hetero", "fifty", "B3", "B2", "minilm", "A5", "A4")


def run_all(out: Path, scenarios: Sequence[Scenario], *, jobs: int = 2, only: Sequence[str] = ()) -> None:
    """Run every cell that has no line in `runs.jsonl` yet, in so many processes; `only` has patterns of their keys.

    Raises:
        InputError: a scenario's models have not been trained.
    """
    for scenario in scenarios:
        if not (out / "variants" / scenario.name).is_dir():
            raise InputError(f"scenario = {scenario.name}: {out} holds no models of it; train comes first")
    ordered = sorted((cell for scenario in scenarios for cell in cells(scenario)), key=_place)
    run_missing(out / "runs.jsonl", ordered, partial(run_cell, out), _told, jobs=jobs, only=only)


def _place(cell: DedupCell) -> int:
    return _BY_TIME.index(cell.scenario) if cell.scenario in _BY_TIME else len(_BY_TIME)


def _told(line: Line) -> str:
    return f"compression ratio {line['block_ratio']:.3f}, {line['num_validations']} validations"


def run_cell(out: Path, cell: DedupCell) -> Line:
    """Deduplicate into a fresh store under `cells`, next to the descriptions with its bounds."""
    scenario = SCENARIOS[cell.scenario]
    folder, originals = out / "cells" / cell.key, out / "variants" / scenario.name
    paths = {model.name: originals / model.name for model in scenario.stored(cell.base)}
    tensors: dict[str, Tensors] = {name: folders.read_tensors(path) for name, path in paths.items()}
    described = bounded([folders.read(path) for path in paths.values()], scenario, cell)
    for each in described:
        (folder / "variants" / each.name).mkdir(parents=True, exist_ok=True)
        folders.describe(folder / "variants" / each.name, each)
    began = time.perf_counter()
    with Store(folder / "store", empty=True) as store:  # an interrupted run may have left one
        outcomes = deduplicated(out, described, tensors, cell, store)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "num_validations": sum(outcome.num_validations for outcome in outcomes),
            "bytes_ratio": store.compression_ratio,
            "block_ratio": block_ratio(store, tensors, cell.block_size),
            "accuracy": accuracy(out, store, outcomes, cell),
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }


def bounded(described: Sequence[Described], scenario: Scenario, cell: DedupCell) -> list[Described]:
    """The descriptions as a cell needs them.

    Where utilities need not keep their order, all variants of a task state the least one; on private records none is
    stated.
    """
    tasks = {model.name: model.task for model in scenario.all_models}
    stated = [(each.utility, tasks[each.name]) for each in described if each.utility is not None]
    least = {task: min(utility for utility, other in stated if other == task) for _, task in stated}
    return [
        replace(
            each,
            utility=each.utility if cell.ordered else None if cell.private else least[tasks[each.name]],
            epsilon_bound=each.epsilon_bound if cell.epsilon_bound is None else cell.epsilon_bound,
            utility_bound=each.utility_bound if cell.utility_bound is None else cell.utility_bound,
        )
        for each in described
    ]


def deduplicated(
    out: Path, described: Sequence[Described], tensors: Mapping[str, Tensors], cell: DedupCell, store: Store
) -> list[Outcome]:
    """The outcome for each variant; all variants are stored."""
    scenario, (name, options) = SCENARIOS[cell.scenario], SEARCH_OF_ROW[cell.search]
    settings = DedupSettings(
        block_size=cell.block_size,
        algorithm=name,
        options=options,
        aggregation=cell.aggregation,
        metric=cell.metric,
        strategy=cell.strategy,
        max_distance=cell.max_distance,
        fairness="outcome" if cell.epsilon_bound is not None else scenario.fairness,
        acceptance=cell.acceptance,
        cutoff=cell.cutoff,
    )
    private = None
    if cell.private:
        private = PrivateQueries(
            epsilon=scenario.validation_epsilon,
            charge=lambda target, event: None,  # no ledger: the records are public, and the check counts again
            source=SeededSource("dedup study", cell.key),
        )
    evaluators = {
        model.name: evaluator(out, model.architecture, model.task, cell.split, cell.saliency, cell.private)
        for model in scenario.stored(cell.base)
    }
    return deduplicate(described, tensors.__getitem__, evaluators, store, settings, private=private)


class RecordsEvaluator:
    """Tells which records of a task are answered correctly.

    Args:
        architecture: of the models.
        validation: the records that answers are counted on.
        saliency_records: public records on which the saliency of weights is measured; None for validation records.
        saliency: name of the measure.
        private: the data set of the validation records, if they count as private.
    """

    utility: Utility = "accuracy"

    def __init__(
        self,
        architecture: Architecture,
        validation: StudyRecords,
        *,
        saliency_records: StudyRecords | None,
        saliency: str = "gradient",
        private: PrivateRecords | None = None,
    ) -> None:
        self.num_records, self.private = len(validation), private
        self._validation, self._measure = validation, MEASURES.named(saliency)
        self._saliency_records = saliency_records
        self._passes: dict[bytes, list[Pass]] = {}
        self._model = network(architecture).eval()

    def utilities(self, tensors: Mapping[str, NDArray[Any]], records: NDArray[np.int64]) -> Utilities:
        """Which of the validation records the model with these tensors answers correctly."""
        passes = self._passes.setdefault(records.tobytes(), list(self._validation.passes(records.tolist())))
        found = np.empty(len(records))
        found[self._validation.order(records)] = right_answers(load(self._model, tensors), passes).numpy()
        return found

    def saliency(self, tensors: Mapping[str, NDArray[Any]], records: NDArray[np.int64]) -> Saliency:
        """How much each weight matters to the loss on the saliency's records, or these of the validation records."""
        public = self._saliency_records
        passes = self._validation.passes(records.tolist()) if public is None else public.passes()
        batches = [{"inputs": inputs, "labels": labels} for inputs, labels in passes]
        return self._measure(load(self._model, tensors), batches, _losses)


def _losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return losses(model, (batch["inputs"], batch["labels"]))


@lru_cache(maxsize=16)
def evaluator(
    out: Path, architecture: Architecture, task: Task, split: Split, saliency: str, private: bool
) -> RecordsEvaluator:
    """The evaluator of a model; one for all models of an architecture and task, which are evaluated one at a time."""
    validation = records(out, architecture, task, split)
    return RecordsEvaluator(
        architecture,
        validation,
        # Saliency measured on public records costs private ones nothing.
        saliency_records=records(out, architecture, task, "public").first(SALIENCY_RECORDS) if private else None,
        saliency=saliency,
        private=PrivateRecords(data_set=f"validation-{task}", delta=DELTA) if private else None,
    )


def block_ratio(store: Store, tensors: Mapping[str, Tensors], block_size: int) -> float:
    """The paper's compression ratio: distinct blocks of all models, after over before (section 5.1.3)."""
    before = {row.tobytes() for each in tensors.values() for row in layout_of(each, block_size).to_blocks(each)[0]}
    return int((store.reference_counts > 0).sum()) / len(before)


def accuracy(
    out: Path, store: Store, outcomes: Sequence[Outcome], cell: DedupCell
) -> dict[str, dict[str, tuple[float, float]]]:
    """{"validation", "test": {variant of the scenario: its accuracy before and after}}; in truth all are public.

    "validation" are the records that the cell was validated on.
    """
    trained = {line["name"]: line["accuracy"] for line in lines(out / "models.jsonl")}
    by_name = {outcome.name: outcome for outcome in outcomes}
    splits: dict[str, Split] = {"validation": cell.split, "test": "test"}
    return {
        key: {
            model.name: (trained[model.name][split], _after(out, store, model, split, by_name[model.name], trained))
            for model in SCENARIOS[cell.scenario].models
        }
        for key, split in splits.items()
    }


def _after(
    out: Path, store: Store, model: Model, split: Split, outcome: Outcome, trained: Mapping[str, Mapping[str, float]]
) -> float:
    if not outcome.num_replaced:
        return trained[model.name][split]
    return float(right(out, model, split, store.tensors(model.name)).double().mean())

"""The paper's Retrain: models trained anew with the epsilons that deduplication gave them, and not deduplicated.

The upper limit of what a model's accuracy could be at that epsilon.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from simulations.studies.dedup.lines import append, lines
from simulations.studies.dedup.scenarios import SCENARIOS, Model
from simulations.studies.dedup.train import accuracies, done, trained

SCENARIO_NAMES = ("A1", "A2", "A3", "A4", "A5")

Target = tuple[str, Model, float]
"""Scenario, model, and epsilon after deduplication."""


def retrain_all(out: Path, *, jobs: int = 2) -> None:
    """Train every target of `drd` in A1 to A5 that has no line in `retrain.jsonl` yet.

    Raises:
        InputError: there are no results of `drd`.
    """
    wanted = targets(out)
    known = {(line["scenario"], line["name"]) for line in lines(out / "retrain.jsonl")}
    missing = [target for target in wanted if (target[0], target[1].name) not in known]
    for line in done(partial(_retrained, out), missing, jobs):
        append(out / "retrain.jsonl", line)
        print(f"{line['scenario']} {line['name']}: accuracy {line['accuracy']['test']:.3f}", flush=True)


def targets(out: Path) -> list[Target]:
    """The targets of `drd` on public validation.

    Raises:
        InputError: there are none.
    """
    found = []
    for line in lines(out / "runs.jsonl"):
        cell = line["cell"]
        if (cell["table"], cell["row"]) == ("algorithms", "drd") and cell["scenario"] in SCENARIO_NAMES:
            models = {model.name: model for model in SCENARIOS[cell["scenario"]].models}
            found += [
                (cell["scenario"], models[outcome["name"]], outcome["epsilon_after"])
                for outcome in line["outcomes"]
                if outcome["bases"]
            ]
    if not found:
        raise InputError(f"out = {str(out)!r}: holds no results of drd in A1 to A5; run comes first")
    return found


def _retrained(out: Path, target: Target) -> dict[str, Any]:
    scenario, model, epsilon = target
    began = time.perf_counter()
    tensors, _ = trained(out, model, epsilon=epsilon)
    return {
        "scenario": scenario,
        "name": model.name,
        "epsilon": epsilon,
        "accuracy": accuracies(out, model, tensors),
        "seconds": time.perf_counter() - began,
    }

"""Training of the study's models, and each scenario's folder of variants.

The records are public, so sampling and noise are seeded and the study can be repeated; real data would need
`SecureSource`. Each model starts from weights trained on public records, the same for all of its architecture and, for
MiniLM, task.

The paper's Retrain trains models again with the epsilons that deduplication gave them, and does not deduplicate them:
the upper limit of what a model's accuracy could be at that epsilon.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.files import replaced_file
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import History, Upload
from fedpriv.models.variants.folders import Described
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.studies.dedup.data import TEXT_SIZES, Split, Task, prepare, records
from simulations.studies.dedup.dp_sgd import train_privately, train_publicly
from simulations.studies.dedup.networks import load, network, to_arrays
from simulations.studies.dedup.records import Pass, Tensors, together
from simulations.studies.dedup.scenarios import DELTA, RECIPES, SCENARIOS, Model, Scenario, schedule
from simulations.studies.harness import Line, in_processes, lines, run_missing

REFERENCES = "references.jsonl"
SCENARIO_NAMES = ("A1", "A2", "A3", "A4", "A5")
"""The scenarios whose targets are trained again."""

SPLITS: tuple[Split, ...] = ("tuning", "validation", "test")

# Those that take longest first, so that no worker is left with one at the end.
_BY_TIME = ("minilm", "vit-large", "resnet", "vit", "perceptron")


def start(out: Path, model: Model) -> Tensors:
    """The weights that a model starts from, trained on public records alone; written when they are first needed."""
    path, recipe = start_path(out, model), RECIPES[model.architecture]
    if not path.is_file():
        trainee = network(model.architecture)
        for name, value in trainee.named_parameters():
            value.requires_grad_(name.startswith(recipe.public_prefix))
        several = [records(out, model.architecture, task, "public") for task in _public_tasks(model)]
        public = together([each.first(recipe.public_records) for each in several])
        print(f"{path.stem}: the start is being trained on {len(public)} public records", flush=True)
        train_publicly(trainee, public, epochs=recipe.public_epochs, learning_rate=recipe.public_learning_rate)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as file:
            safetensors.numpy.save_file(to_arrays(trainee), file.name)
    return safetensors.numpy.load_file(path)


def start_path(out: Path, model: Model) -> Path:
    """Where the weights are that a model starts from."""
    return out / "starts" / f"{model.architecture}-{'-'.join(_public_tasks(model))}.safetensors"


def _public_tasks(model: Model) -> tuple[Task, ...]:
    return RECIPES[model.architecture].public_tasks or (model.task,)


def trained(out: Path, model: Model, *, epsilon: float) -> tuple[Tensors, list[Event]]:
    """A model's weights, and one event for each step.

    Args:
        out: the study's folder.
        model: what is trained.
        epsilon: what its training may cost, instead of the model's own; infinite trains without noise.
    """
    private = records(out, model.architecture, model.task, model.split).part(*model.part)
    how, noise = schedule(model.architecture, len(private), epsilon)
    trainee = load(network(model.architecture), start(out, model))
    source = SeededSource("dedup study", model.name)
    events = train_privately(trainee, private, how, noise_multiplier=noise, source=source)
    return to_arrays(trainee), events


def history(model: Model, events: Sequence[Event]) -> History:
    """One upload for each step: all that the model depends on, public records apart."""
    steps = enumerate(events, start=1)
    return History(
        name=model.name,
        ancestors=frozenset(
            Upload(data_set=model.data_set, run=model.name, round=step, event=event) for step, event in steps
        ),
    )


def right(out: Path, model: Model, split: Split, tensors: Tensors) -> Tensor:
    """Which records of a split of a model's task the tensors answer correctly, bool [records]."""
    passes = records(out, model.architecture, model.task, split).passes()
    return right_answers(load(network(model.architecture).eval(), tensors), passes)


@torch.no_grad()
def right_answers(model: nn.Module, passes: Iterable[Pass]) -> Tensor:
    """Which records a network answers correctly, bool [records], in the order of their passes."""
    return torch.cat([model(inputs).argmax(dim=1) == labels for inputs, labels in passes])


def accuracies(out: Path, model: Model, tensors: Tensors) -> dict[str, float]:
    """{split: accuracy} on the tuning, validation and test records of the model's task."""
    return {split: float(right(out, model, split, tensors).double().mean()) for split in SPLITS}


def gain(out: Path, model: Model, tensors: Tensors) -> dict[str, Any]:
    """By how much a model is better than its start on the test records, and the paired standard error of that."""
    before, after = (right(out, model, "test", each).double() for each in (start(out, model), tensors))
    differences = after - before
    difference = float(differences.mean())
    standard_error = float(differences.std()) / math.sqrt(len(differences))
    return {"gain": difference, "gain_standard_error": standard_error, "beats_start": difference > 2 * standard_error}


def train_all(out: Path, scenarios: Sequence[Scenario], *, data: Path, jobs: int = 2) -> None:
    """Train the missing models, and write the scenarios' folders and `models.jsonl`, one line for each model.

    Args:
        out: the study's folder.
        scenarios: whose models are wanted.
        data: holds the texts; see `prepare`.
        jobs: processes, each with one thread, >= 1.

    Raises:
        InputError: a file of texts is missing.
    """
    models = {model.name: model for scenario in scenarios for model in scenario.all_models}
    # A model may start from texts that it is never trained on privately.
    tasks = {task for model in models.values() for task in (model.task, *_public_tasks(model))}
    ordered = [task for task in TEXT_SIZES if task in tasks]
    list(in_processes(partial(prepare, out, data), ordered, jobs))
    # The same steps without noise, once for all models that differ in epsilon alone.
    references = {name: reference(model) for name, model in models.items()}
    _write_missing(out, REFERENCES, references.values(), jobs)
    _write_missing(out, "models.jsonl", models.values(), jobs)
    for scenario in scenarios:
        write_scenario(out, scenario)


def reference(model: Model) -> Model:
    """The model as it is trained without noise."""
    return replace(model, epsilon=math.inf)


def _write_missing(out: Path, file: str, models: Iterable[Model], jobs: int) -> None:
    """Train the models that have no line in the file; the lines come as they are finished."""
    known = {line["name"] for line in lines(out / file)}
    missing = {model.name: model for model in models if model.name not in known}
    starts = {start_path(out, model): model for model in missing.values()}
    list(in_processes(partial(start, out), list(starts.values()), jobs))
    ordered = sorted(missing.values(), key=lambda model: _BY_TIME.index(model.architecture))
    tell = "accuracy {0[accuracy_start][test]:.3f} to {0[accuracy][test]:.3f} on the test records".format
    run_missing(out / file, ordered, partial(_trained, out), tell, key=itemgetter("name"), jobs=jobs)


def _trained(out: Path, model: Model) -> Line:
    """Train and keep a model; the line has its accuracy and that of its start."""
    began = time.perf_counter()
    tensors, events = trained(out, model, epsilon=model.epsilon)
    seconds = time.perf_counter() - began
    private = records(out, model.architecture, model.task, model.split).part(*model.part)
    how, noise = schedule(model.architecture, len(private), model.epsilon)
    line = {
        "name": model.name,
        "architecture": model.architecture,
        "task": model.task,
        "data_set": model.data_set,
        "delta": DELTA,
        "noise_multiplier": noise,
        "learning_rate": how.learning_rate,
        "num_records": len(private),
        "accuracy": accuracies(out, model, tensors),
        "accuracy_start": accuracies(out, model, start(out, model)),
        **gain(out, model, tensors),
        "seconds": seconds,
    }
    if math.isfinite(model.epsilon):
        described = _described(model, history(model, events))
        folders.write(out / "models" / model.name, described, tensors)
        line["epsilon"] = described.guarantee().epsilon
        without_noise = {each["name"]: each["accuracy"] for each in lines(out / REFERENCES)}
        line["accuracy_without_noise"] = without_noise[reference(model).name]
    return line


def _described(model: Model, past: History, **bounds: float) -> Described:
    return Described(
        name=model.name,
        architecture=model.architecture,
        utility=bounds.get("utility"),
        epsilon_bound=bounds.get("epsilon_bound", 0.0),
        utility_bound=bounds.get("utility_bound", 0.0),
        deltas={model.data_set: DELTA},
        history=past,
        tags=model.tags,
    )


def write_scenario(out: Path, scenario: Scenario) -> None:
    """Write the folder of a scenario's variants, each with its accuracy on the validation records."""
    known = {line["name"]: line for line in lines(out / "models.jsonl")}
    bounds = {model.name: part for part in scenario.parts for model in part.models}
    for model in scenario.all_models:
        folder = out / "models" / model.name
        bounded = bounds.get(model.name, scenario)
        described = _described(
            model,
            folders.read(folder).history,
            utility=known[model.name]["accuracy"]["validation"],
            epsilon_bound=bounded.epsilon_bound,
            utility_bound=bounded.utility_bound,
        )
        folders.write(out / "variants" / scenario.name / model.name, described, folders.read_tensors(folder))


@dataclass(frozen=True, kw_only=True)
class RetrainCell:
    """A target of `drd` that is trained again: its scenario by name, and its epsilon after deduplication."""

    scenario: str
    model: Model
    epsilon: float

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return f"{self.scenario} {self.model.name}"


def retrain_all(out: Path, *, jobs: int = 2) -> None:
    """Train every target of `drd` in A1 to A5 that has no line in `retrain.jsonl` yet.

    Raises:
        InputError: there are no results of `drd`.
    """
    tell = "accuracy {0[accuracy][test]:.3f}".format
    key = "{0[scenario]} {0[name]}".format
    run_missing(out / "retrain.jsonl", targets(out), partial(_retrained, out), tell, key=key, jobs=jobs)


def targets(out: Path) -> list[RetrainCell]:
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
                RetrainCell(scenario=cell["scenario"], model=models[each["name"]], epsilon=each["epsilon_after"])
                for each in line["outcomes"]
                if each["bases"]
            ]
    if not found:
        raise InputError(f"out = {str(out)!r}: holds no results of drd in A1 to A5; run comes first")
    return found


def _retrained(out: Path, cell: RetrainCell) -> Line:
    tensors, _ = trained(out, cell.model, epsilon=cell.epsilon)
    found = accuracies(out, cell.model, tensors)
    return {"scenario": cell.scenario, "name": cell.model.name, "epsilon": cell.epsilon, "accuracy": found}

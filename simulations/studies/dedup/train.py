"""Training of the study's models, and each scenario's folder of variants.

The records are public, so sampling and noise are seeded and the study can be repeated; real data would need
`SecureSource`. Each model starts from weights trained on public records of both tasks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from fedpriv.accounting.calibration import noise_multiplier_for
from fedpriv.accounting.events import Event
from fedpriv.dedup import variants
from fedpriv.dedup.composition import History, Upload
from fedpriv.dedup.variants import Described
from fedpriv.mechanisms.sources import SeededSource
from simulations.studies.dedup.digits import Digits, digits
from simulations.studies.dedup.dp_sgd import Schedule, train_privately, train_publicly
from simulations.studies.dedup.evaluator import DigitsEvaluator
from simulations.studies.dedup.lines import append, lines
from simulations.studies.dedup.networks import Architecture, load, network, to_arrays
from simulations.studies.dedup.scenarios import DELTA, Model, Scenario

Tensors = Mapping[str, NDArray[Any]]

STEPS = 40
SHARE = 0.4  # of the records, expected in a batch
PUBLIC_STEPS: dict[Architecture, int] = {"mlp": 25, "vit": 40}
LEARNING_RATES: dict[Architecture, float] = {"mlp": 2.0, "vit": 0.5}


def start(architecture: Architecture) -> Tensors:
    """The weights that all models of an architecture start from, trained on public records alone."""
    both = [digits("public", "upright"), digits("public", "mirrored")]
    records = Digits(torch.cat([each.images for each in both]), torch.cat([each.labels for each in both]))
    model = network(architecture)
    train_publicly(model, records, steps=PUBLIC_STEPS[architecture])
    return to_arrays(model)


@cache
def schedule(model: Model) -> tuple[Schedule, float]:
    """How a model is trained, and the noise multiplier that keeps it within its epsilon.

    The learning rate falls with the noise of a mean gradient, by a rule that depends on no record.
    """
    num_records = len(model.records)
    batch_size = round(SHARE * num_records)
    noise = noise_multiplier_for(model.epsilon, DELTA, sampling_probability=batch_size / num_records, steps=STEPS)
    rate = LEARNING_RATES[model.architecture] * min(1.0, batch_size / (100 * noise))
    return Schedule(steps=STEPS, expected_batch_size=batch_size, learning_rate=rate), noise


def trained(model: Model, weights: Tensors, *, private: bool = True) -> tuple[Tensors, list[Event]]:
    """A model's weights and one event for each step; if not private, the same schedule without noise."""
    how, noise = schedule(model)
    trainee = load(network(model.architecture), weights)
    source = SeededSource("dedup study", model.name)
    events = train_privately(trainee, model.records, how, noise_multiplier=noise if private else 0.0, source=source)
    return to_arrays(trainee), events


def history(model: Model, events: Sequence[Event]) -> History:
    """One upload for each step: all that the model depends on besides public records."""
    steps = enumerate(events, start=1)
    return History(
        name=model.name,
        ancestors=frozenset(
            Upload(data_set=model.data_set, run=model.name, round=step, event=event) for step, event in steps
        ),
    )


def write_scenario(folder: Path, scenario: Scenario, models: dict[str, tuple[Tensors, History]]) -> None:
    """Write the folder of a scenario's variants, each with its accuracy on the public validation records."""
    validation = digits("validation", scenario.task)
    architecture = scenario.models[0].architecture
    evaluator = DigitsEvaluator(architecture, validation, saliency_records=validation)
    for model in scenario.all_models:
        tensors, past = models[model.name]
        described = Described(
            name=model.name,
            architecture=model.architecture,
            utility=evaluator.count_correct(tensors) / evaluator.num_records,
            epsilon_bound=scenario.epsilon_bound,
            utility_bound=scenario.utility_bound,
            deltas={model.data_set: DELTA},
            history=past,
            tags=frozenset({"digits", model.task}),
        )
        variants.write(folder / model.name, described, tensors)


def train_all(out: Path, scenarios: Sequence[Scenario]) -> None:
    """Train the missing models, and write the scenarios' folders and `models.jsonl`, one line for each model."""
    known = {line["name"]: line for line in lines(out / "models.jsonl")}
    starts: dict[Architecture, Tensors] = {}
    for scenario in scenarios:
        for model in scenario.all_models:
            if model.architecture not in starts:
                starts[model.architecture] = start(model.architecture)
            if model.name not in known:
                known[model.name] = _trained(out, model, starts[model.architecture])
                append(out / "models.jsonl", known[model.name])
        models = {model.name: _read(out, model) for model in scenario.all_models}
        write_scenario(out / "variants" / scenario.name, scenario, models)


def _trained(out: Path, model: Model, weights: Tensors) -> dict[str, Any]:
    """Train and keep a model; the line has its accuracy, that of its start and that of training without noise."""
    began = time.perf_counter()
    tensors, events = trained(model, weights)
    seconds = time.perf_counter() - began
    without_noise, _ = trained(model, weights, private=False)
    described = Described(
        name=model.name,
        architecture=model.architecture,
        utility=0.0,
        epsilon_bound=0.0,
        utility_bound=0.0,
        deltas={model.data_set: DELTA},
        history=history(model, events),
    )
    variants.write(out / "models" / model.name, described, tensors)
    how, noise = schedule(model)
    accuracy = accuracies(model, tensors)
    line = {
        "name": model.name,
        "epsilon": described.as_variant().epsilon,
        "delta": DELTA,
        "noise_multiplier": noise,
        "learning_rate": how.learning_rate,
        "num_records": len(model.records),
        "accuracy": accuracy,
        "accuracy_start": accuracies(model, weights),
        "accuracy_without_noise": accuracies(model, without_noise),
        "seconds": seconds,
    }
    print(f"{model.name}: accuracy {accuracy['validation']:.3f} in {seconds:.0f} s", flush=True)
    return line


def accuracies(model: Model, tensors: Tensors) -> dict[str, float]:
    """Accuracy on the validation and on the test records of the model's task."""
    result = {}
    for split in ("validation", "test"):
        records = digits(split, model.task)
        evaluator = DigitsEvaluator(model.architecture, records, saliency_records=records)
        result[split] = evaluator.count_correct(tensors) / len(records)
    return result


def _read(out: Path, model: Model) -> tuple[Tensors, History]:
    folder = out / "models" / model.name
    return variants.read_tensors(folder), variants.read(folder).history

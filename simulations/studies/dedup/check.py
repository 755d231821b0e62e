"""An independent check of every store of the study, by other means than those that made it.

Each variant is assembled from the store's rows by its manifest, its accuracy is counted by a plain loop, and its
epsilon is computed from the JSON of the variants' descriptions by dp-accounting itself. The results are compared with
the bounds in the descriptions next to the store.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import safetensors.numpy
import torch
from dp_accounting import pld
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.models.dedup.validation import proof_records
from fedpriv.models.variants.store import Store
from simulations.studies.dedup.data import Split, records
from simulations.studies.dedup.networks import network
from simulations.studies.dedup.report.results import CHECK
from simulations.studies.dedup.scenarios import SCENARIOS, Model
from simulations.studies.harness import Line, in_processes, lines

# How much pld's grid may add to an epsilon, relative, in our accountant or in dp-accounting's.
TOLERANCE = 2e-3

Description = Mapping[str, Any]
"""The JSON of a `variant.json`."""


def check_all(out: Path, *, jobs: int = 2) -> bool:
    """Print a line for each cell, write a summary to `CHECK`, and return whether every cell is within its bounds.

    Raises:
        InputError: there are no results.
    """
    if not (found := lines(out / "runs.jsonl")):
        raise InputError(f"out = {str(out)!r}: holds no results; train and run come first")
    summary = {"stores": 0, "violations": 0, "private_targets": 0, "private_beyond": 0}
    for line, problems in in_processes(partial(_problems, out), found, jobs):
        # Private validation keeps its bound only up to its noise.
        missed = [each for each in problems if each.startswith("utility")] if line["cell"]["private"] else []
        wrong = [each for each in problems if each not in missed]
        summary["stores"] += 1
        summary["violations"] += len(wrong)
        summary["private_targets"] += len(_targets(line)) if line["cell"]["private"] else 0
        summary["private_beyond"] += len(missed)
        print(f"{line['key']}: {'; '.join(wrong) or 'within its bounds'}{_noted(missed)}", flush=True)
    print(json.dumps(summary))
    (out / CHECK).write_text(json.dumps(summary) + "\n")
    return not summary["violations"]


def _problems(out: Path, line: Line) -> tuple[Line, list[str]]:
    return line, list(violations(out, line))


def violations(out: Path, line: Line) -> Iterator[str]:
    """The faults of the store of a cell, in words."""
    scenario, folder = SCENARIOS[line["cell"]["scenario"]], out / "cells" / line["key"]
    described = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("variants/*/variant.json")}
    charged = scenario.validation_epsilon if line["cell"]["private"] else 0.0
    with Store(folder / "store", read_only=True) as store:
        if damage := store.verify():
            yield from damage
            return
        models = scenario.stored(line["cell"].get("base", ""))
        if set(store.names) != {model.name for model in models}:
            yield f"names: {', '.join(store.names)}"
        for model in models:
            yield from _of_variant(out, store, model, described, line, charged)


def _of_variant(
    out: Path, store: Store, model: Model, described: Mapping[str, Description], line: Line, charged: float
) -> Iterator[str]:
    name, split, originals = model.name, line["cell"]["split"], out / "variants" / line["cell"]["scenario"]
    original = safetensors.numpy.load_file(originals / name / "model.safetensors")
    restored = by_hand(store, name)
    if any(restored[key].tobytes() != value.tobytes() for key, value in store.tensors(name).items()):
        yield f"restore {name}: not what its rows hold"
    bases = consulted(store, name)
    if not bases and any(restored[key].tobytes() != value.tobytes() for key, value in original.items()):
        yield f"blocks {name}: without a base, but changed"
    yield from _of_others(store, name, bases, originals)
    own, after = epsilon([described[name]]), epsilon([described[each] for each in (name, *bases)])
    if bases:
        after = max(after, charged * (1 + len([base for base in bases if consulted(store, base)])))
    if after > own + described[name]["epsilon_bound"] + TOLERANCE * after:
        yield f"epsilon {name}: {after:.4f}, from {own:.4f}, bound {described[name]['epsilon_bound']:g}"
    if after > store.manifest(name).privacy["epsilon"] + TOLERANCE * after:
        yield f"epsilon {name}: {after:.4f}, but its manifest says {store.manifest(name).privacy['epsilon']:.4f}"
    number = len(records(out, model.architecture, model.task, split))
    is_proof = not line["cell"]["private"] and line["cell"].get("acceptance", "proof") == "proof"
    proof = tuple((proof_records(number) if is_proof else np.arange(number)).tolist())
    before = _original_correct(out, originals, model, split, proof)
    now = num_correct(out, model, restored, split, proof)
    if bases and before - now > described[name]["utility_bound"] * len(proof) + 1e-6:
        yield f"utility {name}: {before} to {now} of {len(proof)}, bound {described[name]['utility_bound']:g}"


def _of_others(store: Store, name: str, bases: Sequence[str], originals: Path) -> Iterator[str]:
    """Faults of a variant: blocks and other tensors that neither its original nor any of its bases holds."""
    manifest, extras = store.manifest(name), store.extras(name)
    files = {each: safetensors.numpy.load_file(originals / each / "model.safetensors") for each in (name, *bases)}
    size = manifest.layout.block_size
    known = {row for tensors in files.values() for row in _rows(tensors, size)}
    if num := sum(row.tobytes() not in known for row in store.blocks[store.rows(manifest.blocks)]):
        yield f"blocks {name}: {num} neither its own nor of a base"
    if changed := [key for key, value in extras.items() if value.tobytes() != files[name][key].tobytes()]:
        yield f"extras {name}: {', '.join(changed)} changed"


def _rows(tensors: Mapping[str, NDArray[Any]], size: int) -> Iterator[bytes]:
    for values in tensors.values():
        padded = np.pad(values.ravel(), (0, -values.size % size))
        yield from (row.tobytes() for row in padded.reshape(-1, size))


def by_hand(store: Store, name: str) -> dict[str, NDArray[Any]]:
    """A model's tensors from the store's rows, by the shapes in its manifest."""
    manifest = store.manifest(name)
    tensors, begin, size = dict(store.extras(name)), 0, manifest.layout.block_size
    for spec in manifest.layout.tensors:
        if spec.name not in tensors:
            num_values = math.prod(spec.shape)
            num_blocks = math.ceil(num_values / size)
            rows = store.rows(manifest.blocks[begin : begin + num_blocks])
            tensors[spec.name] = np.array(store.blocks[rows]).ravel()[:num_values].reshape(spec.shape)
            begin += num_blocks
    return tensors


def consulted(store: Store, name: str) -> list[str]:
    """The variants that a variant's blocks were taken from or compared with, directly or through other variants."""
    bases = store.manifest(name).provenance["bases"]
    return sorted({each for base in bases for each in (base, *consulted(store, base))})


@cache
def _original_correct(out: Path, originals: Path, model: Model, split: Split, chosen: tuple[int, ...]) -> int:
    tensors = safetensors.numpy.load_file(originals / model.name / "model.safetensors")
    return num_correct(out, model, tensors, split, chosen)


def num_correct(
    out: Path, model: Model, tensors: Mapping[str, NDArray[Any]], split: Split, chosen: Sequence[int]
) -> int:
    """How many of the chosen records of its task a model answers correctly, one record after another."""
    module = network(model.architecture)
    module.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    correct = 0
    with torch.no_grad():
        for inputs, labels in records(out, model.architecture, model.task, split).passes(chosen):
            answers = zip(module(inputs), labels, strict=True)
            correct += sum(int(logits.argmax()) == int(label) for logits, label in answers)
    return correct


def epsilon(described: Sequence[Description]) -> float:
    """The cost of the union of these variants' uploads to the records of any one data set.

    Raises:
        ValueError: a release is not Gaussian.
    """
    uploads = {(u["data_set"], u["run"], u["round"], u["request"]): u for each in described for u in each["uploads"]}
    deltas = {id_: delta for each in described for id_, delta in each["deltas"].items()}
    costs = []
    for data_set, delta in deltas.items():
        counts: Counter[tuple[float, float]] = Counter()
        for event in (json.loads(upload["event"]) for upload in uploads.values() if upload["data_set"] == data_set):
            if event["kind"] != "subsampled_gaussian":
                raise ValueError(f"event {event['kind']!r}: only Gaussian releases can be checked")
            counts[event["noise_multiplier"], event["sampling_probability"]] += event["count"]
        costs.append(_composed(tuple(sorted(counts.items())), delta))
    return max(costs)


@cache
def _composed(counts: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)  # differs from 1e-4 by less than 1e-4
    for (noise_multiplier, probability), count in counts:
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, gaussian), count)
    return float(accountant.get_epsilon(delta))


def _targets(line: Line) -> list[str]:
    return [outcome["name"] for outcome in line["outcomes"] if outcome["bases"]]


def _noted(missed: Sequence[str]) -> str:
    return f" ({'; '.join(missed)}: the noise of private validation)" if missed else ""

"""A federation's LoRA variants, deduplicated in several ways: one table, and a second look at every store.

    python -m simulations.studies.lora_variants RUN STORE [STORE ...]

RUN is a run's folder; each STORE was made from its variants by `fedpriv dedup run`. The second look takes every variant
out of its store, loads it with peft on a model of its own, counts the right answers on the validation records, and
composes the charged releases behind it and its bases by dp-accounting. It ends with exit code 1 where one is beyond
its bounds or is not what the store says of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import torch
from dp_accounting import pld
from safetensors.torch import save_file

from fedpriv import adapters
from fedpriv import config as configuration
from fedpriv.data.records import collate
from fedpriv.dedup.store import Store
from fedpriv.training.workbench import Workbench, workbench

# What pld's grid may add to an epsilon, in our accountant or in dp-accounting's.
TOLERANCE = 2e-3

Description = Mapping[str, Any]


def main() -> None:
    """Print a row of the table for each store, and what the second look found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("stores", type=Path, nargs="+")
    arguments = parser.parse_args()
    config = configuration.parse(configuration.read(arguments.run / "config.toml"))
    bench = workbench(config)
    chosen = np.sort(np.random.default_rng(config.seed).permutation(len(bench.test))[: config.dedup_records or None])
    paths = arguments.run.glob("variants/*/variant.json")
    described = {path.parent.name: json.loads(path.read_text()) for path in paths}
    wrong: list[str] = []
    print("| store | targets | C.R. in bytes % | validations | largest drop | largest rise of epsilon | by basic |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for path in arguments.stores:
        with Store(path, read_only=True) as store:
            print(row(path.name, store), flush=True)
            found = [*store.verify(), *second_look(store, arguments.run, described, bench, chosen.tolist())]
            wrong += [f"{path.name}: {each}" for each in found]
    print("\n".join(wrong) or f"{len(arguments.stores)} stores of {len(described)} variants, all within their bounds")
    sys.exit(1 if wrong else 0)


def row(name: str, store: Store) -> str:
    """What the store says of itself, as a line of a table."""
    outcomes = [store.manifest(each).provenance["outcome"] for each in store.names]
    targets = [outcome for outcome in outcomes if outcome["bases"]]
    drop = max((each["correct_before"] - each["correct_after"]) / each["num_records"] for each in outcomes)
    rise = max(each["epsilon_after"] - each["epsilon_before"] for each in outcomes)
    basic = max((each["epsilons"]["basic"] - each["epsilon_before"] for each in targets), default=0.0)
    validations = sum(each["num_validations"] for each in outcomes)
    ratio = 100 * store.compression_ratio
    return f"| `{name}` | {len(targets)} | {ratio:.1f} | {validations} | {drop:.4f} | {rise:.3f} | {basic:.3f} |"


def second_look(
    store: Store, run: Path, described: Mapping[str, Description], bench: Workbench, chosen: list[int]
) -> Iterator[str]:
    """What is wrong with the store's variants."""
    for name, description in described.items():
        outcome = store.manifest(name).provenance["outcome"]
        correct = count_correct(store, run, name, bench, chosen)
        if correct != outcome["correct_after"]:
            yield f"{name}: {correct} right answers, the store says {outcome['correct_after']}"
        if outcome["correct_before"] - correct > description["utility_bound"] * len(chosen) + 1e-6:
            yield f"{name}: utility fell from {outcome['correct_before']} to {correct}"
        own, after = epsilon([description]), epsilon([description, *(described[base] for base in outcome["bases"])])
        if after > own + description["epsilon_bound"] + TOLERANCE:
            yield f"{name}: epsilon rose from {own:.4f} to {after:.4f}"
        if after > outcome["epsilon_after"] + TOLERANCE:
            yield f"{name}: epsilon is {after:.4f}, the store says {outcome['epsilon_after']:.4f}"


@torch.no_grad()
def count_correct(store: Store, run: Path, name: str, bench: Workbench, chosen: list[int]) -> int:
    """Right answers of a variant as peft loads it, one record after another."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(run / "variants" / name, Path(temporary) / name)
        tensors = {key: torch.from_numpy(value.copy()) for key, value in store.restore(name).items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        model = adapters.load(bench.base.name, folder)
    right = 0
    for index in chosen:
        batch = collate(bench.test.items([index]))
        label = batch.pop("labels")
        right += int((model(**batch).logits.argmax(dim=-1) == label).sum())
    return right


def epsilon(consulted: list[Description]) -> float:
    """The largest over data sets of what the union of the uploads behind these variants costs."""
    events = {
        (upload["data_set"], upload["run"], upload["round"], upload["request"]): upload["event"]
        for description in consulted
        for upload in description["uploads"]
    }
    by_data_set: dict[str, list[str]] = {}
    for (data_set, *_), event in events.items():
        by_data_set.setdefault(data_set, []).append(event)
    deltas = consulted[0]["deltas"]
    return max(composed(tuple(sorted(found)), deltas[id_]) for id_, found in by_data_set.items())


@cache
def composed(events: tuple[str, ...], delta: float) -> float:
    """What the events, as JSON, cost together by dp-accounting."""
    accountant = pld.PLDAccountant()
    for text in set(events):
        event = json.loads(text)
        if event["kind"] != "subsampled_gaussian":
            raise ValueError(f"event {event['kind']!r}: this look knows Gaussian releases alone")
        sampled = dp_accounting.PoissonSampledDpEvent(
            event["sampling_probability"], dp_accounting.GaussianDpEvent(event["noise_multiplier"])
        )
        accountant.compose(sampled, events.count(text) * event["count"])
    return float(accountant.get_epsilon(delta))


if __name__ == "__main__":
    main()

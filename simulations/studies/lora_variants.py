"""A federation's LoRA variants, deduplicated in several ways: one table, and an independent check of every store.

    python -m simulations.studies.lora_variants RUN STORE [STORE ...]

RUN is a run's folder; each STORE was made from its variants by `fedpriv dedup run`. The check takes every variant out
of its store, loads it with peft on a fresh model, counts the correct answers on the validation records, and composes
the charged releases behind it and its bases by dp-accounting. The exit code is 1 if a variant is beyond its bounds or
differs from what the store says of it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from fedpriv import config as configuration
from fedpriv.learning import adapters
from fedpriv.learning.data.records import collate
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.models.dedup.validation import proof_records
from fedpriv.models.variants.blocks import utilities
from fedpriv.models.variants.store import Store
from simulations.studies.dedup.check import TOLERANCE, Description, epsilon
from simulations.studies.harness import parser, table


def main() -> None:
    """Print a row of the table for each store, and then what the check found."""
    own = parser(__doc__)
    own.add_argument("run", type=Path)
    own.add_argument("stores", type=Path, nargs="+")
    arguments = own.parse_args()
    config = configuration.parse(configuration.read(arguments.run / "config.toml"))
    bench = workbench(config)
    chosen = np.sort(np.random.default_rng(config.seed).permutation(len(bench.test))[: config.dedup_records or None])
    paths = arguments.run.glob("variants/*/variant.json")
    described = {path.parent.name: json.loads(path.read_text()) for path in paths}
    rows, wrong = [], list[str]()
    for path in arguments.stores:
        with Store(path, read_only=True) as store:
            rows.append(row(path.name, store))
            problems = [*store.verify(), *check(store, arguments.run, described, bench, chosen.tolist())]
            wrong += [f"{path.name}: {each}" for each in problems]
    headers = ("store", "targets", "C.R. in bytes %", "validations", "largest drop", "largest rise of epsilon")
    print(table((*headers, "by basic"), rows))
    print("\n".join(wrong) or f"{len(arguments.stores)} stores of {len(described)} variants, all within their bounds")
    sys.exit(1 if wrong else 0)


def row(name: str, store: Store) -> tuple[str, ...]:
    """The store's own figures on its variants, as a row of the table."""
    outcomes = [store.manifest(each).provenance["outcome"] for each in store.names]
    targets = [outcome for outcome in outcomes if outcome["bases"]]
    drop = max(before - after for before, after in filter(None, map(utilities, outcomes)))
    rise = max(each["epsilon_after"] - each["epsilon_before"] for each in outcomes)
    basic = max((each["epsilons"]["basic"] - each["epsilon_before"] for each in targets), default=0.0)
    validations = sum(each["num_validations"] for each in outcomes)
    shares = (f"{len(targets)}", f"{100 * store.compression_ratio:.1f}", f"{validations}")
    return f"`{name}`", *shares, f"{drop:.4f}", f"{rise:.3f}", f"{basic:.3f}"


def check(
    store: Store, run: Path, described: Mapping[str, Description], bench: Workbench, chosen: list[int]
) -> Iterator[str]:
    """The faults of the store's variants, in words; empty if there is none."""
    for name, description in described.items():
        outcome = store.manifest(name).provenance["outcome"]
        is_proven = outcome["loss_limit"] is not None
        proof = [chosen[place] for place in proof_records(len(chosen))] if is_proven else chosen
        after = count_correct(store, run, name, bench, proof) / len(proof)
        if abs(after - outcome["utility_after"]) > 1e-9:
            yield f"{name}: {after:.4f} of the answers are correct, but the store says {outcome['utility_after']:.4f}"
        if outcome["utility_before"] - after > description["utility_bound"] + 1e-9:
            yield f"{name}: utility fell from {outcome['utility_before']:.4f} to {after:.4f}"
        own, after = epsilon([description]), epsilon([description, *(described[base] for base in outcome["bases"])])
        if after > own + description["epsilon_bound"] + TOLERANCE:
            yield f"{name}: epsilon rose from {own:.4f} to {after:.4f}"
        if after > outcome["epsilon_after"] + TOLERANCE:
            yield f"{name}: epsilon is {after:.4f}, but the store says {outcome['epsilon_after']:.4f}"


@torch.no_grad()
def count_correct(store: Store, run: Path, name: str, bench: Workbench, chosen: list[int]) -> int:
    """The number of correct answers of a variant as peft loads it, one record after another."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(run / "variants" / name, Path(temporary) / name)
        tensors = {key: torch.from_numpy(value.copy()) for key, value in store.tensors(name).items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        model = adapters.load(bench.base.name, folder)
    if bench.config.base_dtype == "bfloat16":  # as the run computed, since rounding can turn an answer
        adapters.to_bfloat16(model)
    correct = 0
    for index in chosen:
        batch = collate(bench.test.items([index]))
        label = batch.pop("labels")
        correct += int((model(**batch).logits.argmax(dim=-1) == label).sum())
    return correct


if __name__ == "__main__":
    main()

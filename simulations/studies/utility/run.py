"""Cells of the study as federations, each with one line of results."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from fedpriv.accounting.recipe import START_SHARE, LearningRate, WeightedClients, learning_rate, start_noise_multiplier
from fedpriv.config import RunConfig, parse
from fedpriv.data import TextData
from fedpriv.data.records import Records
from fedpriv.errors import InputError
from fedpriv.protocol import Registration
from fedpriv.runs import RoundRow
from fedpriv.training import Body, baselines
from fedpriv.training.noise_plan import calibrated, derived_learning_rate
from fedpriv.training.workbench import Workbench, workbench
from server.observer import RunProgress
from simulations.engines import federation
from simulations.studies.dedup.cells import append, lines
from simulations.studies.utility import corpora
from simulations.studies.utility.cells import (
    BASELINES,
    CENTRAL,
    DELTA,
    INGREDIENTS,
    LOCAL_STEPS,
    METHODS,
    PROBE_STEPS,
    PROBES,
    RATES,
    Cell,
)
from simulations.studies.utility.features import FeatureStore

# Of a run's summary.
_KEPT = (
    "accuracy", "accuracy_initial", "accuracy_standard_error", "macro_f1", "majority_accuracy", "epsilon_local_max",
    "epsilon_aggregate_max", "delta_max", "num_clients", "num_rounds", "seconds",
)  # fmt: skip


class AnyCell(Protocol):
    """A cell of any study that uses these corpora."""

    @property
    def key(self) -> str:
        """Unique among the study's cells."""

    @property
    def corpus(self) -> str:
        """A corpus by name."""


C = TypeVar("C", bound=AnyCell)


class SilentObserver:
    """Keeps what a run was calibrated to and how its accuracy went."""

    def __init__(self) -> None:
        self.noise: dict[str, float | None] = {}
        self.accuracies: list[float] = []
        self.summary: dict[str, Any] = {}

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """Keep the noise multipliers and the terms of the learning rate."""
        self.noise = {
            "noise_multiplier": config.noise_multiplier,
            "start_noise_multiplier": config.start_noise_multiplier,
            "learning_rate": learning_rate.learning_rate if learning_rate else float(config.learning_rate),
        }

    def notice(self, text: str) -> None:
        """Show it: a study of many runs has nobody to ask."""
        print(text, flush=True)

    def progressed(self, progress: RunProgress) -> None:
        """Do nothing."""

    def round_done(self, row: RoundRow) -> None:
        """Keep the accuracy of a tested round."""
        if row.test_accuracy is not None:
            self.accuracies.append(row.test_accuracy)

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Keep the summary."""
        self.summary = summary


def run_all(runs: Path, out: Path, data: Path, cells: Sequence[Cell], *, until: float | None = None) -> None:
    """Run every cell that has no line yet; arguments as for `run_missing`."""
    run_missing(runs, out, cells, lambda cell, store: run_cell(cell, out, data, store), until=until)


def run_missing(
    runs: Path,
    out: Path,
    cells: Sequence[C],
    run: Callable[[C, FeatureStore], dict[str, Any]],
    *,
    until: float | None = None,
) -> None:
    """Add a line for every cell of a study that has none yet; a corpus whose files are missing is skipped, and named.

    Args:
        runs: file of the lines.
        out: folder of the records as written for the runs, and of their features.
        cells: in their order.
        run: gives a cell's line; raises `InputError` if the cell's corpus is not there.
        until: `time.time()` after which no cell is begun.
    """
    out.mkdir(parents=True, exist_ok=True)
    done, store = {line["key"] for line in lines(runs)}, FeatureStore(out / "features.npz")
    skipped: set[str] = set()
    for cell in cells:
        if cell.key in done or cell.corpus in skipped:
            continue
        began = time.time()
        if until is not None and began > until:
            return
        try:
            line = run(cell, store)
        except InputError as error:
            skipped.add(cell.corpus)
            print(f"{cell.corpus}: skipped: {error}", flush=True)
            continue
        append(runs, line)
        store.save()
        print(f"{cell.key}: {line['accuracy']:.4f}, {time.time() - began:.0f} s", flush=True)


def run_cell(cell: Cell, out: Path, data: Path, store: FeatureStore) -> dict[str, Any]:
    """The line of a cell.

    Raises:
        InputError: the data folder lacks the corpus.
    """
    began, folder = time.time(), Path(tempfile.mkdtemp(prefix="fedpriv-utility-"))
    try:
        config = configuration(cell, out / "data", data, folder / "run")
        bench = workbench(config)
        store.serve(bench.model, config)
        results = _baselines(config) if cell.method == BASELINES else _federation(config)
    finally:
        shutil.rmtree(folder)
    return {"key": cell.key, "cell": asdict(cell), **results, "wall_seconds": time.time() - began}


def _federation(config: RunConfig) -> dict[str, Any]:
    observer = SilentObserver()
    federation.run(config, observer)
    kept = {name: observer.summary[name] for name in _KEPT}
    return {**kept, **observer.noise, "accuracies": observer.accuracies}


def _baselines(config: RunConfig) -> dict[str, Any]:
    """Linear probe and TF-IDF on the pooled training records; the probe reads what the private head reads."""
    bench = workbench(config)
    clients = enumerate(bench.data.clients)
    train = _joined([_labelled(bench, data, bench.client(client)) for client, data in clients])
    chosen = np.random.default_rng(config.seed).permutation(len(train.labels))[: baselines.MOST_RECORDS]
    test = _labelled(bench, bench.data.test, bench.test)
    probe, tfidf = baselines.hits(train.part(np.sort(chosen)), test, config.seed)
    num_test = len(test.labels)
    majority = float(np.bincount(test.labels).max()) / num_test
    return {"accuracy": probe / num_test, "tfidf_accuracy": tfidf / num_test, "majority_accuracy": majority}


def _labelled(bench: Workbench, data: TextData, records: Records) -> baselines.Labelled:
    features = bench.model.features
    if features is None:
        raise InputError("baselines: need a model whose head is one linear layer")
    states = features.features([(records, torch.arange(len(records)))], Body({}, {}), keep=True)
    return baselines.Labelled(list(data.texts), states.double().numpy(), records.labels.numpy())


def _joined(parts: Sequence[baselines.Labelled]) -> baselines.Labelled:
    return baselines.Labelled(
        [text for part in parts for text in part.texts],
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def configuration(cell: Cell, written: Path, data: Path, out: Path) -> RunConfig:
    """The configuration of a cell.

    Args:
        cell: to be run.
        written: folder for the corpus's records.
        data: folder of the public files.
        out: of the run.

    Raises:
        InputError: the data folder lacks the corpus.
    """
    pooled = cell.method == CENTRAL
    where = corpora.keys(cell.corpus, cell.seed, data=data, folder=written, validation=cell.is_validated, pooled=pooled)
    common = {"delta": DELTA, "comparison": False, "baselines": False, "simulate": True, "seed": cell.seed}
    method = {**METHODS, **INGREDIENTS, **RATES}.get(cell.method, METHODS["head"])
    values = {**common, **where, **method, "out": str(out), **_privacy(cell)}
    if cell.view == "sum":
        num_clients = len(workbench(parse(values)).data.clients)
        values |= {"privacy_view": "aggregate", "secure_aggregation": True, "min_clients": num_clients}
    if cell.method == PROBES:
        values["learning_rate"] = probe_learning_rate(parse({**values, "learning_rate": 1.0}))
    if cell.method == LOCAL_STEPS:
        values["learning_rate"] = local_learning_rate(parse({**values, "learning_rate": 1.0}))
    return parse(values)


def _privacy(cell: Cell) -> dict[str, Any]:
    if cell.epsilon is not None:
        return {"target_epsilon": cell.epsilon}
    start = {"start_noise_multiplier": 0.0, "lora_noise_multiplier": 0.0} if cell.method != "paper" else {}
    return {"noise_multiplier": 0.0, "target_epsilon": "", **start}


def probe_learning_rate(config: RunConfig) -> float:
    """The rule's learning rate for one client of the average size that trains alone, with all of its budget.

    It is that of as many rounds with the server's momentum, 0.6 / nu, although local steps have none.
    """
    sizes = [len(client) for client in workbench(config).data.clients]
    alone = start_noise_multiplier(_target(config), DELTA) * sqrt(START_SHARE)
    rate = learning_rate(
        WeightedClients(sizes=[round(sum(sizes) / len(sizes))], weights=[1.0]),
        noise_stddev=alone * sqrt(PROBE_STEPS) * config.clip_norm,
        sampling_probability=1.0,
        num_steps=PROBE_STEPS,
        momentum=config.server_momentum,
    )
    return rate.learning_rate


def local_learning_rate(config: RunConfig) -> float:
    """The rule's learning rate for as many steps as the configuration takes at its clients, one in each round."""
    bench = workbench(config)
    sizes = [len(client) for client in bench.data.clients]
    num_steps = config.local_steps * (config.rounds - config.head_start)
    single = parse({**asdict(config), "local_steps": 1, "rounds": num_steps + 1, "learning_rate": "auto"})
    rate = derived_learning_rate(calibrated(single, sizes, bench.initial), sizes, bench.initial)
    assert rate is not None  # the configuration asks for it
    return rate.learning_rate


def _target(config: RunConfig) -> float:
    if config.target_epsilon is None:
        raise ValueError("target_epsilon: averaged probes are private")
    return config.target_epsilon

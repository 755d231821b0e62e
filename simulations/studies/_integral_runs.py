"""The runs of the study of integral privacy: selections on public tables, and attacks on their models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedpriv.learning.data import read_table
from fedpriv.methods.integral import (
    HIDDEN,
    Cluster,
    Measure,
    PrivateSchedule,
    Recommendation,
    TrainingSchedule,
    disjoint_subsamples,
    perceptron,
    select,
    train_privately,
    train_stacked,
)
from fedpriv.methods.integral.attack import (
    AttackPlan,
    Game,
    attack_table,
    attacked,
    noise_multiplier,
    plain,
    recommended_mean,
    trainer,
)
from fedpriv.methods.integral.procedure import Data, SelectionSettings, evaluate, recommend
from fedpriv.methods.integral.tabular import Scaling, prepare
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.studies.harness import Line

EPSILON = 0.05
"""The largest difference of two weights in one cluster."""

EPOCHS = 20
NUM_TARGETS = 40
"""Targets of each kind that are attacked."""


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """A table of the study and its settings in the paper (Tables 1 and 2)."""

    file: str
    target: str
    subsample_size: int
    drop: tuple[str, ...] = ()


SOURCES = {
    "Adult": StudyTable(file="adult.csv.gz", target="income", subsample_size=1000),
    "Adult, whole": StudyTable(file="adult_whole.csv.gz", target="income", subsample_size=1000),
    "Susy": StudyTable(file="susy.csv.gz", target="class", subsample_size=10000),
    # Ids, and the five columns that state the kind of failure.
    "AI4I": StudyTable(
        file="ai4i2020.csv.gz",
        target="Machine failure",
        subsample_size=500,
        drop=("UDI", "Product ID", "TWF", "HDF", "PWF", "OSF", "RNF"),
    ),
    "HepMass": StudyTable(file="hepmass.csv.gz", target="class", subsample_size=10000),
    "Churn": StudyTable(
        file="churn.csv.gz", target="Exited", subsample_size=500, drop=("RowNumber", "CustomerId", "Surname")
    ),
    "Diabetes": StudyTable(file="diabetes.csv.gz", target="Diabetes_012", subsample_size=5000),
}

WAYS: dict[str, tuple[Scaling, TrainingSchedule]] = {
    "SGD 0.1, standardised": ("standard", TrainingSchedule(epochs=EPOCHS, learning_rate=0.1)),
    "Adam 0.001, standardised": ("standard", TrainingSchedule(epochs=EPOCHS, learning_rate=0.001, optimizer="adam")),
    "SGD 0.1, scaled to [0, 1]": ("min-max", TrainingSchedule(epochs=EPOCHS, learning_rate=0.1)),
}
FIRST = next(iter(WAYS))

TORCH, KERAS = "PyTorch", "Keras"
"""Whose default distribution the initial weights have."""

SIZES = (250, 500, 2000, 4000)  # of subsamples of Adult, next to the usual ones, for the paper's Figure 7


def data_of(folder: Path, name: str, scaling: Scaling = "standard") -> Data:
    """A table's training and test parts, 70 to 30."""
    source = SOURCES[name]
    frame = pd.DataFrame(read_table(str(folder / source.file)).columns)
    table = prepare(frame, source.target, drop=source.drop, scaling=scaling)
    return Data(
        train_features=table.train_features,
        train_labels=table.train_labels,
        test_features=table.test_features,
        test_labels=table.test_labels,
        classes=table.classes,
    )


@dataclass(frozen=True, kw_only=True)
class SelectionCell:
    """A selection: a key of `SOURCES`, one of `WAYS`, an architecture, and what is not as usual.

    Attributes:
        start: whose initial weights, `TORCH` or `KERAS`.
        seed: of the initial weights.
        size: of subsamples; the paper's by default.
    """

    data: str
    way: str
    architecture: str
    start: str = TORCH
    seed: int = 0
    size: int | None = None

    @property
    def key(self) -> str:
        """Unique among the cells."""
        started = [self.start, str(self.seed)] if (self.start, self.seed) != (TORCH, 0) else []
        sized = [f"{self.size} records"] if self.size else []
        return "/".join(("select", self.data, self.way, self.architecture, *started, *sized))

    @property
    def is_usual(self) -> bool:
        """Whether only table, training and architecture are chosen, as in the paper's Table 2."""
        return self == SelectionCell(data=self.data, way=self.way, architecture=self.architecture)


def selected(folder: Path, cell: SelectionCell) -> Line:
    """Recurrence and accuracy after every epoch, the models of the chosen cluster, and the published protocol."""
    scaling, schedule = WAYS[cell.way]
    data, source = data_of(folder, cell.data, scaling), SOURCES[cell.data]
    network = perceptron(cell.architecture, data.train_features.shape[1], len(data.classes), seed=cell.seed)
    if cell.start == KERAS:
        _glorot(network, cell.seed)
    settings = SelectionSettings(
        subsample_size=cell.size or source.subsample_size,
        epsilon=EPSILON,
        schedule=schedule,
        keep=tuple(range(1, schedule.epochs)),
    )
    found = recommend(network, data, settings)
    line = {
        "kind": "select",
        **asdict(cell),
        "num_subsamples": len(found.subsamples.records),
        "looks": [
            {"epochs": look.epochs, "recurrence": look.recurrence, "mean": look.mean and asdict(look.mean.test)}
            for look in found.snapshots
        ],
        "chosen": _best(network, data, found, "largest"),
        "by_mean": _best(network, data, found, "mean"),
        "majority": asdict(found.majority),
        "plain": asdict(found.plain),
    }
    if not cell.is_usual:
        return line
    is_first = cell.architecture == "dnn-1"
    return line | {
        "whole_table": whole_table(network, data, source, schedule, line["chosen"]["epochs"] if line["chosen"] else 1),
        "private": list(private(network, data)) if is_first else [],
        "curves": list(_curves(network, data, found)) if is_first and cell.way == FIRST else [],
    }


def _glorot(network: torch.nn.Module, seed: int) -> None:
    """Give a network the initial weights of Keras: uniform by Glorot's rule, and no biases."""
    generator = torch.Generator().manual_seed(seed)
    for value in network.parameters():
        if value.dim() > 1:
            torch.nn.init.xavier_uniform_(value, generator=generator)
        else:
            torch.nn.init.zeros_(value)


def _clusters(found: Recommendation, epoch: int, measure: Measure) -> list[Cluster]:
    """The five largest clusters after an epoch, of two models or more."""
    vectors, generators = found.vectors[epoch].numpy(), list(found.subsamples.records)
    each = select(vectors, generators, epsilon=EPSILON, measure=measure, top=5)
    return [cluster for cluster in each if cluster.recurrence > 1]


def _best(network: torch.nn.Module, data: Data, found: Recommendation, measure: Measure) -> dict[str, Any] | None:
    """The epoch in which the mean of the largest cluster is most accurate on *training* records; None without one."""
    best: tuple[tuple[float, int], Cluster, dict[str, Any]] | None = None
    for look in found.snapshots:
        for cluster in _clusters(found, look.epochs, measure)[:1]:
            mean = evaluate(network, torch.from_numpy(cluster.mean), data)
            known = {"epochs": look.epochs, "recurrence": cluster.recurrence, "k": cluster.anonymity.k}
            rank = (mean.train.accuracy, cluster.recurrence)
            if best is None or rank > best[0]:
                best = rank, cluster, {**known, "mean": asdict(mean), "plain": asdict(look.plain)}
    if best is None:
        return None
    _, cluster, line = best
    members = [found.vectors[line["epochs"]][row] for row in cluster.members]
    return line | {"members": [asdict(evaluate(network, vector, data).test) for vector in members]}


def _curves(network: torch.nn.Module, data: Data, found: Recommendation) -> Iterator[dict[str, Any]]:
    """After every epoch F1 and loss on training records of the top five clusters' members and means, and the plain."""

    def judged(vector: Tensor) -> list[float]:
        train = evaluate(network, vector, data).train
        return [train.f1, train.loss]

    for look in found.snapshots:
        vectors, clusters = found.vectors[look.epochs], _clusters(found, look.epochs, "mean")
        yield {
            "members": [judged(vectors[row]) for cluster in clusters for row in cluster.members],
            "means": [judged(torch.from_numpy(cluster.mean)) for cluster in clusters],
            "plain": [look.plain.train.f1, look.plain.train.loss],
        }


def whole_table(
    network: torch.nn.Module, data: Data, source: StudyTable, schedule: TrainingSchedule, epoch: int
) -> dict[str, Any]:
    """Recurrence and test accuracy with subsamples of all records, test records included, as in the paper."""
    features = torch.cat([data.train_features, data.test_features])
    labels = torch.cat([data.train_labels, data.test_labels])
    records = disjoint_subsamples(labels.numpy(), source.subsample_size, np.random.default_rng(0)).records
    vectors = train_stacked(network, features, labels, records, schedule, seed=0, keep=(epoch,))[epoch]
    (cluster,) = select(vectors.numpy(), list(records), epsilon=EPSILON, top=1)
    return {
        "num_subsamples": len(records),
        "recurrence": cluster.recurrence,
        "accuracy": evaluate(network, torch.from_numpy(cluster.mean), data).test.accuracy,
    }


def private(network: torch.nn.Module, data: Data) -> Iterator[dict[str, Any]]:
    """DP-SGD on the whole training part at three epsilons."""
    schedule = PrivateSchedule(steps=300, expected_batch_size=512, learning_rate=0.5)
    num_records = len(data.train_labels)
    delta = default_delta(num_records)
    for epsilon in (0.1, 0.5, 1.0):
        noise = noise_multiplier(epsilon, schedule, num_records)
        vector, events = train_privately(
            network,
            data.train_features,
            data.train_labels,
            schedule,
            noise_multiplier=noise,
            source=SeededSource("integral study", str(epsilon)),
        )
        cost = epsilon_of(events, delta).epsilon
        yield {"epsilon": cost, "asked": epsilon, "delta": delta, "noise_multiplier": noise} | asdict(
            evaluate(network, vector, data)
        )


@dataclass(frozen=True, kw_only=True)
class AttackCell:
    """An attack on Adult: its game and how its targets are trained; of all kinds if there are epochs to overfit."""

    game: Game
    architecture: str
    epochs: int
    epsilon: float = EPSILON
    overfit_epochs: int | None = None

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return f"attack/{self.architecture}/{self.game.size}/{self.game.comparison}"


def cells() -> list[SelectionCell | AttackCell]:
    """All cells: selections, attacks on small training sets, and one on sets of the paper's size.

    With sets of that size the recommended mean has learnt something.
    """
    of_adult = partial(SelectionCell, data="Adult", architecture="dnn-1")
    selections = [
        *(SelectionCell(data=name, way=way, architecture=each) for way, name, each in product(WAYS, SOURCES, HIDDEN)),
        *(of_adult(way=FIRST, start=start, seed=seed) for start, seed in product((TORCH, KERAS), range(3))),
        *(of_adult(way=FIRST, size=size) for size in SIZES),
    ]
    small = Game(size=10, num_owners=20, num_subsamples=500, num_trials=NUM_TARGETS)
    games = [replace(small, comparison="norm"), replace(small, comparison="projection")]
    attacks = [AttackCell(game=game, architecture="dnn-1", epochs=10, overfit_epochs=200) for game in games]
    large = Game(size=1000, num_owners=20, num_subsamples=200, num_best=5, num_trials=20)
    return [*dict.fromkeys(selections), *attacks, AttackCell(game=large, architecture="dnn-3", epochs=7, epsilon=0.1)]


def run(folder: Path, cell: SelectionCell | AttackCell) -> Line:
    """The results of a cell on the tables in a folder."""
    return selected(folder, cell) if isinstance(cell, SelectionCell) else _attacked(folder, cell)


def _attacked(folder: Path, cell: AttackCell) -> Line:
    data, schedule = data_of(folder, "Adult"), TrainingSchedule(epochs=cell.epochs)
    network = perceptron(cell.architecture, data.train_features.shape[1], len(data.classes), seed=0)
    if cell.overfit_epochs:
        plan = AttackPlan(epsilon=cell.epsilon, schedule=schedule, overfit_epochs=cell.overfit_epochs)
        found = list(attack_table(network, data, cell.game, plan, seed=0))
    else:
        train = trainer(network, data.train_features, data.train_labels, schedule, seed=0)
        targets = {
            "plain": plain,
            f"recommended mean, {cell.epsilon:g}": recommended_mean(cell.epsilon),
            "the same, all other generators known": recommended_mean(cell.epsilon, others_known=True),
        }
        found = [attacked(name, network, data, cell.game, train, way, seed=0) for name, way in targets.items()]
    kind = "attack" if cell.overfit_epochs else "attack-useful"
    own = {"kind": kind, "comparison": cell.game.comparison, "architecture": cell.architecture, "epochs": cell.epochs}
    return {**own, "game": asdict(cell.game), "rows": [asdict(row) for row in found]}

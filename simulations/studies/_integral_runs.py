"""The runs of the study of integral privacy: selections on two tables, and attacks on their models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedpriv.learning.data import read_table
from fedpriv.methods.integral import (
    HIDDEN,
    PrivateSchedule,
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
    # Ids, and the five columns that state the kind of failure.
    "AI4I": StudyTable(
        file="ai4i2020.csv.gz",
        target="Machine failure",
        subsample_size=500,
        drop=("UDI", "Product ID", "TWF", "HDF", "PWF", "OSF", "RNF"),
    ),
}

WAYS: dict[str, tuple[Scaling, TrainingSchedule]] = {
    "SGD 0.1, standardised": ("standard", TrainingSchedule(epochs=EPOCHS, learning_rate=0.1)),
    "Adam 0.001, standardised": ("standard", TrainingSchedule(epochs=EPOCHS, learning_rate=0.001, optimizer="adam")),
    "SGD 0.1, scaled to [0, 1]": ("min-max", TrainingSchedule(epochs=EPOCHS, learning_rate=0.1)),
}


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
    """A selection: a key of `SOURCES`, one of `WAYS`, and an architecture."""

    data: str
    way: str
    architecture: str

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return f"select/{self.data}/{self.way}/{self.architecture}"


def selected(folder: Path, cell: SelectionCell) -> Line:
    """Recurrence and accuracy after every epoch, the models of the chosen cluster, and the published protocol."""
    scaling, schedule = WAYS[cell.way]
    data, source, architecture = data_of(folder, cell.data, scaling), SOURCES[cell.data], cell.architecture
    network = perceptron(architecture, data.train_features.shape[1], len(data.classes), seed=0)
    settings = SelectionSettings(
        subsample_size=source.subsample_size,
        epsilon=EPSILON,
        schedule=schedule,
        epsilons=(0.1, 0.2),
        keep=tuple(range(1, EPOCHS)),
    )
    recommendation = recommend(network, data, settings)
    looks = [asdict(look) for look in recommendation.snapshots]
    chosen = best_epoch(looks)
    epoch = chosen["epochs"] if chosen else 1
    generators = list(recommendation.subsamples.records)
    if chosen:
        vectors = recommendation.vectors[epoch]
        (cluster,) = select(vectors.numpy(), generators, epsilon=EPSILON, top=1)
        chosen["members"] = [asdict(evaluate(network, vectors[row], data).test) for row in cluster.members]
    return {
        "kind": "select",
        **asdict(cell),
        "num_subsamples": len(generators),
        "looks": [
            {"epochs": look["epochs"], "recurrence": look["recurrence"], "mean": look["mean"] and look["mean"]["test"]}
            for look in looks
            if look["epsilon"] == EPSILON
        ],
        "chosen": chosen,
        "majority": asdict(recommendation.majority),
        "plain": asdict(recommendation.plain),
        "whole_table": whole_table(network, data, source, schedule, epoch),
        "private": list(private(network, data)) if architecture == "dnn-1" else [],
    }


def best_epoch(looks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The epoch's look in which the mean of a cluster of two or more is most accurate on *training* records."""
    with_mean = [look for look in looks if look["epsilon"] == EPSILON and look["mean"] is not None]
    return max(with_mean, key=lambda look: (look["mean"]["train"]["accuracy"], look["recurrence"]), default=None)


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
    selections = [
        SelectionCell(data=name, way=way, architecture=each) for way in WAYS for name in SOURCES for each in HIDDEN
    ]
    small = Game(size=10, num_owners=20, num_subsamples=500, num_trials=NUM_TARGETS)
    games = [replace(small, comparison="norm"), replace(small, comparison="projection")]
    attacks = [AttackCell(game=game, architecture="dnn-1", epochs=10, overfit_epochs=200) for game in games]
    large = Game(size=1000, num_owners=20, num_subsamples=200, num_best=5, num_trials=20)
    return [*selections, *attacks, AttackCell(game=large, architecture="dnn-3", epochs=7, epsilon=0.1)]


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

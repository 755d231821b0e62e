"""Integrally private model selection on Adult and AI4I 2020, as in Varshney and Torra 2023, sections 2 and 4.

    python -m simulations.studies.integral select|attack|attack-useful|page [--data FOLDER]

FOLDER holds the UCI tables adult.csv.gz and ai4i2020.csv.gz with header lines. `select` trains the models of all
subsamples and measures recurrence and accuracy after every epoch, `attack` runs the model comparison attack on small
training sets and `attack-useful` on sets of the paper's size; each writes JSON lines. `page` makes results/integral.md
and its plots from them. Results that are there are not computed again, except those of `attack-useful`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.views import default_delta
from fedpriv.data import load_table
from fedpriv.integral import (
    HIDDEN,
    PrivateSchedule,
    TrainingSchedule,
    disjoint_subsamples,
    perceptron,
    select,
    train_privately,
    train_stacked,
)
from fedpriv.integral.attack import (
    AttackPlan,
    Game,
    attack_table,
    attacked,
    noise_multiplier,
    plain,
    recommended_mean,
    trainer,
)
from fedpriv.integral.procedure import Data, SelectionSettings, evaluate, recommend
from fedpriv.integral.tabular import Scaling, prepare
from fedpriv.mechanisms.sources import SeededSource
from simulations.studies import integral_page
from simulations.studies.dedup.cells import append, lines

EPSILON = 0.05
EPOCHS = 20
CURVE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table of the study and its settings in the paper (Tables 1 and 2)."""

    file: str
    target: str
    subsample_size: int
    drop: tuple[str, ...] = ()


SOURCES = {
    "Adult": Source(file="adult.csv.gz", target="income", subsample_size=1000),
    # Ids, and the five columns that state the kind of failure.
    "AI4I": Source(
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
    frame = load_table(str(folder / source.file)).to_pandas()
    table = prepare(frame, source.target, drop=source.drop, scaling=scaling)
    return Data(
        train_features=table.train_features,
        train_labels=table.train_labels,
        test_features=table.test_features,
        test_labels=table.test_labels,
        classes=table.classes,
    )


def select_all(folder: Path, out: Path) -> None:
    """A line for each table, way of training and architecture."""
    done = {(line["data"], line["way"], line["architecture"]) for line in lines(out / "select.jsonl")}
    for way, (scaling, schedule) in WAYS.items():
        for name in SOURCES:
            for architecture in HIDDEN:
                if (name, way, architecture) in done:
                    continue
                began = time.perf_counter()
                line: dict[str, Any] = {"data": name, "way": way, "architecture": architecture}
                line |= selected(data_of(folder, name, scaling), SOURCES[name], architecture, schedule)
                line["seconds"] = time.perf_counter() - began
                append(out / "select.jsonl", line)
                print(f"{name}, {way}, {architecture}: {line['seconds']:.0f} s", flush=True)


def selected(data: Data, source: Source, architecture: str, schedule: TrainingSchedule) -> dict[str, Any]:
    """Recurrence and accuracy after every epoch, curves of the chosen cluster's models, and the published protocol."""
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
    members: tuple[int, ...] = ()
    if chosen:
        vectors = recommendation.vectors[epoch].numpy()
        strict = select(vectors, generators, epsilon=EPSILON, clustering="complete", top=1)[0]
        (cluster,) = select(vectors, generators, epsilon=EPSILON, top=1)
        members = cluster.members
        chosen |= {
            "largest_difference": cluster.largest_difference,
            "complete_recurrence": strict.recurrence,
            "complete_accuracy": evaluate(network, torch.from_numpy(strict.mean), data).test.accuracy,
            "members": [asdict(evaluate(network, recommendation.vectors[epoch][row], data)) for row in members],
        }
    curves = {}
    if architecture == "dnn-1" and members:
        for at in CURVE:
            own = recommendation.vectors[at][list(members)]
            curves[at] = {
                "members": [asdict(evaluate(network, vector, data)) for vector in own],
                "mean": asdict(evaluate(network, own.mean(dim=0), data)),
            }
    return {
        "num_subsamples": len(generators),
        "looks": looks,
        "chosen": chosen,
        "curves": curves,
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
    network: torch.nn.Module, data: Data, source: Source, schedule: TrainingSchedule, epoch: int
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


def attack_all(folder: Path, out: Path, trials: int) -> None:
    """A line for each comparison and kind of target, on Adult."""
    done = {line["comparison"] for line in lines(out / "attack.jsonl")}
    data = data_of(folder, "Adult")
    network = perceptron("dnn-1", data.train_features.shape[1], len(data.classes), seed=0)
    for comparison in ("norm", "projection"):
        if comparison in done:
            continue
        game = Game(size=10, num_owners=20, num_subsamples=500, num_trials=trials, comparison=comparison)
        plan = AttackPlan(epsilon=EPSILON, schedule=TrainingSchedule(epochs=10), overfit_epochs=200)
        rows = []
        for row in attack_table(network, data, game, plan, seed=0):
            rows.append(asdict(row))
            print(comparison, row, flush=True)
        append(out / "attack.jsonl", {"comparison": comparison, "game": asdict(game), "rows": rows})


def attack_useful(folder: Path, out: Path) -> None:
    """One line for targets of the paper's subsample size, at which the recommended mean has learnt something."""
    data = data_of(folder, "Adult")
    network = perceptron("dnn-3", data.train_features.shape[1], len(data.classes), seed=0)
    epsilon, epochs = 0.1, 7
    game = Game(size=1000, num_owners=20, num_subsamples=200, num_best=5, num_trials=20)
    train = trainer(network, data.train_features, data.train_labels, TrainingSchedule(epochs=epochs), seed=0)
    targets = {
        "plain": plain,
        f"recommended mean, {epsilon:g}": recommended_mean(epsilon),
        "the same, all other generators known": recommended_mean(epsilon, others_known=True),
    }
    rows = [asdict(attacked(name, network, data, game, train, publish, seed=0)) for name, publish in targets.items()]
    line = {"architecture": "dnn-3", "epochs": epochs, "game": asdict(game), "rows": rows}
    append(out / "attack-useful.jsonl", line)


def main() -> None:
    """Do one step of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("select", "attack", "attack-useful", "page"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("results/studies/integral"))
    parser.add_argument("--page", type=Path, default=Path("results/integral.md"))
    parser.add_argument("--trials", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.step == "select":
        select_all(arguments.data, arguments.out)
    elif arguments.step == "attack":
        attack_all(arguments.data, arguments.out, arguments.trials)
    elif arguments.step == "attack-useful":
        attack_useful(arguments.data, arguments.out)
    else:
        results = (lines(arguments.out / f"{name}.jsonl") for name in ("select", "attack", "attack-useful"))
        integral_page.write(arguments.page, *results)


if __name__ == "__main__":
    main()

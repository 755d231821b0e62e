"""Training the models of all subsamples at once, compared with one after another.

    python -m simulations.benchmarks.integral_training [--data adult.csv --target income] [--models 47] [--epochs 5]

One after another is a plain PyTorch loop with the same initial weights and batches. Without a CSV the records are drawn
at random in Adult's shape, 32,561 of 108 features; the cost of a step does not depend on their values. The subsamples
are disjoint, so 47 of them have 692 records each. Both ways run on one core, which suits such small networks best;
times are the least of the repeats.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv.learning.data import read_table
from fedpriv.methods.integral import (
    HIDDEN,
    OPTIMIZERS,
    Indices,
    TrainingSchedule,
    batch_order,
    disjoint_subsamples,
    perceptron,
    to_vector,
    train_stacked,
)
from fedpriv.methods.integral.tabular import prepare
from simulations.benchmarks._measuring import claim

TARGET = 10.0
JUDGED = ("dnn-1", "dnn-3", "dnn-4")

# Largest difference of a weight that counts as the same result in float32.
SAME = 1e-4


def one_by_one(
    network: nn.Module, features: Tensor, labels: Tensor, records: Indices, schedule: TrainingSchedule, *, seed: int
) -> Tensor:
    """The weights, [networks, values], by a plain loop over networks and batches."""
    weights = []
    for rows in torch.from_numpy(records):
        model = copy.deepcopy(network)
        optimizer = OPTIMIZERS[schedule.optimizer](model.parameters(), lr=schedule.learning_rate)
        for batches in batch_order(records.shape[1], schedule, seed):
            for positions in batches:
                chosen = rows[positions]
                optimizer.zero_grad()
                F.cross_entropy(model(features[chosen]), labels[chosen]).backward()
                optimizer.step()
        weights.append(to_vector(model))
    return torch.stack(weights)


def together(
    network: nn.Module, features: Tensor, labels: Tensor, records: Indices, schedule: TrainingSchedule, *, seed: int
) -> Tensor:
    """The weights, [networks, values], of all networks trained at once."""
    return train_stacked(network, features, labels, records, schedule, seed=seed)[schedule.epochs]


def records_of(data: Path | None, target: str, seed: int) -> tuple[Tensor, Tensor]:
    """Features and labels of a CSV, or random ones in Adult's shape with its share of the larger class."""
    if data is not None:
        table = prepare(pd.DataFrame(read_table(str(data)).columns), target, seed=seed)
        return torch.cat([table.train_features, table.test_features]), torch.cat(
            [table.train_labels, table.test_labels]
        )
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(32_561, generator=generator) < 0.24).long()
    return torch.randn(len(labels), 108, generator=generator) + 0.3 * labels.unsqueeze(1), labels


def best_of(repeats: int, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """The least seconds, and the result of the last run."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - began)
    return min(seconds), result


def main() -> None:
    """Print a line for each architecture and then the claim as a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--target", default="income")
    parser.add_argument("--models", type=int, default=47)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    features, labels = records_of(arguments.data, arguments.target, arguments.seed)
    size = len(labels) // arguments.models
    records = disjoint_subsamples(labels.numpy(), size, np.random.default_rng(arguments.seed)).records
    records = records[: arguments.models]
    schedule = TrainingSchedule(epochs=arguments.epochs)
    ratios, gaps = {}, {}
    for name in HIDDEN:
        network = perceptron(name, features.shape[1], int(labels.max()) + 1, seed=arguments.seed)
        training = (network, features, labels, records, schedule)
        # The first pass of a process includes loading and is not measured.
        train_stacked(network, features, labels, records[:2], TrainingSchedule(epochs=1), seed=0)
        stacked, weights = best_of(arguments.repeats, partial(together, *training, seed=arguments.seed))
        looped, expected = best_of(arguments.repeats, partial(one_by_one, *training, seed=arguments.seed))
        ratios[name], gaps[name] = looped / stacked, float((weights - expected).abs().max())
        judged = f"target {TARGET:g}" if name in JUDGED else "bound by arithmetic, no target"
        print(
            f"{name}: {len(records)} models of {size} records, {looped:.2f} s one by one, {stacked:.2f} s together, "
            f"ratio {ratios[name]:.1f} ({judged}), largest difference of a weight {gaps[name]:.1e}"
        )
    least, gap = min(ratios[name] for name in JUDGED), max(gaps[name] for name in JUDGED)
    text = f"{len(records)} networks trained together against one by one, least of {', '.join(JUDGED)}"
    claim(text, at_least=TARGET, holds=gap <= SAME, ratio=least, ratios=ratios, largest_difference=gap)


if __name__ == "__main__":
    main()

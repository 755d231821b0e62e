"""The whole procedure on a data set: subsamples, models, clusters, means, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.methods.integral._networks import NetworkMetrics, aligned, majority_class, metrics
from fedpriv.methods.integral._selection import (
    Cluster,
    Linkage,
    Measure,
    Subsamples,
    check_epsilon,
    disjoint_subsamples,
    select,
)
from fedpriv.methods.integral._training import TrainingSchedule, train_stacked

# Epochs after which recurrence and accuracy are measured, in addition to the last.
_SNAPSHOT_EPOCHS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """The records from which a model is selected.

    Attributes:
        train_features, test_features: [records, ...].
        train_labels, test_labels: int64 [records], classes from 0.
    """

    train_features: Tensor
    train_labels: Tensor
    test_features: Tensor
    test_labels: Tensor
    classes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """The settings of the procedure.

    Attributes:
        subsample_size: N.
        epsilon: units of the weights.
        align: whether each model's neurons are first brought into the order of the first model's.
        epsilons: further values at which the trade-off is measured.
        keep: further epochs at which the trade-off is measured.
    """

    subsample_size: int
    epsilon: float
    measure: Measure = "largest"
    clustering: Linkage = "first-member"
    top: int = 5
    align: bool = False
    schedule: TrainingSchedule = field(default_factory=TrainingSchedule)
    seed: int = 0
    epsilons: tuple[float, ...] = ()
    keep: tuple[int, ...] = _SNAPSHOT_EPOCHS


@dataclass(frozen=True, kw_only=True)
class TrainAndTest:
    """Metrics of one model."""

    train: NetworkMetrics
    test: NetworkMetrics


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """Recurrence and accuracy after a number of epochs, at one epsilon.

    Attributes:
        epochs: >= 1.
        epsilon: units of the weights.
        recurrence: of the largest cluster; 1 means that no two models are within epsilon.
        k: disjoint generators within epsilon of its mean; 0 if no two models form a cluster.
        mean: metrics of the mean; None if no two models form a cluster.
        plain: metrics of one model trained on all training records for as many epochs.
    """

    epochs: int
    epsilon: float
    recurrence: int
    k: int
    mean: TrainAndTest | None
    plain: TrainAndTest


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """The result of the procedure.

    Attributes:
        vectors: {epoch: [models, values]}, aligned if requested.
        clusters: the top clusters with two or more members, most recurrent first; may be empty.
        cluster_sizes: of all clusters, descending.
        members: {row: metrics} of the models of these clusters.
        majority: metrics of always predicting the most frequent class.
    """

    subsamples: Subsamples
    vectors: Mapping[int, Tensor]
    clusters: tuple[Cluster, ...]
    cluster_sizes: tuple[int, ...]
    means: tuple[TrainAndTest, ...]
    members: Mapping[int, TrainAndTest]
    plain: TrainAndTest
    majority: TrainAndTest
    snapshots: tuple[_Snapshot, ...]


def recommend(network: nn.Module, data: Data, settings: SelectionSettings) -> Recommendation:
    """The most recurrent clusters of models trained on disjoint subsamples, with their means and metrics.

    Args:
        network: with the initial weights from which all models are trained.
        data: subsamples are dealt from its training part alone.

    Raises:
        InputError: there are too few records for two subsamples or for a class in each of them, a value is out of
            range, or training diverges.

    Source: Varshney and Torra 2023, Algorithm 1.
    """
    if settings.top < 1:
        raise InputError(f"top = {settings.top}: must be >= 1")
    for epsilon in (settings.epsilon, *settings.epsilons):
        check_epsilon(epsilon)
    labels = data.train_labels.numpy()
    subsamples = disjoint_subsamples(
        labels, settings.subsample_size, np.random.default_rng(settings.seed), names=data.classes
    )
    whole = np.arange(len(labels), dtype=np.int64)[np.newaxis]

    def trained(records: np.ndarray) -> dict[int, Tensor]:
        return train_stacked(
            network,
            data.train_features,
            data.train_labels,
            records,
            settings.schedule,
            seed=settings.seed,
            keep=settings.keep,
        )

    vectors = trained(subsamples.records)
    if settings.align:
        vectors = {epoch: aligned(network, of_epoch, of_epoch[0]) for epoch, of_epoch in vectors.items()}
    generators = list(subsamples.records)
    last = vectors[settings.schedule.epochs]
    clusters = _clusters(last, generators, settings, settings.epsilon)
    chosen = tuple(cluster for cluster in clusters if cluster.recurrence > 1)[: settings.top]
    plain = {epoch: evaluate(network, of_epoch[0], data) for epoch, of_epoch in trained(whole).items()}
    snapshots = tuple(
        _snapshot(network, data, settings, epoch, epsilon, of_epoch, generators, plain[epoch])
        for epoch, of_epoch in vectors.items()
        for epsilon in sorted({settings.epsilon, *settings.epsilons})
    )
    rows = sorted({row for cluster in chosen for row in cluster.members})
    return Recommendation(
        subsamples=subsamples,
        vectors=vectors,
        clusters=chosen,
        cluster_sizes=tuple(cluster.recurrence for cluster in clusters),
        means=tuple(evaluate(network, torch.from_numpy(cluster.mean), data) for cluster in chosen),
        members={row: evaluate(network, last[row], data) for row in rows},
        plain=plain[settings.schedule.epochs],
        majority=TrainAndTest(
            train=majority_class(data.train_labels, data.train_labels),
            test=majority_class(data.train_labels, data.test_labels),
        ),
        snapshots=snapshots,
    )


def evaluate(network: nn.Module, vector: Tensor, data: Data) -> TrainAndTest:
    """Metrics of a model on both parts of the data."""
    return TrainAndTest(
        train=metrics(network, vector, data.train_features, data.train_labels),
        test=metrics(network, vector, data.test_features, data.test_labels),
    )


def _clusters(
    vectors: Tensor, generators: Sequence[np.ndarray], settings: SelectionSettings, epsilon: float
) -> list[Cluster]:
    return select(
        vectors.numpy(), generators, epsilon=epsilon, measure=settings.measure, clustering=settings.clustering
    )


def _snapshot(
    network: nn.Module,
    data: Data,
    settings: SelectionSettings,
    epoch: int,
    epsilon: float,
    vectors: Tensor,
    generators: Sequence[np.ndarray],
    plain: TrainAndTest,
) -> _Snapshot:
    largest = _clusters(vectors, generators, settings, epsilon)[0]
    is_cluster = largest.recurrence > 1
    return _Snapshot(
        epochs=epoch,
        epsilon=epsilon,
        recurrence=largest.recurrence,
        k=largest.anonymity.k if is_cluster else 0,
        mean=evaluate(network, torch.from_numpy(largest.mean), data) if is_cluster else None,
        plain=plain,
    )

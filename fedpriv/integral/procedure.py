"""The whole procedure on a data set: subsamples, models, clusters, means, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.integral.alignment import aligned
from fedpriv.integral.metrics import Metrics, majority_class, metrics
from fedpriv.integral.selection import Cluster, Linkage, Measure, check_epsilon, select
from fedpriv.integral.stacked_training import Schedule, train_stacked
from fedpriv.integral.subsamples import Subsamples, disjoint_subsamples

# Epochs after which recurrence and accuracy are looked at, beside the last.
LOOKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Records to choose a model by.

    Attributes:
        train_features, test_features: [records, ...].
        train_labels, test_labels: int64 [records], classes from 0.
        classes: their names, for errors.
    """

    train_features: Tensor
    train_labels: Tensor
    test_features: Tensor
    test_labels: Tensor
    classes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of the procedure.

    Attributes:
        subsample_size: N.
        epsilon: units of the weights.
        measure, clustering, top: as for `select`.
        align: whether each model's neurons are first brought into the order of the first model's.
        schedule: of training.
        seed: of subsamples and batches.
        epsilons: more of them, at which the trade-off is looked at.
        keep: more epochs, at which the trade-off is looked at.
    """

    subsample_size: int
    epsilon: float
    measure: Measure = "largest"
    clustering: Linkage = "first-member"
    top: int = 5
    align: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    epsilons: tuple[float, ...] = ()
    keep: tuple[int, ...] = LOOKS


@dataclass(frozen=True, kw_only=True)
class TrainAndTest:
    """Metrics of one model."""

    train: Metrics
    test: Metrics


@dataclass(frozen=True, kw_only=True)
class Look:
    """Recurrence and accuracy after some epochs, at some epsilon.

    Attributes:
        epochs: >= 1.
        epsilon: units of the weights.
        recurrence: of the largest cluster; 1 means that no two models are that near.
        k: disjoint generators within epsilon of its mean; 0 where not even two models are a cluster.
        mean: of the mean, None where there is no cluster of two.
        plain: of one model of all training records, after as many epochs.
    """

    epochs: int
    epsilon: float
    recurrence: int
    k: int
    mean: TrainAndTest | None
    plain: TrainAndTest


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """What the procedure found.

    Attributes:
        subsamples: the generators.
        vectors: {epoch: [models, values]}, aligned if that was asked for.
        clusters: the top ones with two or more members, by falling recurrence; none is a finding too.
        cluster_sizes: of all clusters, falling.
        means: metrics of each cluster's mean.
        members: {row: metrics} of the models of these clusters.
        plain: of one model of all training records.
        majority: of the guess at the most frequent class.
        looks: over epochs and epsilon.
    """

    subsamples: Subsamples
    vectors: Mapping[int, Tensor]
    clusters: tuple[Cluster, ...]
    cluster_sizes: tuple[int, ...]
    means: tuple[TrainAndTest, ...]
    members: Mapping[int, TrainAndTest]
    plain: TrainAndTest
    majority: TrainAndTest
    looks: tuple[Look, ...]


def recommend(network: nn.Module, data: Data, settings: Settings) -> Recommendation:
    """The means of the most recurrent clusters of models of disjoint subsamples, and what speaks for and against them.

    Args:
        network: with the initial weights from which all models are trained.
        data: subsamples are dealt from its training part alone.
        settings: see there.

    Raises:
        InputError: too few records for two subsamples or for a class in each of them, a value out of range, or a
            training that diverges.

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
    plain = {epoch: judged(network, of_epoch[0], data) for epoch, of_epoch in trained(whole).items()}
    looks = tuple(
        _look(network, data, settings, epoch, epsilon, of_epoch, generators, plain[epoch])
        for epoch, of_epoch in vectors.items()
        for epsilon in sorted({settings.epsilon, *settings.epsilons})
    )
    rows = sorted({row for cluster in chosen for row in cluster.members})
    return Recommendation(
        subsamples=subsamples,
        vectors=vectors,
        clusters=chosen,
        cluster_sizes=tuple(cluster.recurrence for cluster in clusters),
        means=tuple(judged(network, torch.from_numpy(cluster.mean), data) for cluster in chosen),
        members={row: judged(network, last[row], data) for row in rows},
        plain=plain[settings.schedule.epochs],
        majority=TrainAndTest(
            train=majority_class(data.train_labels, data.train_labels),
            test=majority_class(data.train_labels, data.test_labels),
        ),
        looks=looks,
    )


def judged(network: nn.Module, vector: Tensor, data: Data) -> TrainAndTest:
    """Metrics of a model on both parts of the data."""
    return TrainAndTest(
        train=metrics(network, vector, data.train_features, data.train_labels),
        test=metrics(network, vector, data.test_features, data.test_labels),
    )


def _clusters(vectors: Tensor, generators: Sequence[np.ndarray], settings: Settings, epsilon: float) -> list[Cluster]:
    return select(
        vectors.numpy(), generators, epsilon=epsilon, measure=settings.measure, clustering=settings.clustering
    )


def _look(
    network: nn.Module,
    data: Data,
    settings: Settings,
    epoch: int,
    epsilon: float,
    vectors: Tensor,
    generators: Sequence[np.ndarray],
    plain: TrainAndTest,
) -> Look:
    largest = _clusters(vectors, generators, settings, epsilon)[0]
    found = largest.recurrence > 1
    return Look(
        epochs=epoch,
        epsilon=epsilon,
        recurrence=largest.recurrence,
        k=largest.anonymity.k if found else 0,
        mean=judged(network, torch.from_numpy(largest.mean), data) if found else None,
        plain=plain,
    )

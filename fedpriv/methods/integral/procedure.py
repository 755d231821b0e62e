"""Selection from start to end: on a data set, by subsamples and models of them, and among a federation's variants.

Variants are compared by the products B A that they add to the model, and by their heads: B and A are determined only
up to a change of basis between them, so equal maps may have different factors. No further alignment is needed, since
the frozen base fixes the order of all neurons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.learning.adapters import Adapter, factors_of, non_lora_tensors, of_one_rank
from fedpriv.methods.integral import _networks, _selection

# Epochs after which recurrence and accuracy are measured, in addition to the last.
_SNAPSHOT_EPOCHS = (1, 2, 5, 10, 20, 50, 100, 200, 500)

# Singular values below this share of a product's largest one are rounding errors of float32 factors.
_NOISE_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """The records from which a model is selected: features [records, ...], and labels int64 [records] from 0."""

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
    measure: _selection.Measure = "largest"
    clustering: _selection.Linkage = "first-member"
    top: int = 5
    align: bool = False
    schedule: _networks.TrainingSchedule = field(default_factory=_networks.TrainingSchedule)
    seed: int = 0
    epsilons: tuple[float, ...] = ()
    keep: tuple[int, ...] = _SNAPSHOT_EPOCHS


@dataclass(frozen=True, kw_only=True)
class TrainAndTest:
    """Metrics of one model."""

    train: _networks.NetworkMetrics
    test: _networks.NetworkMetrics


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """Recurrence and accuracy after some epochs at one epsilon; without a cluster k is 0, and the mean untold."""

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

    subsamples: _selection.Subsamples
    vectors: Mapping[int, Tensor]
    clusters: tuple[_selection.Cluster, ...]
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
        _selection.check_epsilon(epsilon)
    labels = data.train_labels.numpy()
    subsamples = _selection.disjoint_subsamples(
        labels, settings.subsample_size, np.random.default_rng(settings.seed), names=data.classes
    )
    whole = np.arange(len(labels), dtype=np.int64)[np.newaxis]

    def trained(records: np.ndarray) -> dict[int, Tensor]:
        return _networks.train_stacked(
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
        vectors = {epoch: _networks.aligned(network, of_epoch, of_epoch[0]) for epoch, of_epoch in vectors.items()}

    def clustered(of_epoch: Tensor, epsilon: float) -> list[_selection.Cluster]:
        models, generators = of_epoch.numpy(), list(subsamples.records)
        return _selection.select(
            models, generators, epsilon=epsilon, measure=settings.measure, clustering=settings.clustering
        )

    last = vectors[settings.schedule.epochs]
    clusters = clustered(last, settings.epsilon)
    chosen = tuple(cluster for cluster in clusters if cluster.recurrence > 1)[: settings.top]
    plain = {epoch: evaluate(network, of_epoch[0], data) for epoch, of_epoch in trained(whole).items()}
    snapshots = tuple(
        _snapshot(network, data, epoch, epsilon, clustered(of_epoch, epsilon)[0], plain[epoch])
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
            train=_networks.majority_class(data.train_labels, data.train_labels),
            test=_networks.majority_class(data.train_labels, data.test_labels),
        ),
        snapshots=snapshots,
    )


def evaluate(network: nn.Module, vector: Tensor, data: Data) -> TrainAndTest:
    """Metrics of a model on both parts of the data."""
    return TrainAndTest(
        train=_networks.metrics(network, vector, data.train_features, data.train_labels),
        test=_networks.metrics(network, vector, data.test_features, data.test_labels),
    )


def _snapshot(
    network: nn.Module, data: Data, epoch: int, epsilon: float, largest: _selection.Cluster, plain: TrainAndTest
) -> _Snapshot:
    is_cluster = largest.recurrence > 1
    return _Snapshot(
        epochs=epoch,
        epsilon=epsilon,
        recurrence=largest.recurrence,
        k=largest.anonymity.k if is_cluster else 0,
        mean=evaluate(network, torch.from_numpy(largest.mean), data) if is_cluster else None,
        plain=plain,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurringVariants:
    """A cluster of clients with similar variants, and the mean of these variants.

    Attributes:
        near_mean: clients whose variants are within epsilon of the mean; k is their number, each with its own records.
        mean: an adapter whose products are the means of the members' products, of the smallest rank that allows it.
    """

    clients: tuple[str, ...]
    near_mean: tuple[str, ...]
    largest_difference: float
    mean: Adapter

    @property
    def recurrence(self) -> int:
        """Number of variants in the cluster."""
        return len(self.clients)

    @property
    def k(self) -> int:
        """The k of the mean's k-anonymous epsilon-integral privacy, which holds for k >= 2."""
        return len(self.near_mean)


def recurring_adapters(
    adapters: Mapping[str, Mapping[str, Tensor]],
    epsilon: float,
    *,
    measure: _selection.Measure = "largest",
    clustering: _selection.Linkage = "first-member",
    scale: float = 1.0,
) -> list[RecurringVariants]:
    """The clusters of client variants, most recurrent first, each with its mean as an adapter.

    Intended for variants of one round, which all started from the same global model. The clients' records are assumed
    to be disjoint. The result is not a differential privacy guarantee, and computing it from uploads costs no
    privacy, since it is post-processing.

    Args:
        adapters: {client: adapter}, tensors by peft's names; ranks may differ if they share one scale.
        epsilon: finite, >= 0, in units of the model's weights.
        measure: as for `select`, over the entries of scale * B A and of the head together.
        scale: LoRA's alpha / rank, by which B A is multiplied when added to the weights; > 0.

    Raises:
        InputError: there are no adapters, their names or shapes differ, or a value is out of range.

    Source: Varshney and Torra 2023, Algorithm 1, with clients for subsamples (their section 5).
    """
    if not adapters:
        raise InputError("adapters: there are none")
    if not 0 < scale < float("inf"):
        raise InputError(f"scale = {scale}: must be finite and > 0")
    names = list(adapters)
    vectors = _vectors(adapters, scale)
    # Each client's records form one generator.
    generators = [np.array([number]) for number in range(len(names))]
    clusters = _selection.select(vectors, generators, epsilon=epsilon, measure=measure, clustering=clustering)
    return [_variants(adapters, names, cluster) for cluster in clusters]


def _mean_adapter(adapters: Mapping[str, Mapping[str, Tensor]]) -> Adapter:
    """An adapter whose products B A are the means of the adapters' products, and whose head is the mean of theirs.

    Averaging the factors would give a different map. The mean of k products of rank r has a rank of up to k r; all
    layers get the smallest rank that represents all means exactly, up to float32, padded with zeros where a layer
    needs less. Save the adapter with that rank and with the alpha that keeps alpha / rank.
    """
    first, *_ = adapters.values()
    result = {
        name: torch.stack([adapter[name].double() for adapter in adapters.values()]).mean(dim=0).float()
        for name in non_lora_tensors(first)
    }
    pairs = {
        name: _mean_product([factors_of(adapter)[name] for adapter in adapters.values()]) for name in factors_of(first)
    }
    result |= of_one_rank(pairs)
    return {name: result[name] for name in first}


def _mean_product(factors: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(B, A) of the smallest rank >= 1 whose product is the mean of the products, by a QR of each side and an SVD."""
    stacked_b = torch.cat([b.double() for b, _ in factors], dim=1) / len(factors)
    stacked_a = torch.cat([a.double() for _, a in factors], dim=0)
    q_b, r_b = torch.linalg.qr(stacked_b)
    q_a, r_a = torch.linalg.qr(stacked_a.T)
    u, singular_values, v = torch.linalg.svd(r_b @ r_a.T)
    rank = max(1, int((singular_values > _NOISE_FLOOR * singular_values[0]).sum()))
    roots = singular_values[:rank].sqrt()
    return (q_b @ u[:, :rank] * roots).float(), (roots.unsqueeze(1) * (v[:rank] @ q_a.T)).float()


def _vectors(adapters: Mapping[str, Mapping[str, Tensor]], scale: float) -> _selection.Vectors:
    """The maps and heads of all clients, float64 [clients, values]."""
    first_name, *_ = adapters
    shapes = _shapes(adapters[first_name])
    rows = []
    for client, adapter in adapters.items():
        if _shapes(adapter) != shapes:
            raise InputError(f"adapter of {client!r}: its layers or shapes are not those of {first_name!r}'s")
        products = [scale * (b.double() @ a.double()) for _, (b, a) in sorted(factors_of(adapter).items())]
        parts = [*products, *(non_lora_tensors(adapter)[name].double() for name in sorted(non_lora_tensors(adapter)))]
        rows.append(torch.cat([part.flatten() for part in parts]).numpy())
    return np.stack(rows)


def _shapes(adapter: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of the maps and of the head, by name."""
    maps = {name: (b.shape[0], a.shape[1]) for name, (b, a) in factors_of(adapter).items()}
    return maps | {name: tuple(tensor.shape) for name, tensor in non_lora_tensors(adapter).items()}


def _variants(
    adapters: Mapping[str, Mapping[str, Tensor]], names: list[str], cluster: _selection.Cluster
) -> RecurringVariants:
    members = tuple(names[row] for row in cluster.members)
    return RecurringVariants(
        clients=members,
        near_mean=tuple(names[row] for row in cluster.near_mean),
        largest_difference=cluster.largest_difference,
        mean=_mean_adapter({name: adapters[name] for name in members}),
    )

"""Integrally private model selection: disjoint subsamples, clusters of similar models, and their means.

Subsamples have the class distribution of the whole data set; two rules say how many records each should have. Models
are rows of a matrix of weights; each has a generator, the records that it was trained on. Integral privacy is not
differential privacy: it says how many disjoint sets of records lead to nearly the same model, not how little one record
can change what is published.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist, pdist

from fedpriv.errors import InputError

Indices = npt.NDArray[np.int64]
"""Row numbers of records."""

_SAMPLES_PER_WEIGHT = 10
"""Source: Baum and Haussler 1988, as a rule of thumb in Varshney and Torra 2023, section 4.1."""

Vectors = npt.NDArray[np.floating]
_Distances = npt.NDArray[np.float64]

Measure = Literal["largest", "norm", "mean"]
"""The distance of two models: the largest difference of a parameter, the Euclidean norm of all, or their mean."""

Linkage = Literal["first-member", "complete"]
"""The members of a cluster are close to its first one, or to each other."""

_METRICS = {"largest": "chebyshev", "norm": "euclidean", "mean": "cityblock"}
_UNITS = {"largest": "largest weight difference", "norm": "norm of the difference", "mean": "mean weight difference"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Subsamples:
    """Disjoint subsamples of one size.

    Attributes:
        records: int64 [subsamples, size], rows of the data; no row occurs twice.
        class_counts: int64 [subsamples, classes].
        share_left_over: share of the data that is in no subsample, in [0, 1).
    """

    records: Indices
    class_counts: Indices
    share_left_over: float


def _largest_remainder(quotas: npt.NDArray[np.float64], total: int) -> Indices:
    """Integers that sum to `total`, each the floor or ceiling of its quota; ties go to the smaller index."""
    # Quotas that are whole up to rounding errors are made whole, so that no empty class gets a record.
    quotas = np.where(np.abs(quotas - np.rint(quotas)) < 1e-9, np.rint(quotas), quotas)
    floors = np.floor(quotas).astype(np.int64)
    largest = np.argsort(-(quotas - floors), kind="stable")[: total - int(floors.sum())]
    floors[largest] += 1
    return floors


def class_counts(class_sizes: Sequence[int], size: int) -> Indices:
    """How many records of each class each subsample gets, int64 [subsamples, classes].

    Guarantee: every row sums to `size`; every count is the floor or the ceiling of the subsample's share of the class,
    size * class / all; no class has to give more records than it has. Rounding each subsample separately would not
    ensure the last: two subsamples of 5 from 3 and 7 records would each take 2 of the first class.

    The records above the floors are assigned to classes by largest remainder over all subsamples together, and are
    then dealt to the subsamples in turn, class by class: each subsample gets at most one of them per class.

    Args:
        class_sizes: records of each class, >= 0.
        size: N >= 1 of a subsample, at most all records.
    """
    sizes = np.asarray(class_sizes, dtype=np.int64)
    num_records = int(sizes.sum())
    num_subsamples = num_records // size
    floors = size * sizes // num_records
    num_extra = size - int(floors.sum())
    fractions = (size * sizes % num_records) / num_records
    extras = _largest_remainder(num_subsamples * fractions, num_subsamples * num_extra)
    counts = np.tile(floors, (num_subsamples, 1))
    classes = np.repeat(np.arange(len(sizes)), extras)
    np.add.at(counts, (np.arange(len(classes)) % num_subsamples, classes), 1)
    return counts


def disjoint_subsamples(
    labels: Indices, size: int, generator: np.random.Generator, *, names: Sequence[str] = ()
) -> Subsamples:
    """floor(|D| / N) disjoint subsamples of N records, each with the class distribution of the whole data set.

    Args:
        labels: int64 [records], classes from 0.
        size: N >= 1.

    Raises:
        InputError: there are fewer than two subsamples, or too few records of a class for every subsample to get one.

    Source: Varshney and Torra 2023, section 3.
    """
    if size < 1:
        raise InputError(f"subsample_size = {size}: must be >= 1")
    num_subsamples = len(labels) // size
    if num_subsamples < 2:
        raise InputError(
            f"subsample_size = {size}: {len(labels)} records give {num_subsamples} subsamples; two need a size of at "
            f"most {len(labels) // 2}"
        )
    class_sizes = np.bincount(labels)
    counts = class_counts(class_sizes.tolist(), size)
    _check_every_class(class_sizes, counts, size, names)
    dealt = []
    for label, column in enumerate(counts.T):
        ends = np.cumsum(column)
        dealt.append(np.split(generator.permutation(np.flatnonzero(labels == label))[: ends[-1]], ends[:-1]))
    rows = [generator.permutation(np.concatenate(parts)) for parts in zip(*dealt, strict=True)]
    records = np.stack(rows).astype(np.int64)
    return Subsamples(records=records, class_counts=counts, share_left_over=1 - records.size / len(labels))


def _check_every_class(class_sizes: Indices, counts: Indices, size: int, names: Sequence[str]) -> None:
    """Refuse a size for which some subsample gets no record of a class."""
    missing = np.flatnonzero((counts.min(axis=0) == 0) & (class_sizes > 0))
    if not len(missing):
        return
    label = int(missing[np.argmin(class_sizes[missing])])
    name, num_records = names[label] if names else label, int(class_sizes.sum())
    sufficient = math.ceil(num_records / int(class_sizes[label]))
    advice = (
        f"a size of at least {sufficient} has one in each"
        if sufficient <= num_records // 2
        else "merge or leave out this class"
    )
    raise InputError(
        f"subsample_size = {size}: class {name!r} has {class_sizes[label]} of {num_records} records, too few for one "
        f"in each of {len(counts)} subsamples; {advice}"
    )


@dataclass(frozen=True, kw_only=True)
class _SampleSize:
    """A subsample size, N records, and the number of disjoint subsamples of it, floor(|D| / N)."""

    records: int
    num_subsamples: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Sample sizes for one network and one data set.

    Attributes:
        num_parameters: weights and biases, used in place of the VC dimension, as in the paper.
        rule_of_thumb: ten records per parameter.
        pac: (VC + ln(1 / delta)) / epsilon^2 records. The bound is known up to a constant, taken as 1 here.
    """

    num_parameters: int
    rule_of_thumb: _SampleSize
    pac: _SampleSize
    chosen: _SampleSize | None


def advice(
    num_parameters: int,
    num_records: int,
    *,
    excess_loss: float = 0.1,
    failure_probability: float = 0.05,
    subsample_size: int | None = None,
) -> Advice:
    """Sample sizes for a network by the rule of thumb and by the PAC bound.

    Args:
        num_parameters: >= 1.
        num_records: |D| >= 1.
        excess_loss: epsilon of the PAC bound, in (0, 1): the excess over the best network of its kind. It is neither
            the epsilon of integral privacy nor that of differential privacy.
        failure_probability: delta of the PAC bound, in (0, 1).
        subsample_size: a size to evaluate as well, >= 1.

    Raises:
        InputError: a value is out of range.

    Source: Varshney and Torra 2023, section 4.1; Vershynin 2018 for O([VC + ln(1/delta)] / epsilon^2).
    """
    counts = {"num_parameters": num_parameters, "num_records": num_records, "subsample_size": subsample_size}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{name} = {count}: must be >= 1")
    for name, share in {"excess_loss": excess_loss, "failure_probability": failure_probability}.items():
        if not 0 < share < 1:
            raise InputError(f"{name} = {share}: must lie in (0, 1)")

    def sized(records: int) -> _SampleSize:
        return _SampleSize(records=records, num_subsamples=num_records // records)

    pac = math.ceil((num_parameters + math.log(1 / failure_probability)) / excess_loss**2)
    return Advice(
        num_parameters=num_parameters,
        rule_of_thumb=sized(_SAMPLES_PER_WEIGHT * num_parameters),
        pac=sized(pac),
        chosen=None if subsample_size is None else sized(subsample_size),
    )


@dataclass(frozen=True, kw_only=True)
class Anonymity:
    """The requirements of k-anonymous integral privacy on a model's k generators: no record in all, none in two."""

    k: int
    intersection_is_empty: bool
    pairwise_disjoint: bool

    @property
    def holds(self) -> bool:
        """Whether there are two or more generators, pairwise disjoint and with an empty intersection."""
        return self.k >= 2 and self.intersection_is_empty and self.pairwise_disjoint


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """A cluster of similar models, and their mean, which is recommended.

    Attributes:
        members: rows, in the order of the models.
        mean: [values], float64.
        largest_difference: between any two members, by the measure. Up to 2 epsilon in first-member clusters.
        near_mean: rows of all models within epsilon of the mean, members or not.
    """

    members: tuple[int, ...]
    mean: npt.NDArray[np.float64]
    largest_difference: float
    near_mean: tuple[int, ...]
    anonymity: Anonymity

    @property
    def recurrence(self) -> int:
        """Number of models in the cluster."""
        return len(self.members)


def distances(vectors: Vectors, reference: Vectors, measure: Measure = "largest") -> _Distances:
    """The distance of each model from a reference, [models], float64.

    Args:
        vectors: [models, values].
        reference: [values].
        measure: `largest`, the paper's: the largest absolute difference of a weight; `norm`, the L2 norm of all
            differences; or `mean`, the mean of their absolute values.

    Raises:
        InputError: the measure is unknown.

    Source: Varshney and Torra 2023, section 3.
    """
    return _measured(cdist, vectors, np.asarray(reference)[np.newaxis], measure=measure)[:, 0]


def _measured(function: Callable[..., _Distances], *matrices: Vectors, measure: Measure) -> _Distances:
    """Distances of the models by the measure, from scipy's `cdist` or `pdist`."""
    if measure not in _METRICS:
        raise InputError(f"measure = {measure!r}: must be one of {', '.join(_METRICS)}")
    found = function(*(np.asarray(each, dtype=np.float64) for each in matrices), _METRICS[measure])
    return found / matrices[0].shape[1] if measure == "mean" else found


def _first_member_clusters(vectors: Vectors, epsilon: float, measure: Measure = "largest") -> list[tuple[int, ...]]:
    """Clusters as published: a model joins the first cluster whose *first* member is within epsilon, or starts one.

    Two members may be up to 2 epsilon apart, and the clusters depend on the order of the models.

    Source: Varshney and Torra 2023, Algorithm 1.
    """
    clusters: list[list[int]] = []
    for row, vector in enumerate(vectors):
        # [0, values] for the first model, which starts the first cluster.
        firsts = vectors[np.array([cluster[0] for cluster in clusters], dtype=np.int64)]
        near = np.flatnonzero(distances(firsts, vector, measure) <= epsilon)
        if len(near):
            clusters[near[0]].append(row)
        else:
            clusters.append([row])
    return [tuple(cluster) for cluster in clusters]


def _complete_clusters(vectors: Vectors, epsilon: float, measure: Measure = "largest") -> list[tuple[int, ...]]:
    """Clusters in which *any* two models are within epsilon, by complete linkage.

    The mean of such a cluster is within epsilon of each member. Merging is greedy, so a cluster of the largest
    possible size (a maximum clique) may be missed.
    """
    if len(vectors) < 2:
        return [(row,) for row in range(len(vectors))]
    pairs = _measured(pdist, vectors, measure=measure)
    numbers = fcluster(linkage(pairs, "complete"), epsilon, criterion="distance")
    clusters = [tuple(np.flatnonzero(numbers == number).tolist()) for number in np.unique(numbers)]
    return sorted(clusters)


_CLUSTERINGS = {"first-member": _first_member_clusters, "complete": _complete_clusters}


def anonymity(generators: Sequence[Indices]) -> Anonymity:
    """The anonymity of a set of generators.

    Args:
        generators: of one model; each is the rows of a training set.

    Source: Varshney and Torra 2023, Eq. 2, and "pairwise disjoint generators" above it.
    """
    common = reduce(np.intersect1d, generators) if generators else np.empty(0)
    distinct = [np.unique(generator) for generator in generators]
    together = np.concatenate(distinct) if distinct else np.empty(0)
    return Anonymity(
        k=len(generators),
        intersection_is_empty=len(generators) > 0 and len(common) == 0,
        pairwise_disjoint=len(np.unique(together)) == len(together),
    )


def select(
    vectors: Vectors,
    generators: Sequence[Indices],
    *,
    epsilon: float,
    measure: Measure = "largest",
    clustering: Linkage = "first-member",
    top: int | None = None,
) -> list[Cluster]:
    """The clusters of models, most recurrent first, with ties in the order of their first members.

    The mean is a model in its own right. It is k-anonymous epsilon-integrally private for the k in `anonymity`, which
    counts the models within epsilon *of the mean*, since members of a first-member cluster may be further away.

    Args:
        vectors: [models, values], aligned or from one initialisation, finite.
        generators: the rows on which each model was trained.
        epsilon: finite, >= 0, units of the weights.
        clustering: `first-member`, as published, or `complete`.
        top: number of clusters to return; all by default.

    Raises:
        InputError: a value is out of range, a weight is not finite, or the number of generators is not that of the
            models.

    Source: Varshney and Torra 2023, Algorithm 1.
    """
    check_epsilon(epsilon)
    if clustering not in _CLUSTERINGS:
        raise InputError(f"clustering = {clustering!r}: must be one of {', '.join(_CLUSTERINGS)}")
    if top is not None and top < 1:
        raise InputError(f"top = {top}: must be >= 1")
    if len(generators) != len(vectors):
        raise InputError(f"generators: {len(generators)} of them for {len(vectors)} models; give one for each")
    vectors = np.asarray(vectors, dtype=np.float64)
    if not np.isfinite(vectors).all():
        row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise InputError(f"model {row}: has a weight that is not finite; lower the learning rate")
    clusters = sorted(_CLUSTERINGS[clustering](vectors, epsilon, measure), key=len, reverse=True)
    return [_cluster(vectors, generators, members, epsilon, measure) for members in clusters[:top]]


def check_epsilon(epsilon: float) -> None:
    """Refuse, with an InputError, an epsilon that is not finite, or below 0."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(f"epsilon = {epsilon}: must be finite and >= 0")


def _cluster(
    vectors: Vectors, generators: Sequence[Indices], members: tuple[int, ...], epsilon: float, measure: Measure
) -> Cluster:
    own = vectors[list(members)]
    # Computed from differences, so that the mean of equal models is that model, bit for bit.
    mean = own[0] + (own - own[0]).mean(axis=0)
    near = np.flatnonzero(distances(vectors, mean, measure) <= epsilon).tolist()
    return Cluster(
        members=members,
        mean=mean,
        largest_difference=float(_measured(pdist, own, measure=measure).max()) if len(own) > 1 else 0.0,
        near_mean=tuple(near),
        anonymity=anonymity([generators[row] for row in near]),
    )


def statement(cluster: Cluster, epsilon: float, measure: Measure = "largest") -> str:
    """The claim that a cluster's mean allows, in one sentence."""
    anonymity = cluster.anonymity
    unit = _UNITS[measure]
    if not anonymity.holds:
        return (
            f"The mean is not {epsilon:g}-integrally private for any k of at least 2: {anonymity.k} of the generators' "
            f"models within {epsilon:g} of it ({unit})."
        )
    return (
        f"The mean is {anonymity.k}-anonymous {epsilon:g}-integrally private ({unit}): {anonymity.k} pairwise disjoint "
        "generators lead to a model this close, and no record is in all of them. This is not differential privacy."
    )

"""Integrally private model selection: clusters of similar models, and their means.

Models are rows of a matrix of weights; each has a generator, the records that it was trained on. Integral privacy is
not differential privacy: it says how many disjoint sets of records lead to nearly the same model, not how little one
record can change what is published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from fedpriv.errors import InputError
from fedpriv.methods.integral._subsamples import Indices

Vectors = npt.NDArray[np.floating]
_Distances = npt.NDArray[np.float64]
Measure = Literal["largest", "norm"]
"""The distance of two models: the largest difference of a parameter, or the Euclidean norm of all."""
Linkage = Literal["first-member", "complete"]
"""The members of a cluster are close to its first one, or to each other."""

_METRICS = {"largest": "chebyshev", "norm": "euclidean"}


@dataclass(frozen=True, kw_only=True)
class Anonymity:
    """The requirements of k-anonymous integral privacy on the generators of a model.

    Attributes:
        k: the number of generators.
        intersection_is_empty: whether no record is in all of them.
        pairwise_disjoint: whether no record is in two of them.
    """

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
        anonymity: of the generators of the models in `near_mean`.
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
        measure: `largest`, the paper's: the largest absolute difference of a weight; or `norm`, the L2 norm of all
            differences.

    Raises:
        InputError: the measure is unknown.

    Source: Varshney and Torra 2023, section 3.
    """
    if measure not in get_args(Measure):
        raise InputError(f"measure = {measure!r}: must be one of {', '.join(get_args(Measure))}")
    gaps = np.abs(np.asarray(vectors, dtype=np.float64) - np.asarray(reference, dtype=np.float64))
    return np.asarray(gaps.max(axis=1) if measure == "largest" else np.linalg.norm(gaps, axis=1))


def _first_member_clusters(vectors: Vectors, epsilon: float, measure: Measure = "largest") -> list[tuple[int, ...]]:
    """Clusters as published: a model joins the first cluster whose *first* member is within epsilon, or starts one.

    Two members may be up to 2 epsilon apart, and the clusters depend on the order of the models.

    Args:
        vectors: [models, values].
        epsilon: >= 0, units of the weights.
        measure: as for `distances`.

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

    Args:
        vectors: [models, values].
        epsilon: >= 0, units of the weights.
        measure: as for `distances`.
    """
    if measure not in get_args(Measure):
        raise InputError(f"measure = {measure!r}: must be one of {', '.join(get_args(Measure))}")
    if len(vectors) < 2:
        return [(row,) for row in range(len(vectors))]
    pairs = pdist(np.asarray(vectors, dtype=np.float64), _METRICS[measure])
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
        measure: as for `distances`.
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
    """Refuse an epsilon that is not a distance.

    Raises:
        InputError: epsilon is not finite, or below 0.
    """
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
        largest_difference=float(pdist(own, _METRICS[measure]).max()) if len(own) > 1 else 0.0,
        near_mean=tuple(near),
        anonymity=anonymity([generators[row] for row in near]),
    )


def statement(cluster: Cluster, epsilon: float, measure: Measure = "largest") -> str:
    """The claim that a cluster's mean allows, in one sentence."""
    anonymity = cluster.anonymity
    unit = "largest weight difference" if measure == "largest" else "norm of the difference"
    if not anonymity.holds:
        return (
            f"The mean is not {epsilon:g}-integrally private for any k of at least 2: {anonymity.k} of the generators' "
            f"models within {epsilon:g} of it ({unit})."
        )
    return (
        f"The mean is {anonymity.k}-anonymous {epsilon:g}-integrally private ({unit}): {anonymity.k} pairwise disjoint "
        "generators lead to a model this close, and no record is in all of them. This is not differential privacy."
    )

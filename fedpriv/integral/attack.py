"""The model comparison attack: membership inference by comparing a model with models of guessed training sets.

The intruder knows the architecture, the initial weights, the training algorithm and the order of its batches, some
records that were used (the background S*), and a pool of candidates that contains the other used ones. They draw
training sets from the pool, train on each, and rank these generators by how close their model comes to the target.
Records that the best generators share are classified as members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedpriv.errors import InputError
from fedpriv.integral.selection import Measure, Vectors, distances
from fedpriv.integral.subsamples import Indices

Comparison = Literal["largest", "norm", "projection"]

CHANCE = 0.5
"""Success rate of guessing membership at random when half of the candidates are members."""


@dataclass(frozen=True, kw_only=True)
class Success:
    """The success rate of the intruder.

    Attributes:
        mean: share of correctly classified candidates, over all trials.
        low, high: Student's t confidence interval of the mean, over trials: candidates within a trial are not
            independent, and trials that share records of a table are only nearly so.
        num_trials: >= 2.
    """

    mean: float
    low: float
    high: float
    num_trials: int

    @property
    def beats_chance(self) -> bool:
        """Whether the whole interval lies above one half."""
        return self.low > CHANCE


def draw_generators(
    labels: Indices, background: Indices, class_counts: Indices, num: int, generator: np.random.Generator
) -> Indices:
    """The intruder's guessed training sets, int64 [num, size]: the background and a uniform draw of the others.

    The draw keeps the class counts of the true training set: these follow the whole data set's and are not secret.

    Args:
        labels: int64 [candidates], classes of the pool, whose records are numbered from 0.
        background: S*, the candidates that are known to have been used.
        class_counts: int64 [classes] of the training set.
        num: >= 1.
        generator: of the draws.

    Raises:
        InputError: the pool has too few records of a class for a training set, or the background too many.
    """
    drawn = [np.tile(background, (num, 1))]
    for label, count in enumerate(class_counts):
        own = np.flatnonzero(labels == label)
        others, known = np.setdiff1d(own, background), np.intersect1d(own, background)
        if not len(known) <= count <= len(own):
            raise InputError(f"class {label}: {count} records of it, but {len(known)} known and {len(own)} candidates")
        drawn.append(generator.permuted(np.tile(others, (num, 1)), axis=1)[:, : count - len(known)])
    return np.concatenate(drawn, axis=1).astype(np.int64)


def rank_generators(vectors: Vectors, target: Vectors, comparison: Comparison = "norm") -> Indices:
    """Rows of the models, the one closest to the target first.

    Args:
        vectors: [models, values], aligned to the target if neurons may be permuted.
        target: [values].
        comparison: `largest` or `norm`, as in selection, or `projection`: how far a model lies from the models' mean
            in the direction of the target, which works better than a distance if the target is a mean of many models.

    Raises:
        InputError: the comparison is unknown.
    """
    if comparison not in get_args(Comparison):
        raise InputError(f"comparison = {comparison!r}: must be one of {', '.join(get_args(Comparison))}")
    if comparison == "projection":
        centre = vectors.mean(axis=0, dtype=np.float64)
        scores = -(vectors - centre) @ (target - centre)
    else:
        measure: Measure = "largest" if comparison == "largest" else "norm"
        scores = distances(vectors, target, measure)
    return np.argsort(scores, kind="stable")


def membership_scores(
    generators: Indices, order: Indices, num_candidates: int, num_best: int
) -> npt.NDArray[np.float64]:
    """For each candidate, the share of the best generators that contain it, [candidates]; 1 for their intersection.

    Args:
        generators: [models, size], as drawn.
        order: from `rank_generators`.
        num_candidates: in the pool.
        num_best: how many of the best generators count, 1 <= num_best <= models.

    Raises:
        InputError: num_best is out of range.

    Source: Varshney and Torra 2023, section 2.2, "dominant records from the intersection".
    """
    if not 1 <= num_best <= len(generators):
        raise InputError(f"num_best = {num_best}: must lie in 1..{len(generators)}, the number of subsamples")
    best = generators[order[:num_best]]
    return np.bincount(best.ravel(), minlength=num_candidates) / num_best


def infer_members(
    scores: npt.NDArray[np.float64], unknown: Indices, num_members: int, generator: np.random.Generator
) -> Indices:
    """The candidates classified as members: those with the highest scores, with ties broken at random.

    Args:
        scores: [candidates].
        unknown: the candidates to choose from, without the background.
        num_members: how many of them are members, which the intruder knows.
        generator: breaks ties.
    """
    order = np.lexsort((generator.random(len(unknown)), -scores[unknown]))
    return np.sort(unknown[order[:num_members]])


def success(shares: Sequence[float], confidence: float = 0.95) -> Success:
    """The mean of the trials' shares of correct answers, with its confidence interval.

    Args:
        shares: one for each trial, in [0, 1]; at least two.
        confidence: in (0, 1).

    Raises:
        InputError: there are fewer than two trials, or the confidence is out of range.
    """
    if len(shares) < 2:
        raise InputError(f"trials = {len(shares)}: a confidence interval needs at least 2")
    if not 0 < confidence < 1:
        raise InputError(f"confidence = {confidence}: must lie in (0, 1)")
    mean = float(np.mean(shares))
    half = float(stats.t.ppf((1 + confidence) / 2, len(shares) - 1)) * float(np.std(shares, ddof=1))
    half /= math.sqrt(len(shares))
    return Success(mean=mean, low=max(mean - half, 0.0), high=min(mean + half, 1.0), num_trials=len(shares))

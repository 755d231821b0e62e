"""Metrics of a classifier, from its confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Confusion = tuple[tuple[int, ...], ...]


def confusion_matrix(labels: npt.ArrayLike, predicted: npt.ArrayLike, num_classes: int) -> Confusion:
    """The number of records by class: a row for each true class, a column for each predicted one.

    Args:
        labels: true classes in [0, num_classes), [records].
        predicted: classes in [0, num_classes), [records].
        num_classes: >= 1.
    """
    cells = num_classes * np.asarray(labels, dtype=np.int64) + np.asarray(predicted, dtype=np.int64)
    counts = np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)
    return tuple(map(tuple, counts.tolist()))


def macro_f1(confusion: Sequence[Sequence[int]]) -> float:
    """The mean F1 score of the classes that occur among the records or the predictions, in [0, 1].

    F1 of a class is 2 TP / (2 TP + FP + FN). Classes that occur in neither have none and do not count.

    Args:
        confusion: of at least one record.
    """
    counts = np.asarray(confusion, dtype=np.float64)
    occurrences = counts.sum(axis=0) + counts.sum(axis=1)
    occurring = occurrences > 0
    return float((2 * counts.diagonal()[occurring] / occurrences[occurring]).mean())


def majority_share(confusion: Sequence[Sequence[int]]) -> float:
    """The share of the largest true class: the accuracy of always predicting it.

    Args:
        confusion: of at least one record.
    """
    sizes = np.asarray(confusion).sum(axis=1)
    return float(sizes.max() / sizes.sum())


def accuracy_of(confusion: Sequence[Sequence[int]]) -> float:
    """The share of records whose predicted class is the true one, in [0, 1].

    Args:
        confusion: of at least one record.
    """
    counts = np.asarray(confusion)
    return float(counts.trace() / counts.sum())


def accuracy_standard_error(confusion: Sequence[Sequence[int]]) -> float:
    """sqrt(a (1 - a) / n): what the choice of the n test records adds to the accuracy a, whatever was trained."""
    accuracy = accuracy_of(confusion)
    return math.sqrt(accuracy * (1 - accuracy) / np.asarray(confusion).sum())

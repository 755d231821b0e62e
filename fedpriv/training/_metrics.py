"""Metrics of a test set: of a confusion matrix, of the losses of a language model's tokens, and of its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InputError

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


def class_figures(confusion: Confusion | None) -> dict[str, float | None]:
    """{key of summary.json: what it says of a confusion matrix}; None for all of them without a matrix."""
    figures = {
        "majority_accuracy": majority_share,
        "accuracy_standard_error": accuracy_standard_error,
        "macro_f1": macro_f1,
    }
    return {name: figure(confusion) if confusion else None for name, figure in figures.items()}


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


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """The losses of a causal model on each record of a test set.

    Attributes:
        sums: float64 [records], minus the log-likelihood of a record's targets, in nats.
        counts: int64 [records], its targets: the tokens of the response, or all but the first of a bare text.
    """

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    @property
    def perplexity(self) -> float | None:
        """exp(the mean over all targets, each counting the same), >= 1; None if no record has any."""
        total = int(self.counts.sum())
        if not total:
            return None
        mean = float(self.sums.sum()) / total
        return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf  # NaN, too, becomes inf


@dataclass(frozen=True, kw_only=True)
class MeanEstimate:
    """A mean over records and its standard error, for the choice of the records alone; None for fewer than two."""

    mean: float
    standard_error: float | None


def log_perplexity_change(before: TokenLosses, after: TokenLosses) -> MeanEstimate | None:
    """The logarithm of the second perplexity over the first, below 0 if the second is better; None without targets.

    It is r = sum d_i / sum n_i, of differences d_i of the records' sums and their counts n_i. What varies is the choice
    of the m records, so by the delta method its variance is m / (m - 1) sum (d_i - r n_i)^2 / (sum n_i)^2.

    Args:
        before: of records in an order.
        after: of the same records in the same order.

    Raises:
        ValueError: the records are not the same.

    Source: Cochran 1977, section 6.4.
    """
    if not np.array_equal(before.counts, after.counts):
        raise ValueError("before, after: have other numbers of targets, so they are not of the same records")
    total = int(after.counts.sum())
    if not total:
        return None
    differences = after.sums - before.sums
    ratio = float(differences.sum()) / total
    return MeanEstimate(mean=ratio, standard_error=_root_of_sum(differences - ratio * after.counts, total))


def mean_estimate(values: npt.NDArray[np.float64]) -> MeanEstimate:
    """The mean of values, and its standard error.

    Args:
        values: [records], at least one.
    """
    mean = float(values.mean())
    return MeanEstimate(mean=mean, standard_error=_root_of_sum(values - mean, len(values)))


def _root_of_sum(residuals: npt.NDArray[np.float64], total: int) -> float | None:
    """sqrt(m / (m - 1) sum of squares) / total; None for fewer than two."""
    num = len(residuals)
    return math.sqrt(num / (num - 1) * float((residuals**2).sum())) / total if num > 1 else None


def require_rouge(num_answers: int) -> None:
    """Refuse to score answers where the package for it is missing.

    Raises:
        InputError: it is; says how to install it.
    """
    if find_spec("rouge_score") is None:
        raise InputError(
            f"generated_answers = {num_answers}: scoring answers needs rouge-score, which is not installed; "
            "pip install fedpriv[llm], or use 0"
        )


def rouge_l(references: Sequence[str], answers: Sequence[str]) -> npt.NDArray[np.float64]:
    """The F1 of each answer's longest common subsequence of words with its reference, in [0, 1], [answers].

    Words are runs of the letters a to z, in lower case, and digits; they are not stemmed.

    Source: Lin 2004, section 3.1.
    """
    from rouge_score.rouge_scorer import RougeScorer  # deferred: only runs that generate answers need it

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    pairs = zip(references, answers, strict=True)
    return np.array([scorer.score(reference, answer)["rougeL"].fmeasure for reference, answer in pairs], dtype=float)

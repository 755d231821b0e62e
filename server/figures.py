"""Figures of a run's summary from evaluations on the server's test set: of classes, of losses and of answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean

import numpy as np
import numpy.typing as npt

from fedpriv.learning.data.text import unpacked_choices
from fedpriv.learning.training.evaluation import Confusion, TokenLosses, accuracy_of
from fedpriv.learning.training.workbench import Workbench


def chance_accuracy(bench: Workbench, num_labels: int) -> float | None:
    """The accuracy of guessing among classes, answers, a test record's choices, or next tokens; None if not known.

    Args:
        num_labels: of the classes or answers; 0 where there are none.
    """
    config = bench.config
    if config.choice_columns:
        numbers = [len(unpacked_choices(response)[1]) for response in bench.data.test.pairs or ()]
        return 1 / harmonic_mean(numbers) if numbers else None
    if not num_labels and config.is_own_model:
        num_labels = getattr(bench.model, "num_classes", None) or 0
        return 1 / num_labels if num_labels else None
    return 1 / (num_labels or bench.base.model.config.vocab_size)


def macro_f1(confusion: Sequence[Sequence[int]]) -> float:
    """The mean F1 score of the classes that occur among the records, at least one, or the predictions: in [0, 1].

    F1 of a class is 2 TP / (2 TP + FP + FN). Classes that occur in neither have none and do not count.
    """
    counts = np.asarray(confusion, dtype=np.float64)
    occurrences = counts.sum(axis=0) + counts.sum(axis=1)
    occurring = occurrences > 0
    return float((2 * counts.diagonal()[occurring] / occurrences[occurring]).mean())


def majority_share(confusion: Sequence[Sequence[int]]) -> float:
    """The share of the largest true class, among at least one record: the accuracy of always predicting it."""
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


def accuracy_standard_error(confusion: Sequence[Sequence[int]]) -> float:
    """sqrt(a (1 - a) / n): what the choice of the n test records adds to the accuracy a, whatever was trained."""
    accuracy = accuracy_of(confusion)
    return math.sqrt(accuracy * (1 - accuracy) / np.asarray(confusion).sum())


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
        before: losses of records.
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
    """The mean of at least one value, and its standard error."""
    mean = float(values.mean())
    return MeanEstimate(mean=mean, standard_error=_root_of_sum(values - mean, len(values)))


def _root_of_sum(residuals: npt.NDArray[np.float64], total: int) -> float | None:
    """sqrt(m / (m - 1) sum of squares) / total; None for fewer than two."""
    num = len(residuals)
    return math.sqrt(num / (num - 1) * float((residuals**2).sum())) / total if num > 1 else None


def rouge_l(references: Sequence[str], answers: Sequence[str]) -> npt.NDArray[np.float64]:
    """The F1 of each answer's longest common subsequence of words with its reference, in [0, 1], [answers].

    Words are runs of the letters a to z, in lower case, and digits; they are not stemmed.

    Source: Lin 2004, section 3.1.
    """
    from rouge_score.rouge_scorer import RougeScorer  # deferred: only runs that generate answers need it

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    pairs = zip(references, answers, strict=True)
    return np.array([scorer.score(reference, answer)["rougeL"].fmeasure for reference, answer in pairs], dtype=float)

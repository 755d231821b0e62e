"""Perplexity of a test set, and how much it changed between two models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """How well a causal model predicts each record of a test set.

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
class Estimate:
    """A mean over records and its standard error, for the choice of the records alone; None for fewer than two."""

    mean: float
    standard_error: float | None


def log_perplexity_change(before: TokenLosses, after: TokenLosses) -> Estimate | None:
    """The logarithm of the second perplexity over the first, below 0 if the second is better; None without targets.

    It is r = sum d_i / sum n_i, of differences d_i of the records' sums and their counts n_i. What varies is the choice
    of the m records, so by the delta method its variance is m / (m - 1) sum (d_i - r n_i)^2 / (sum n_i)^2.

    Args:
        before, after: of the same records in the same order.

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
    return Estimate(mean=ratio, standard_error=_root_of_sum(differences - ratio * after.counts, total))


def mean_of(values: npt.NDArray[np.float64]) -> Estimate:
    """The mean of values, and its standard error.

    Args:
        values: [records], at least one.
    """
    mean = float(values.mean())
    return Estimate(mean=mean, standard_error=_root_of_sum(values - mean, len(values)))


def _root_of_sum(residuals: npt.NDArray[np.float64], total: int) -> float | None:
    """sqrt(m / (m - 1) sum of squares) / total; None for fewer than two."""
    num = len(residuals)
    return math.sqrt(num / (num - 1) * float((residuals**2).sum())) / total if num > 1 else None

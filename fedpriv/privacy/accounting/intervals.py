"""An accuracy from noised counts: an estimate, and an interval that covers the true value."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Two-sided quantile of the standard normal distribution at 95 %.
_QUANTILE = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class AccuracyEstimate:
    """An accuracy that was read from noised counts.

    Attributes:
        accuracy: in [0, 1]; None where the noise left neither hits nor misses.
        low, high: ends of the 95 % interval, 0 <= low <= high <= 1; it is [0, 1] where the noise drowns the counts.
    """

    accuracy: float | None
    low: float
    high: float


def accuracy_from_counts(hits: float, misses: float, noise_stddev: float) -> AccuracyEstimate:
    """The accuracy h / (h + m) behind counts with independent noise N(0, s^2) on each, with a 95 % interval.

    The interval is Fieller's. At the true a = h / (h + m), (1 - a) h - a m = 0, so (1 - a) H - a M is normal with
    mean 0 and standard deviation s sqrt((1 - a)^2 + a^2), whatever h and m are. The set of all a with
    |(1 - a) H - a M| <= 1.96 s sqrt((1 - a)^2 + a^2) therefore covers the true one with a probability of exactly 95 %,
    if h + m > 0. The result is the smallest interval in [0, 1] around this set, so it covers at least as often.

    A negative count is first raised to 0, which keeps every a of the set: where H < 0 < M, both terms have one sign,
    and without the first their sum is nearer 0; where both are negative, all of [0, 1] results.

    It says how far the noise may have moved the accuracy on the evaluated records, not how well these stand for others.

    Args:
        hits: H, the noised number of correct predictions.
        misses: M, the noised number of wrong ones.
        noise_stddev: s >= 0, of the noise on each of them.

    Raises:
        ValueError: a value is not finite, or noise_stddev is negative.

    Source: Fieller 1954.
    """
    if not (math.isfinite(hits) and math.isfinite(misses) and 0 <= noise_stddev < math.inf):
        raise ValueError(f"hits = {hits}, misses = {misses}, noise_stddev = {noise_stddev}: must be finite, noise >= 0")
    hits, misses = max(0.0, hits), max(0.0, misses)
    total, width = hits + misses, _QUANTILE * noise_stddev
    if total == 0:
        return AccuracyEstimate(accuracy=None, low=0.0, high=1.0)
    low, high = _lower_end(hits, misses, width), 1 - _lower_end(misses, hits, width)
    accuracy = hits / total
    # Rounding must not put the estimate outside of its interval.
    return AccuracyEstimate(accuracy=accuracy, low=min(low, accuracy), high=max(high, accuracy))


def _lower_end(hits: float, misses: float, width: float) -> float:
    """The smallest a in [0, 1] with |(1 - a) H - a M| <= w sqrt((1 - a)^2 + a^2), for H, M >= 0.

    Squared, this is a^2 (S^2 - 2 w^2) - 2 a (H S - w^2) + H^2 - w^2 <= 0 with S = H + M. It holds at 0 if H <= w.
    Otherwise its only root between 0 and H / S is (H^2 - w^2) / (H S - w^2 + w sqrt(H^2 + M^2 - w^2)), a form in which
    S^2 - 2 w^2 may be 0 or negative.
    """
    if hits <= width:
        return 0.0
    product = hits * (hits + misses) - width**2
    return (hits**2 - width**2) / (product + width * math.sqrt(hits**2 + misses**2 - width**2))

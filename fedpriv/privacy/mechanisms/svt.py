"""The Sparse Vector Technique on integer queries, with discrete Laplace noise drawn exactly."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedpriv.privacy.accounting.events import PureEpsilon
from fedpriv.privacy.mechanisms.sources import RandomSource

# Noise of which it takes too much memory to add up all values.
_WIDE = 50_000

# Scales are multiples of 1 / _GRID, rounded up: never less noise than required.
_GRID = 2**20


class CutoffReached(Exception):  # noqa: N818 - not an error: the run ends as planned
    """The run has given every positive answer that it paid for, and answers no more queries."""


@dataclass(frozen=True, kw_only=True)
class NoiseScales:
    """Scales of the two noises of one run, in units of the query."""

    threshold: Fraction
    query: Fraction


def noise_scales(epsilon: float, cutoff: int, sensitivity: int) -> NoiseScales:
    """Scales that make a whole run epsilon-DP, with epsilon split as epsilon_1 : epsilon_2 = 1 : (2c)^(2/3).

    Guarantee: sensitivity / threshold + 2 cutoff sensitivity / query <= epsilon, in exact arithmetic.

    Args:
        epsilon: epsilon of the whole run, finite and > 0.
        cutoff: c, the number of positive answers after which the run ends, >= 1.
        sensitivity: the most by which one record changes any query, >= 1, in units of the query.

    Raises:
        ValueError: a value is out of range.

    Source: Lyu, Su and Li 2017, Algorithm 1 and Section 4.2; Guan et al. 2025, Algorithm 5.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon}: must be finite and > 0")
    if cutoff < 1 or sensitivity < 1:
        raise ValueError(f"cutoff = {cutoff}, sensitivity = {sensitivity}: must be whole numbers >= 1")
    total, ratio = Fraction(epsilon), Fraction((2 * cutoff) ** (2 / 3))
    threshold = _rounded_up(sensitivity * (1 + ratio) / total)
    # Queries get what the threshold leaves of epsilon, so that the rounding above cannot make the sum exceed it.
    query = _rounded_up(2 * cutoff * sensitivity / (total - sensitivity / threshold))
    return NoiseScales(threshold=threshold, query=query)


@lru_cache
def noise_margin(scales: NoiseScales, probability: float) -> int:
    """The least m such that a run with cutoff 1 passes a query of threshold + m with this probability at most.

    Of very wide noise it is larger than the least.

    It passes if the threshold's noise exceeds the query's by more than m. Other queries change nothing: the bound is
    that of one query, fixed before the noise is drawn.

    Args:
        probability: in [1e-6, 1).
    """
    threshold, query = float(scales.threshold), float(scales.query)
    if query > _WIDE:  # one of both must reach its share: too many, but no more than twice as many
        return sum(math.ceil(s * math.log(2 / probability / (1 + math.exp(-1 / s)))) for s in (threshold, query))
    reach = math.ceil(query * 30)  # beyond which the query's noise lies with probability 1e-13
    values = np.arange(-reach, reach + 1)
    ratio = math.exp(-1 / query)
    weights = (1 - ratio) / (1 + ratio) * ratio ** np.abs(values)

    def passes(margin: int) -> float:
        return float(weights @ _tail(margin + 1 + values, threshold)) + (1 - float(weights.sum()))

    low, high = -1, 1
    while passes(high) > probability:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) > probability else (low, middle)
    return high


def _tail(values: npt.NDArray[np.int64], scale: float) -> npt.NDArray[np.float64]:
    """The probability that discrete Laplace noise of this scale reaches each of the values."""
    ratio = math.exp(-1 / scale)
    above = ratio ** np.maximum(values, 1) / (1 + ratio)
    below = 1 - ratio ** np.maximum(1 - values, 1) / (1 + ratio)
    return np.where(values > 0, above, below)


class SparseVector:
    """One run of the Sparse Vector Technique: at most `cutoff` positive answers, and any number of negative ones.

    Guarantee: all answers of the run together, to adaptively chosen queries, are epsilon-DP if one record changes each
    query by at most `sensitivity`; `event` states this, and must be charged before the first answer.

    Proof, for answers a and neighbouring data D, D'. Given the threshold's noise z, the answers are independent.
    Replace z by z + s, where s is the sensitivity, an integer, so that z + s is a value that the noise can take:
    (1) P(z) <= e^(s / threshold scale) P(z + s). (2) A negative answer, q(D) + v < T + z, implies
    q(D') + v < T + z + s: all negative answers, however many, cost nothing more, because they share one z.
    (3) A positive answer on D is also positive on D' at z + s if its own noise v grows by 2 s, which costs
    e^(2 s / query scale), and there are at most c of them. Hence ratio <= e^(s / threshold + 2 c s / query). (2) needs
    the threshold's noise, drawn once and never revealed; (3) needs the noise of each query, and the end after c
    positive answers. An answer must not reveal the noisy value, since that would reveal z.

    Args:
        epsilon: of the whole run, finite and > 0.
        cutoff: c, the number of positive answers after which it ends, >= 1.
        sensitivity: of every query, >= 1, in its units.
        source: source of the noise; seeded only in a run marked `simulate`.

    Source: Lyu, Su and Li 2017, Algorithm 1, with integer noise.
    """

    def __init__(self, *, epsilon: float, cutoff: int, sensitivity: int, source: RandomSource) -> None:
        self.event = PureEpsilon(epsilon=epsilon)
        self._scales = noise_scales(epsilon, cutoff, sensitivity)
        self._source, self._positives_left = source, cutoff
        self._threshold_noise = discrete_laplace(self._scales.threshold, source)

    def reaches(self, query: int, threshold: int) -> bool:
        """Whether the query reaches the threshold, both with noise; CutoffReached after `cutoff` positive answers."""
        self.check_open()
        noise = discrete_laplace(self._scales.query, self._source)
        is_positive = query + noise >= threshold + self._threshold_noise
        self._positives_left -= is_positive
        return is_positive

    def check_open(self) -> None:
        """Raise CutoffReached if no further answer is paid for, before a query is computed in vain."""
        if not self._positives_left:
            raise CutoffReached("every positive answer that the run's epsilon pays for has been given")


def discrete_laplace(scale: Fraction, source: RandomSource) -> int:
    """One value x with probability (e^(1/scale) - 1) / (e^(1/scale) + 1) e^(-|x| / scale), exactly.

    It uses only integers and bits from the source, so nothing is rounded.

    Source: Canonne, Kamath and Steinke 2020, Algorithm 2.
    """
    if scale <= 0:
        raise ValueError(f"scale = {scale}: must be > 0")
    while True:
        remainder = _uniform(scale.numerator, source)
        if not _exponential_coin(remainder, scale.numerator, source):
            continue
        quotient = 0
        while _exponential_coin(1, 1, source):
            quotient += 1
        size = (remainder + scale.numerator * quotient) // scale.denominator
        is_negative = _uniform(2, source) == 1
        if size or not is_negative:  # zero must not be counted with both signs
            return -size if is_negative else size


def _exponential_coin(numerator: int, denominator: int, source: RandomSource) -> bool:
    """True with probability e^-(numerator / denominator), which lies in [0, 1] (Algorithm 1 of the same paper)."""
    step = 1
    while _uniform(denominator * step, source) < numerator:
        step += 1
    return step % 2 == 1


def _uniform(num: int, source: RandomSource) -> int:
    """An integer in [0, num), all exactly equally likely: random bits, drawn again if they are too large."""
    num_bits = max(1, (num - 1).bit_length())
    while True:
        bits = int.from_bytes(source.words(-(-num_bits // 64)).tobytes(), "little")
        if (value := bits & ((1 << num_bits) - 1)) < num:
            return value


def _rounded_up(value: Fraction) -> Fraction:
    return Fraction(math.ceil(value * _GRID), _GRID)

"""The Sparse Vector Technique on integer queries, with discrete Laplace noise drawn exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from fedpriv.accounting.events import PureEpsilon
from fedpriv.mechanisms.sources import RandomSource

# Scales are multiples of 1 / _GRID, rounded up: more noise than asked for, never less.
_GRID = 2**20


class CutoffReached(Exception):  # noqa: N818 - no error: the run ends as planned
    """The run has given all the positive answers that were paid for, and answers nothing more."""


@dataclass(frozen=True, kw_only=True)
class NoiseScales:
    """Scales of the two noises of one run, in units of the query."""

    threshold: Fraction
    query: Fraction


def noise_scales(epsilon: float, cutoff: int, sensitivity: int) -> NoiseScales:
    """Scales with which a whole run is epsilon-DP, epsilon split as epsilon_1 : epsilon_2 = 1 : (2c)^(2/3).

    Guarantee: sensitivity / threshold + 2 cutoff sensitivity / query <= epsilon, in exact arithmetic.

    Args:
        epsilon: of the whole run, finite and > 0.
        cutoff: c, positive answers before the run ends, >= 1.
        sensitivity: by how much one record moves any query, >= 1, in units of the query.

    Raises:
        ValueError: a value is out of range.

    Source: Lyu, Su and Li 2017, Algorithm 1 and Section 4.2; Guan et al. 2025, Algorithm 5.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon}: must be finite and > 0")
    if cutoff < 1 or sensitivity < 1:
        raise ValueError(f"cutoff = {cutoff}, sensitivity = {sensitivity}: must be whole numbers >= 1")
    whole, share = Fraction(epsilon), Fraction((2 * cutoff) ** (2 / 3))
    threshold = _rounded_up(sensitivity * (1 + share) / whole)
    # What the threshold leaves, so that rounding anywhere above cannot pass epsilon.
    query = _rounded_up(2 * cutoff * sensitivity / (whole - sensitivity / threshold))
    return NoiseScales(threshold=threshold, query=query)


class SparseVector:
    """One run of the Sparse Vector Technique: at most `cutoff` positive answers, and any number of negative ones.

    Guarantee: all answers of the run together, queries chosen adaptively, are epsilon-DP, where one record moves every
    query by at most `sensitivity`; `event` states it, and is to be charged before the first answer.

    Proof, for answers a and neighbouring data D, D'. Given the threshold's noise z, answers are independent.
    Replace z by z + s, s the sensitivity, a whole number, so that it is a value that the noise takes:
    (1) P(z) <= e^(s / threshold scale) P(z + s). (2) A negative answer, q(D) + v < T + z, implies
    q(D') + v < T + z + s: all of them together cost nothing more, however many they are, because they share one z.
    (3) A positive answer on D becomes one on D' at z + s if its own noise v grows by 2 s, which costs
    e^(2 s / query scale), and there are at most c of them. Hence ratio <= e^(s / threshold + 2 c s / query). (2) needs
    the threshold's noise, drawn once and never shown; (3) the noise of each query, and the end after c. An answer may
    not tell the noisy value: it would tell z.

    Args:
        epsilon, cutoff, sensitivity: as for `noise_scales`.
        source: where noise comes from; seeded only in a run marked `simulate`.

    Source: Lyu, Su and Li 2017, Algorithm 1, with noise on whole numbers.
    """

    def __init__(self, *, epsilon: float, cutoff: int, sensitivity: int, source: RandomSource) -> None:
        self.event = PureEpsilon(epsilon=epsilon)
        self._scales = noise_scales(epsilon, cutoff, sensitivity)
        self._source, self._positives_left = source, cutoff
        self._threshold_noise = discrete_laplace(self._scales.threshold, source)

    def reaches(self, query: int, threshold: int) -> bool:
        """Whether the query reaches the threshold, noise added to both; True is a positive answer and counts.

        Raises:
            CutoffReached: `cutoff` answers were positive before.
        """
        if not self._positives_left:
            raise CutoffReached("every positive answer that the run's epsilon pays for was given")
        noise = discrete_laplace(self._scales.query, self._source)
        positive = query + noise >= threshold + self._threshold_noise
        self._positives_left -= positive
        return positive


def discrete_laplace(scale: Fraction, source: RandomSource) -> int:
    """One value x with probability (e^(1/scale) - 1) / (e^(1/scale) + 1) e^(-|x| / scale), exactly.

    Only whole numbers and bits of the source are used, so nothing is rounded.

    Args:
        scale: > 0.
        source: where the bits come from.

    Source: Canonne, Kamath and Steinke 2020, Algorithm 2.
    """
    if scale <= 0:
        raise ValueError(f"scale = {scale}: must be > 0")
    while True:
        fraction = _uniform(scale.numerator, source)
        if not _exponential_coin(fraction, scale.numerator, source):
            continue
        whole = 0
        while _exponential_coin(1, 1, source):
            whole += 1
        size = (fraction + scale.numerator * whole) // scale.denominator
        negative = _uniform(2, source) == 1
        if size or not negative:  # zero has one sign only
            return -size if negative else size


def _exponential_coin(numerator: int, denominator: int, source: RandomSource) -> bool:
    """True with probability e^-(numerator / denominator), which lies in [0, 1] (Algorithm 1 of the same paper)."""
    step = 1
    while _uniform(denominator * step, source) < numerator:
        step += 1
    return step % 2 == 1


def _uniform(num: int, source: RandomSource) -> int:
    """A whole number in [0, num), each exactly as likely: random bits, drawn again where they are too large."""
    num_bits = max(1, (num - 1).bit_length())
    while True:
        bits = int.from_bytes(source.words(-(-num_bits // 64)).tobytes(), "little")
        if (value := bits & ((1 << num_bits) - 1)) < num:
            return value


def _rounded_up(value: Fraction) -> Fraction:
    return Fraction(math.ceil(value * _GRID), _GRID)

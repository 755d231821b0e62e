"""Discrete Gaussian noise costs as much as continuous noise of a variance that is smaller by 9.

Lemma. On integers, adding N_Z(0, sigma^2) to each of d coordinates has the law of adding N(0, sigma^2 - 9) and rounding
each result to an integer at random, whatever the data, up to `max_divergence`. So whatever bounds the continuous
mechanism, sampled or composed, bounds the discrete one. docs/appendices/discrete_gaussian.md has the proof.
"""

from __future__ import annotations

import math

# The variance of the random rounding. A larger one would cost more noise, a smaller one a larger divergence: 4 exp(-18
# pi^2) is below 3e-77.
_ROUNDING_VARIANCE = 9.0

# Below this the mechanism is not used: the noise that is charged would be noticeably less than what is drawn.
MIN_STDDEV = 2.0**10

# sqrt(sigma^2 - 9) >= CHARGED_SHARE * sigma for every sigma >= MIN_STDDEV. One factor for all of them: if variances add
# up, so does what is charged.
CHARGED_SHARE = math.sqrt(1.0 - _ROUNDING_VARIANCE / MIN_STDDEV**2)


def charged_stddev(sigma: float) -> float:
    """sqrt(sigma^2 - 9): that of the continuous Gaussian of which N_Z(0, sigma^2) on integers is a random rounding.

    Args:
        sigma: finite, > 3, in steps of the grid.

    Raises:
        ValueError: sigma is out of range.
    """
    if not math.sqrt(_ROUNDING_VARIANCE) < sigma < math.inf:
        raise ValueError(f"sigma = {sigma}: must be finite and > 3")
    return math.sqrt(sigma**2 - _ROUNDING_VARIANCE)


def max_divergence(dimension: int) -> float:
    """The lemma's bound on |log| of the ratio of both laws' probabilities: 4 d exp(-18 pi^2), less than 3e-77 d.

    T compositions count T times. An epsilon holds up to twice this, which no floating-point accountant can resolve.

    Args:
        dimension: d, number of coordinates, >= 1.
    """
    # The proof's bound exceeds this by a factor of 1 + 1e-76.
    return 4.0 * dimension * math.exp(-2.0 * math.pi**2 * _ROUNDING_VARIANCE)


def sum_divergence(sigma: float, num: int) -> float:
    """tau, which bounds how far a sum of `num` independent N_Z(0, sigma^2) is from N_Z(0, num sigma^2).

    It is a bound on the max divergence between the two, in either direction, for one coordinate.

    Args:
        sigma: >= 1/2, in steps of the grid.
        num: n >= 1.

    Raises:
        ValueError: a value is out of range.

    Source: Kairouz, Liu and Steinke 2021, Theorem 1, Eq. 3.
    """
    if not 0.5 <= sigma < math.inf or num < 1:
        raise ValueError(f"sigma = {sigma}, num = {num}: must be >= 1/2 and >= 1")
    return 10.0 * math.fsum(math.exp(-2.0 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, num))


def sum_concentrated_epsilon(sensitivity: float, sigma: float, num: int, dimension: int) -> float:
    """The epsilon for which a sum with `num` independent N_Z(0, sigma^2) on each coordinate is concentrated DP.

    It is epsilon^2/2-concentrated: its Renyi divergence at any order a is at most a epsilon^2 / 2. It holds without
    sampling.

    Args:
        sensitivity: Delta_2 >= 0, the L2 sensitivity of the sum of integers, rounding included, in steps of the grid.
        sigma: >= 1/2, in steps of the grid.
        num: n >= 1.
        dimension: d >= 1.

    Raises:
        ValueError: sigma or num is out of range.

    Source: Kairouz, Liu and Steinke 2021, Theorem 1, Eq. 4.
    """
    tau = sum_divergence(sigma, num)
    ratio = sensitivity / (math.sqrt(num) * sigma)
    return min(math.sqrt(ratio**2 + 2.0 * tau * dimension), ratio + tau * math.sqrt(dimension))

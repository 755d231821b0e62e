"""Scores of canaries for an observer of all uploads: the most powerful test of each canary, given the schedule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpriv.audit.bounds import Array


def matched_scores(inner_products: npt.ArrayLike, *, noise_stddev: float, sampling_probability: float) -> Array:
    """[canaries] The log likelihood ratio of in to out, from each canary's own inner products.

    Along its direction an included canary adds 1 in the rounds that sample it, so a round's inner product y has density
    (1 - q) phi(y) + q phi(y - 1) if it is in and phi(y) if it is out, with phi of variance s^2. The likelihood ratio
    is 1 - q + q exp((2 y - 1) / (2 s^2)), and its logarithms add up over rounds. This is the most powerful test if
    directions are orthogonal and the noise is Gaussian.

    Args:
        inner_products: [rounds, canaries], in units of the clip norm.
        noise_stddev: s > 0 of an inner product, in the same units: z for the observer of the `local` view, and
            sqrt(clients) z for an observer of sums only.
        sampling_probability: q in (0, 1].
    """
    ratios = (2 * np.asarray(inner_products, dtype=float) - 1) / (2 * noise_stddev**2)
    if sampling_probability == 1:
        return np.asarray(ratios.sum(axis=0))
    q = sampling_probability
    return np.asarray(np.logaddexp(np.log1p(-q), np.log(q) + ratios).sum(axis=0))


def ideal_scores(
    included: npt.NDArray[np.bool_],
    *,
    rounds: int,
    noise_stddev: float,
    sampling_probability: float,
    generator: np.random.Generator,
) -> Array:
    """[canaries] Scores of an ideal attacker who sees every canary separately under exactly the claimed noise.

    They are the best that `matched_scores` of the real engine can achieve, and are used to choose the number of
    guesses beforehand.

    Args:
        included: bool [canaries].
        rounds, noise_stddev, sampling_probability: of the schedule, as for `matched_scores`.
        generator: of sampling and noise.
    """
    drawn = included & (generator.random((rounds, len(included))) < sampling_probability)
    noise = noise_stddev * generator.standard_normal((rounds, len(included)))
    return matched_scores(drawn + noise, noise_stddev=noise_stddev, sampling_probability=sampling_probability)

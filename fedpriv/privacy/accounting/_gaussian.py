"""The Gaussian mechanism on a Poisson sample: its Renyi curve, at all orders at once, and its privacy losses.

dp-accounting has the same, term by term and point by point in Python; a calibration asks for them dozens of times.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr, logsumexp

from fedpriv.privacy.accounting.law import SMALLEST_DIVERGENCE, Array

# Outside this range of z floating-point results are meaningless: a smaller z counts as no noise, a larger one as the
# largest. Both only raise the cost.
MIN_NOISE, MAX_NOISE = 1e-6, 1e6

# dp-accounting abandons a fractional order if, after this many terms, a term still exceeds e^-30 of the sum: the curve
# is infinite there. So is this one, so that it is never below the library's.
_MOST_TERMS, _NEGLIGIBLE_LOG_RATIO = 1000, -30.0
# How many terms are tried, one number after the other, until the last of them is negligible.
_NUM_TERMS = (64, 128, 256, 512, _MOST_TERMS)


def sampled_curve(sampling_probability: npt.ArrayLike, noise_multiplier: float, orders: npt.ArrayLike) -> Array:
    """[orders] Renyi divergence of one release, of either neighbour from the other, whichever is larger.

    It is log(A) / (order - 1), where A is the mean of ((1 - q) + q exp((2 x - 1) / (2 z^2)))^order over x ~ N(0, z^2).

    Args:
        sampling_probability: q in (0, 1), one for all orders or one for each.
        noise_multiplier: z > 0.
        orders: each > 1.

    Source: Mironov, Talwar and Zhang 2019, Section 3.3.
    """
    orders = np.asarray(orders, dtype=float)
    q, z = np.broadcast_to(sampling_probability, orders.shape), noise_multiplier
    log_moments = np.empty(orders.shape)
    is_whole = orders == np.floor(orders)
    for chosen, log_moments_at in ((is_whole, _of_whole_orders), (~is_whole, _of_fractions)):
        log_moments[chosen] = log_moments_at(q[chosen], z, orders[chosen])
    return np.asarray(log_moments / (orders - 1))


def _of_whole_orders(q: Array, z: float, orders: Array) -> Array:
    """[orders] log A by the binomial theorem, Eq. (3.4): the mean of the k-th power is exp((k^2 - k) / (2 z^2)).

    Without the powers' ones, which add up to 1, a small divergence is not lost to rounding.
    """
    if not orders.size:
        return orders
    k, n = np.arange(2.0, orders.max() + 1), orders[:, None]
    exponents = (k * k - k) / (2 * z * z)
    less_one = exponents + np.log(-np.expm1(-exponents))
    terms = _log_binomial(orders, k) + k * np.log(q)[:, None] + (n - k) * np.log1p(-q)[:, None] + less_one
    return np.asarray(np.logaddexp(0.0, logsumexp(np.where(k <= n, terms, -np.inf), axis=1)))


def _of_fractions(q: Array, z: float, orders: Array) -> Array:
    """[orders] log A by two binomial series, one for x on each side of where both parts are equal, Section 3.3.

    Terms beyond the order alternate in sign; all are counted as positive, which is an upper bound.
    """
    log_moments = np.full(orders.shape, math.inf)
    for num_terms in _NUM_TERMS:
        if not (left := np.isinf(log_moments)).any():
            break
        low, high = _series(q[left], z, orders[left], num_terms)
        total = logsumexp(np.concatenate([low, high], axis=1), axis=1)
        falls = (low[:, -1] < low[:, -2]) & (high[:, -1] < high[:, -2])
        is_small = np.maximum(low[:, -1], high[:, -1]) < total + _NEGLIGIBLE_LOG_RATIO
        log_moments[left] = np.where(falls & is_small, total, math.inf)
    return log_moments


def _series(q: Array, z: float, orders: Array, num_terms: int) -> tuple[Array, Array]:
    """Two times [orders, terms]: logarithms of the terms' absolute values, below and above the point x0.

    The smaller and the larger of 1 - q and q L, L = N(1, z^2) / N(0, z^2), are raised to the powers i and order - i.
    """
    i = np.arange(float(num_terms))
    j, log_q, log_rest = orders[:, None] - i, np.log(q)[:, None], np.log1p(-q)[:, None]
    middle = z * z * (log_rest - log_q) + 0.5
    low = i * log_q + j * log_rest + (i * i - i) / (2 * z * z) + log_ndtr((middle - i) / z)
    high = j * log_q + i * log_rest + (j * j - j) / (2 * z * z) + log_ndtr((j - middle) / z)
    binomial = _log_binomial(orders, i)
    return binomial + low, binomial + high


def _log_binomial(orders: Array, k: Array) -> Array:
    """[orders, k] log |order over k| for any real orders > 0; equal ones are computed once."""
    distinct, row = np.unique(orders, return_inverse=True)
    n = distinct[:, None]
    return np.asarray((gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))[row])


def composed_curve(sampling_probability: float, noise_multiplier: float, count: int, orders: npt.ArrayLike) -> Array:
    """[orders] Renyi divergence of `count` releases; infinite without noise.

    Args:
        sampling_probability: q in [0, 1].
        noise_multiplier: z >= 0.
        count: number of releases, >= 1.
        orders: each > 1.
    """
    orders = np.asarray(orders, dtype=float)
    if sampling_probability == 0:
        return np.zeros(orders.shape)
    if noise_multiplier < MIN_NOISE:
        return np.full(orders.shape, math.inf)
    noise_multiplier = min(noise_multiplier, MAX_NOISE)
    without_sampling = orders / (2 * noise_multiplier**2)
    if sampling_probability == 1:
        return np.asarray(count * without_sampling)
    # The Gaussian without sampling bounds the curve from above, so the floor never exceeds it.
    floor = np.minimum(without_sampling, SMALLEST_DIVERGENCE)
    return np.asarray(count * np.maximum(sampled_curve(sampling_probability, noise_multiplier, orders), floor))


def composed_loss(sampling_probability: float, noise_multiplier: float, count: int, value_interval: float) -> Any:
    """The privacy loss distribution of `count` releases, built in the same steps as by dp-accounting's accountant.

    Args:
        sampling_probability: q in (0, 1].
        noise_multiplier: z > 0.
        count: number of releases, >= 1.
        value_interval: value discretization interval of the privacy loss, > 0.
    """
    if sampling_probability == 1:
        # n Gaussian releases equal one with 1 / sqrt(n) of the noise.
        return _single_loss(noise_multiplier / math.sqrt(count), 1.0, value_interval)
    return _single_loss(noise_multiplier, sampling_probability, value_interval).self_compose(count)


@lru_cache(maxsize=64)
def _single_loss(noise_multiplier: float, sampling_probability: float, value_interval: float) -> Any:
    """The privacy loss distribution of one release, as dp-accounting's own accountant builds it."""
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    z, q = noise_multiplier, sampling_probability
    removed = _masses(z, q, AdjacencyType.REMOVE, value_interval)
    # Without sampling both neighbours have the same.
    return PrivacyLossDistribution(removed, None if q == 1 else _masses(z, q, AdjacencyType.ADD, value_interval))


def _masses(z: float, q: float, adjacency: Any, value_interval: float) -> Any:
    """The probabilities of the losses that are multiples of the interval, by the divergence at each of them.

    Source: Doroshenko et al. 2022, Algorithm 1.
    """
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    mechanism = GaussianPrivacyLoss(z, sampling_prob=q, adjacency_type=adjacency)
    bounds = mechanism.connect_dots_bounds()
    lowest = math.floor(bounds.epsilon_lower / value_interval)
    highest = math.ceil(bounds.epsilon_upper / value_interval)
    losses = np.arange(lowest, highest + 1) * value_interval
    # The loss of the mixture is above log(1 - q) if a record is removed, below -log(1 - q) if one is added.
    sign = 1 if adjacency == AdjacencyType.REMOVE else -1
    inside = sign * losses > (-math.inf if q == 1 else math.log1p(-q))
    deltas = np.zeros(losses.shape)
    if sign == 1:
        deltas[~inside] = -np.expm1(losses[~inside])
    # Where the loss equals each value; every set {x < cutoff} bounds the divergence, the right one attains it.
    cutoffs = -sign * (_loss_without_sampling(sign * losses[inside], q) * z * z + 0.5)
    shares_below = mechanism.mu_upper_cdf(cutoffs)
    deltas[inside] = shares_below - np.exp(losses[inside] + mechanism.mu_lower_log_cdf(cutoffs))
    return create_pmf_pessimistic_connect_dots_fixed_gap(value_interval, lowest, highest, np.clip(deltas, 0, 1))


def _loss_without_sampling(losses: Array, q: float) -> Array:
    """[losses] l with 1 - q + q e^l = e^loss, for losses > log(1 - q)."""
    return losses if q == 1 else losses - math.log(q) + np.log1p(-np.exp(math.log1p(-q) - losses))

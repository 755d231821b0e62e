"""The distribution of LMO noise on one coordinate, in units of the clip norm.

Given u, the noise is Laplace(1 / u). So with M the moment generating function of u, its density is M'(-|x|) / 2, and it
exceeds x > 0 with probability M(-x) / 2. Its absolute moment of order n is n! E[u^-n].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.lmo.moments import Array, Columns, columns, log_mgf, tilted_moments
from fedpriv.accounting.lmo.parameters import LmoParameters
from fedpriv.errors import InputError

# Trapezoidal rule in log x: for analytic integrands that vanish at both ends, its error falls exponentially in the
# number of nodes. The range starts where the part below is e^-45 of the whole, and ends where M is e^-45.
_NODES, _NEGLIGIBLE = 1001, 45.0

# log x of the largest float, minus some margin for powers.
_LARGEST_LOG = 690.0


def density(parameters: LmoParameters, x: npt.ArrayLike) -> Array:
    """Density of the noise at x; x in units of the clip norm."""
    candidates, t = columns(parameters), -np.abs(np.asarray(x, dtype=float))
    return np.asarray(np.exp(log_mgf(candidates, t)) * tilted_moments(candidates, t)[0] / 2)


def cdf(parameters: LmoParameters, x: npt.ArrayLike) -> Array:
    """Probability that the noise is at most x."""
    x = np.asarray(x, dtype=float)
    tail = np.exp(log_mgf(columns(parameters), -np.abs(x))) / 2
    return np.asarray(np.where(x < 0, tail, 1 - tail))


def quantile(parameters: LmoParameters, probability: npt.ArrayLike) -> Array:
    """The x that the noise does not exceed with the given probability.

    Raises:
        InputError: a probability is outside (0, 1).
    """
    p = np.asarray(probability, dtype=float)
    if not ((p > 0) & (p < 1)).all():
        raise InputError(f"probability = {p.tolist()}: must lie in (0, 1)")
    return np.asarray(np.sign(p - 0.5) * np.exp(log_size(columns(parameters), np.log(2 * np.minimum(p, 1 - p)))))


def log_size(candidates: Columns, log_tail: npt.ArrayLike) -> Array:
    """log x of the x > 0 that the absolute noise exceeds with probability exp(log_tail) = M(-x); at most 690."""
    wanted = np.asarray(log_tail, dtype=float)
    shape = np.broadcast_shapes(wanted.shape, candidates.shape.shape)
    low, high = np.full(shape, -_LARGEST_LOG), np.full(shape, _LARGEST_LOG)
    for _ in range(64):
        middle = (low + high) / 2
        beyond = log_mgf(candidates, -np.exp(middle)) > wanted
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return np.asarray((low + high) / 2)


def variance(candidates: Columns) -> Array:
    """[...] Variance of the noise, 2 E[u^-2]; infinite if u is small too often, see `has_moment`.

    Args:
        candidates: parameters, arrays of shape [...].
    """
    return 2 * inverse_moment(candidates, 2)


def mean_absolute(candidates: Columns) -> Array:
    """[...] Mean absolute value of the noise, E[1 / u]; infinite if u is small too often, see `has_moment`."""
    return inverse_moment(candidates, 1)


def inverse_moment(candidates: Columns, order: int) -> Array:
    """[...] E[u^-n]: closed form for a mixture, integral of t^(n - 1) M(-t) for a linear combination."""
    if candidates.combination == "linear":
        with np.errstate(over="ignore", invalid="ignore"):  # where the moment is infinite
            value = _integral(candidates, lambda t, log_m: np.exp(log_m) * t ** (order - 1), order=order)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            gamma = 1 / (candidates.scale * (candidates.shape - 1))
            uniform = _log_ratio(candidates.low, candidates.high)
            if order == 2:
                gamma = gamma / (candidates.scale * (candidates.shape - 2))
                uniform = 1 / (candidates.low * candidates.high)
            gamma_weight, _, uniform_weight = candidates.weights
            value = np.where(gamma_weight > 0, gamma_weight * gamma, 0.0)
            value = value + np.where(uniform_weight > 0, uniform_weight * uniform, 0.0)
    return np.asarray(np.where(has_moment(candidates, order), value, np.inf))


def _log_ratio(low: Array, high: Array) -> Array:
    """log(high / low) / (high - low), the mean of 1 / u for u uniform."""
    share = (high - low) / high
    return np.asarray(np.where(share < 1e-6, 1 + share / 2, -np.log1p(-share) / share) / high)


def has_moment(candidates: Columns, order: int) -> npt.NDArray[np.bool_]:
    """[...] Whether E[u^-n] is finite, which depends on how often u is small.

    A mixture has a finite moment if each part has: a Gamma part if shape > n, a Uniform part if low > 0, an
    Exponential part never. For a linear combination, low > 0 is sufficient; otherwise the powers at zero add up: shape
    for a Gamma part, 1 for an Exponential part and 1 for a Uniform part.
    """
    return np.asarray(zero_power(candidates) > order)


def zero_power(candidates: Columns) -> Array:
    """[...] The power p in P(u < x) = O(x^p) near 0 and in M(-t) = O(t^-p); infinite if u is bounded away from 0."""
    gamma, exponential, uniform = (weight > 0 for weight in candidates.weights)
    parts = [candidates.shape, np.ones_like(candidates.rate), np.where(candidates.low > 0, np.inf, 1.0)]
    if candidates.combination == "mixture":
        powers = [np.where(has, part, np.inf) for has, part in zip((gamma, exponential, uniform), parts, strict=True)]
        return np.asarray(np.min(powers, axis=0))
    powers = [np.where(has, part, 0.0) for has, part in zip((gamma, exponential, uniform), parts, strict=True)]
    return np.asarray(np.sum(powers, axis=0))


def entropy(parameters: LmoParameters) -> float:
    """Differential entropy of the noise in nats, -E[log density]."""

    def integrand(x: Array, log_m: Array, first: Array) -> Array:
        log_density = log_m + np.log(first / 2)
        return -2 * np.exp(log_density) * log_density

    return _density_integral(columns(parameters), integrand)


def fisher_information(parameters: LmoParameters) -> float:
    """Fisher information of the noise about its location, E[(p' / p)^2], in units of 1 / clip norm^2.

    Among all noises of one variance, the Gaussian has the least, 1 / variance (Cramer-Rao bound).
    """
    candidates = columns(parameters)

    def integrand(x: Array, log_m: Array, first: Array) -> Array:
        return np.exp(log_m) * tilted_moments(candidates, -x)[1] ** 2 / first

    return _density_integral(candidates, integrand)


def _density_integral(candidates: Columns, function: Callable[[Array, Array, Array], Array]) -> float:
    return float(_integral(candidates, lambda x, log_m: function(x, log_m, tilted_moments(candidates, -x)[0])))


def _integral(candidates: Columns, function: Callable[[Array, Array], Array], *, order: int = 0) -> Array:
    """[...] Integral over x > 0 of a function of x and log M(-x) that falls as fast as x^(order - 1) M(-x)."""
    size = tilted_moments(candidates, 0.0)[0]
    end = log_size(candidates, -_NEGLIGIBLE) + 1.0
    start = -np.log(size) - _NEGLIGIBLE
    log_x = start + (end - start) * np.linspace(0, 1, _NODES).reshape(-1, *(1,) * np.ndim(start))
    x = np.exp(log_x)
    values = function(x, log_mgf(candidates, -x)) * x
    # The integral beyond the end for M = x^-power, where x^order M is not small.
    power = zero_power(candidates)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(np.isfinite(power) & (order > 0), values[-1] / (power - order), 0.0)
    return np.asarray(np.trapezoid(values, log_x, axis=0) + rest)

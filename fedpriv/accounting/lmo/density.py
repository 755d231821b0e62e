"""The distribution of LMO noise on one coordinate, in units of the clip norm.

Given u the noise is Laplace(1 / u), so with M the moment generating function of u its density is M'(-|x|) / 2, and it
lies beyond x > 0 with probability M(-x) / 2. Its moments of order n are those of n! u^-n.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.lmo.moments import Array, Columns, columns, log_mgf, tilted_moments
from fedpriv.accounting.lmo.parameters import LmoParameters
from fedpriv.errors import InputError

# Trapezia in log x: for integrands that are analytic and vanish at both ends their error falls exponentially in their
# number. They start where the rest is e^-45 of the whole, and end where M is.
_NODES, _NEGLIGIBLE = 1001, 45.0

# log x of the largest float, less some room for powers.
_LARGEST_LOG = 690.0


def density(parameters: LmoParameters, x: npt.ArrayLike) -> Array:
    """Density of the noise at x, in units of the clip norm."""
    of, t = columns(parameters), -np.abs(np.asarray(x, dtype=float))
    return np.asarray(np.exp(log_mgf(of, t)) * tilted_moments(of, t)[0] / 2)


def cdf(parameters: LmoParameters, x: npt.ArrayLike) -> Array:
    """Probability that the noise is at most x."""
    x = np.asarray(x, dtype=float)
    tail = np.exp(log_mgf(columns(parameters), -np.abs(x))) / 2
    return np.asarray(np.where(x < 0, tail, 1 - tail))


def quantile(parameters: LmoParameters, probability: npt.ArrayLike) -> Array:
    """The x below which the noise lies with the given probability.

    Raises:
        InputError: a probability is outside (0, 1).
    """
    p = np.asarray(probability, dtype=float)
    if not ((p > 0) & (p < 1)).all():
        raise InputError(f"probability = {p.tolist()}: must lie in (0, 1)")
    return np.asarray(np.sign(p - 0.5) * np.exp(log_size(columns(parameters), np.log(2 * np.minimum(p, 1 - p)))))


def log_size(of: Columns, log_tail: npt.ArrayLike) -> Array:
    """log x of the x > 0 that the noise's size exceeds with probability exp(log_tail) = M(-x); at most 690."""
    wanted = np.asarray(log_tail, dtype=float)
    shape = np.broadcast_shapes(wanted.shape, of.shape.shape)
    low, high = np.full(shape, -_LARGEST_LOG), np.full(shape, _LARGEST_LOG)
    for _ in range(64):
        middle = (low + high) / 2
        beyond = log_mgf(of, -np.exp(middle)) > wanted
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return np.asarray((low + high) / 2)


def variance(of: Columns) -> Array:
    """[...] variance of the noise, 2 E[u^-2]; infinite where u is too often small, see `has_moment`.

    Args:
        of: parameters, arrays of shape [...].
    """
    return 2 * inverse_moment(of, 2)


def mean_absolute(of: Columns) -> Array:
    """[...] mean size of the noise, E[1 / u]; infinite where u is too often small, see `has_moment`."""
    return inverse_moment(of, 1)


def inverse_moment(of: Columns, order: int) -> Array:
    """[...] E[u^-n]: closed forms for a mixture, the integral of t^(n - 1) M(-t) for a linear combination."""
    if of.combination == "linear":
        with np.errstate(over="ignore", invalid="ignore"):  # where there is no moment
            value = _integral(of, lambda t, log_m: np.exp(log_m) * t ** (order - 1), order=order)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            gamma = 1 / (of.scale * (of.shape - 1))
            uniform = _log_ratio(of.low, of.high)
            if order == 2:
                gamma, uniform = gamma / (of.scale * (of.shape - 2)), 1 / (of.low * of.high)
            first, _, last = of.weights
            value = np.where(first > 0, first * gamma, 0.0) + np.where(last > 0, last * uniform, 0.0)
    return np.asarray(np.where(has_moment(of, order), value, np.inf))


def _log_ratio(low: Array, high: Array) -> Array:
    """log(high / low) / (high - low), the mean of 1 / u for u uniform."""
    share = (high - low) / high
    return np.asarray(np.where(share < 1e-6, 1 + share / 2, -np.log1p(-share) / share) / high)


def has_moment(of: Columns, order: int) -> npt.NDArray[np.bool_]:
    """[...] whether E[u^-n] is finite: how often u is small decides.

    A mixture needs of every part what it needs alone: a Gamma part shape > n, a Uniform part low > 0; with an
    Exponential part there is no moment. In a linear combination low > 0 is enough, and without it the powers at zero
    add up: shape, 1 for an Exponential and 1 for a Uniform part.
    """
    return np.asarray(zero_power(of) > order)


def zero_power(of: Columns) -> Array:
    """[...] the power p of P(u < x) = O(x^p) near zero, which is that of M(-t) = O(t^-p); infinite if u stays away."""
    gamma, exponential, uniform = (weight > 0 for weight in of.weights)
    parts = [of.shape, np.ones_like(of.rate), np.where(of.low > 0, np.inf, 1.0)]
    if of.combination == "mixture":
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

    Of all noise of one variance the Gaussian has the least, 1 / variance (Cramer and Rao).
    """
    of = columns(parameters)

    def integrand(x: Array, log_m: Array, first: Array) -> Array:
        return np.exp(log_m) * tilted_moments(of, -x)[1] ** 2 / first

    return _density_integral(of, integrand)


def _density_integral(of: Columns, function: Callable[[Array, Array, Array], Array]) -> float:
    return float(_integral(of, lambda x, log_m: function(x, log_m, tilted_moments(of, -x)[0])))


def _integral(of: Columns, function: Callable[[Array, Array], Array], *, order: int = 0) -> Array:
    """[...] integral over x > 0 of a function of x and log M(-x) that falls as fast as x^(order - 1) M(-x)."""
    size = tilted_moments(of, 0.0)[0]
    end = log_size(of, -_NEGLIGIBLE) + 1.0
    start = -np.log(size) - _NEGLIGIBLE
    log_x = start + (end - start) * np.linspace(0, 1, _NODES).reshape(-1, *(1,) * np.ndim(start))
    x = np.exp(log_x)
    values = function(x, log_mgf(of, -x)) * x
    # What M = x^-power leaves beyond the end, where x^order M is not small.
    power = zero_power(of)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(np.isfinite(power) & (order > 0), values[-1] / (power - order), 0.0)
    return np.asarray(np.trapezoid(values, log_x, axis=0) + rest)

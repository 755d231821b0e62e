"""Moments of u, the inverse scale of LMO noise: its moment generating function M, for many parameter sets at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special

from fedpriv.accounting.lmo.parameters import Combination, ExponentialPart, GammaPart, LmoParameters, UniformPart

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Parameters of many candidates of one combination, all arrays of one shape.

    A part that is left out has weight 0 and scale 0, rate infinity, or low and high 0.

    Attributes:
        combination: `mixture` or `linear`.
        weights: [3, ...] of the Gamma, the Exponential and the Uniform part; those of a mixture sum to exactly one.
        shape, scale: of the Gamma part.
        rate: of the Exponential part.
        low, high: of the Uniform part.
    """

    combination: Combination
    weights: Array
    shape: Array
    scale: Array
    rate: Array
    low: Array
    high: Array

    def mapped(self, function: Callable[[Array], Array]) -> Columns:
        """The same after a function on the axes of the candidates."""
        return Columns(
            combination=self.combination,
            weights=np.stack([function(weight) for weight in self.weights]),
            shape=function(self.shape),
            scale=function(self.scale),
            rate=function(self.rate),
            low=function(self.low),
            high=function(self.high),
        )

    def with_axes(self, num: int) -> Columns:
        """The same with `num` axes of length 1 at the end, which meet those of orders and points."""
        return self.mapped(lambda column: column.reshape(column.shape + (1,) * num))

    def scaled(self, factor: Array | float) -> Columns:
        """Those of u times the factor: noise divided by it."""
        return replace(
            self,
            scale=self.scale * factor,
            rate=self.rate / factor,
            low=self.low * factor,
            high=self.high * factor,
        )


def columns(parameters: LmoParameters) -> Columns:
    """The parameters as arrays of shape []."""
    parts = parameters.parts
    gamma, exponential, uniform = (parts.get(name) for name in ("gamma", "exponential", "uniform"))
    weights = np.array([part.weight if part else 0.0 for part in (gamma, exponential, uniform)])
    # A part that is left out is the constant 0, which is inside every domain.
    shape, scale = (gamma.shape, gamma.scale) if isinstance(gamma, GammaPart) else (1.0, 0.0)
    rate = exponential.rate if isinstance(exponential, ExponentialPart) else np.inf
    low, high = (uniform.low, uniform.high) if isinstance(uniform, UniformPart) else (0.0, 0.0)
    return Columns(
        combination=parameters.combination,
        weights=weights / weights.sum() if parameters.combination == "mixture" else weights,
        shape=np.array(shape, dtype=float),
        scale=np.array(scale, dtype=float),
        rate=np.array(rate, dtype=float),
        low=np.array(low, dtype=float),
        high=np.array(high, dtype=float),
    )


def log_mgf(of: Columns, t: npt.ArrayLike) -> Array:
    """log M(t) = log E[exp(t u)], infinite outside the domain.

    M = sum a_k M_k for a mixture, prod M_k(a_k t) for a linear combination.

    Args:
        of: the candidates.
        t: any sign; broadcasts against the candidates' arrays.

    Source: Yang et al., Theorem A.4; its Algorithm 3 for the mixture.
    """
    t = np.asarray(t, dtype=float)
    if of.combination == "linear":
        gamma, exponential, uniform = _log_parts(of, [weight * t for weight in of.weights])
        return np.asarray(gamma + exponential + uniform)
    logs = [np.where(w > 0, part, 0.0) for w, part in zip(of.weights, _log_parts(of, [t, t, t]), strict=True)]
    with np.errstate(over="ignore", divide="ignore"):
        # Near zero, where M - 1 would be lost in the sum of weights.
        near = np.log1p(np.clip(sum(w * np.expm1(part) for w, part in zip(of.weights, logs, strict=True)), -0.9, 1e300))
        far = special.logsumexp(np.stack(np.broadcast_arrays(*logs)), axis=0, b=_aligned(of.weights, near.ndim))
    return np.asarray(np.where(np.abs(near) < 0.5, near, far))


def tilted_moments(of: Columns, t: npt.ArrayLike) -> tuple[Array, Array]:
    """E[u exp(t u)] / M(t) and E[u^2 exp(t u)] / M(t), inside the domain; at t = 0 the moments of u."""
    t = np.asarray(t, dtype=float)
    if of.combination == "linear":
        mean, variance = _tilted_parts(of, [weight * t for weight in of.weights])
        first = sum(w * m for w, m in zip(of.weights, mean, strict=True))
        spread = sum(w * w * v for w, v in zip(of.weights, variance, strict=True))
        return np.asarray(first), np.asarray(spread + first**2)
    mean, variance = _tilted_parts(of, [t, t, t])
    whole, parts = log_mgf(of, t), _log_parts(of, [t, t, t])
    with np.errstate(divide="ignore"):
        shares = [
            np.exp(np.where(w > 0, np.log(w) + k - whole, -np.inf)) for w, k in zip(of.weights, parts, strict=True)
        ]
    first = sum(share * m for share, m in zip(shares, mean, strict=True))
    second = sum(share * (v + m * m) for share, m, v in zip(shares, mean, variance, strict=True))
    return np.asarray(first), np.asarray(second)


def domain_end(of: Columns) -> Array:
    """The supremum of the t at which M is finite: 1 / theta, lambda, or infinity."""
    factors = of.weights if of.combination == "linear" else np.ones_like(of.weights)
    with np.errstate(divide="ignore"):
        ends = [1 / (of.scale * factors[0]), of.rate / factors[1]]
    return np.minimum(*(np.where(w > 0, end, np.inf) for w, end in zip(of.weights[:2], ends, strict=True)))


def _log_parts(of: Columns, points: list[Array]) -> list[Array]:
    """log M_k(t_k) of the Gamma, the Exponential and the Uniform part."""
    return [
        of.shape * _log_pole(points[0] * of.scale),
        _log_pole(points[1] / of.rate),
        _log_uniform(points[2], of.low, of.high),
    ]


def _tilted_parts(of: Columns, points: list[Array]) -> tuple[list[Array], list[Array]]:
    """First and second derivative of log M_k at t_k: mean and variance of a part under the density ~ exp(t_k u)."""
    scale = of.scale / (1 - points[0] * of.scale)
    mean = 1 / (of.rate - points[1])
    uniform = _tilted_uniform(points[2], of.low, of.high)
    return [of.shape * scale, mean, uniform[0]], [of.shape * scale**2, mean**2, uniform[1]]


def _log_pole(x: Array) -> Array:
    """-log(1 - x), infinite from 1 on."""
    with np.errstate(divide="ignore"):
        return np.where(x < 1, -np.log1p(-np.minimum(x, 1.0)), np.inf)


def _log_uniform(t: Array, low: Array, high: Array) -> Array:
    """log((e^(t high) - e^(t low)) / (t (high - low))), from the end that is larger in the exponent."""
    size = np.abs(t) * (high - low)
    large, small = np.maximum(size, 0.01), np.minimum(size, 0.01)
    end = t * np.where(t < 0, low, high) + np.log1p(-np.exp(-large)) - np.log(large)
    return np.asarray(np.where(size < 0.01, t * (low + high) / 2 + small**2 / 24 - small**4 / 2880, end))


def _tilted_uniform(t: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Mean and variance under the density ~ exp(t u) on [low, high]: derivatives of log(sinh(x) / x), x = t half."""
    half = (high - low) / 2
    x = t * half
    size, small = np.maximum(np.abs(x), 0.01), np.clip(x, -0.01, 0.01)
    # 1 - |coth x - 1/x|: the mean's way from the nearer end, in units of half, without cancellation.
    way = half * (1 / size - 2 / np.expm1(np.minimum(2 * size, 700.0)))
    mean = np.where(x < 0, low + way, high - way)
    variance = half**2 * ((1 / size) ** 2 - (1 / np.sinh(np.minimum(size, 300.0))) ** 2)
    near = np.abs(x) < 0.01
    series = (low + high) / 2 + half * (small / 3 - small**3 / 45)
    return np.where(near, series, mean), np.where(near, half**2 * (1 / 3 - small**2 / 15), variance)


def _aligned(weights: Array, ndim: int) -> Array:
    return weights.reshape(weights.shape + (1,) * (ndim + 1 - weights.ndim))

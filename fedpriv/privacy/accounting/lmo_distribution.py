"""The distribution of LMO noise on one coordinate, in units of the clip norm, and of u, the noise's inverse scale.

Given u, the noise is Laplace(1 / u). So with M the moment generating function of u, its density is M'(-|x|) / 2, and it
exceeds x > 0 with probability M(-x) / 2. Its absolute moment of order n is n! E[u^-n]. M and the moments of u are
computed for many parameter sets at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy import special

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.lmo_parameters import (
    Combination,
    ExponentialPart,
    GammaPart,
    LmoParameters,
    UniformPart,
)

# Trapezoidal rule in log x: for analytic integrands that vanish at both ends, its error falls exponentially in the
# number of nodes. The range starts where the part below is e^-45 of the whole, and ends where M is e^-45.
_NODES, _NEGLIGIBLE = 1001, 45.0

# log x of the largest float, minus some margin for powers.
_LARGEST_LOG = 690.0


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Parameters of many candidates of one combination, as arrays of one shape, and the noise that they describe.

    An absent part has weight 0 and scale 0, rate infinity, or low and high 0.

    Attributes:
        combination: `mixture` or `linear`.
        weights: [3, ...] of the Gamma, Exponential and Uniform part; those of a mixture sum to exactly one.
    """

    combination: Combination
    weights: Array
    shape: Array
    scale: Array
    rate: Array
    low: Array
    high: Array

    def mapped(self, function: Callable[[Array], Array]) -> Columns:
        """The same with a function applied to every array, such as a reshape of the candidates' axes."""
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
        """The same with `num` axes of length 1 appended, to broadcast against orders and points."""
        return self.mapped(lambda column: column.reshape(column.shape + (1,) * num))

    def scaled(self, factor: Array | float) -> Columns:
        """The parameters of u times the factor, which divides the noise by it."""
        return replace(
            self,
            scale=self.scale * factor,
            rate=self.rate / factor,
            low=self.low * factor,
            high=self.high * factor,
        )

    @classmethod
    def of(cls, parameters: LmoParameters) -> Self:
        """The parameters of one candidate, as arrays of shape []."""
        parts = parameters.parts
        gamma, exponential, uniform = (parts.get(name) for name in ("gamma", "exponential", "uniform"))
        weights = np.array([part.weight if part else 0.0 for part in (gamma, exponential, uniform)])
        # An absent part is the constant 0, which is inside every domain.
        shape, scale = (gamma.shape, gamma.scale) if isinstance(gamma, GammaPart) else (1.0, 0.0)
        rate = exponential.rate if isinstance(exponential, ExponentialPart) else np.inf
        low, high = (uniform.low, uniform.high) if isinstance(uniform, UniformPart) else (0.0, 0.0)
        return cls(
            combination=parameters.combination,
            weights=weights / weights.sum() if parameters.combination == "mixture" else weights,
            shape=np.array(shape, dtype=float),
            scale=np.array(scale, dtype=float),
            rate=np.array(rate, dtype=float),
            low=np.array(low, dtype=float),
            high=np.array(high, dtype=float),
        )

    def log_mgf(self, t: npt.ArrayLike) -> Array:
        """log M(t) = log E[exp(t u)]; infinite outside the domain.

        M = sum a_k M_k for a mixture, prod M_k(a_k t) for a linear combination.

        Args:
            t: of either sign; broadcasts against the arrays of parameters.

        Source: Yang et al., Theorem A.4; its Algorithm 3 for the mixture.
        """
        t = np.asarray(t, dtype=float)
        if self.combination == "linear":
            gamma, exponential, uniform = _log_parts(self, [weight * t for weight in self.weights])
            return np.asarray(gamma + exponential + uniform)
        weights = self.weights
        logs = [np.where(w > 0, part, 0.0) for w, part in zip(weights, _log_parts(self, [t, t, t]), strict=True)]
        with np.errstate(over="ignore", divide="ignore"):
            # Near zero, where adding weights would lose M - 1 to rounding.
            near = np.log1p(
                np.clip(sum(w * np.expm1(part) for w, part in zip(weights, logs, strict=True)), -0.9, 1e300)
            )
            aligned = weights.reshape(weights.shape + (1,) * (near.ndim + 1 - weights.ndim))
            far = special.logsumexp(np.stack(np.broadcast_arrays(*logs)), axis=0, b=aligned)
        return np.asarray(np.where(np.abs(near) < 0.5, near, far))

    def tilted_moments(self, t: npt.ArrayLike) -> tuple[Array, Array]:
        """E[u exp(t u)] / M(t) and E[u^2 exp(t u)] / M(t), for t inside the domain; at t = 0 the moments of u."""
        t = np.asarray(t, dtype=float)
        if self.combination == "linear":
            mean, variance = _tilted_parts(self, [weight * t for weight in self.weights])
            first = sum(w * m for w, m in zip(self.weights, mean, strict=True))
            spread = sum(w * w * v for w, v in zip(self.weights, variance, strict=True))
            return np.asarray(first), np.asarray(spread + first**2)
        mean, variance = _tilted_parts(self, [t, t, t])
        whole, parts = self.log_mgf(t), _log_parts(self, [t, t, t])
        with np.errstate(divide="ignore"):
            pairs = zip(self.weights, parts, strict=True)
            shares = [np.exp(np.where(weight > 0, np.log(weight) + part - whole, -np.inf)) for weight, part in pairs]
        first = sum(share * m for share, m in zip(shares, mean, strict=True))
        second = sum(share * (v + m * m) for share, m, v in zip(shares, mean, variance, strict=True))
        return np.asarray(first), np.asarray(second)

    @property
    def domain_end(self) -> Array:
        """The supremum of all t for which M(t) is finite: 1 / theta, lambda, or infinity."""
        factors = self.weights if self.combination == "linear" else np.ones_like(self.weights)
        with np.errstate(divide="ignore"):
            ends = [1 / (self.scale * factors[0]), self.rate / factors[1]]
        return np.minimum(*(np.where(w > 0, end, np.inf) for w, end in zip(self.weights[:2], ends, strict=True)))

    def density(self, x: npt.ArrayLike) -> Array:
        """Density of the noise at x; x in units of the clip norm."""
        t = -np.abs(np.asarray(x, dtype=float))
        return np.asarray(np.exp(self.log_mgf(t)) * self.tilted_moments(t)[0] / 2)

    def cdf(self, x: npt.ArrayLike) -> Array:
        """Probability that the noise is at most x."""
        x = np.asarray(x, dtype=float)
        tail = np.exp(self.log_mgf(-np.abs(x))) / 2
        return np.asarray(np.where(x < 0, tail, 1 - tail))

    def quantile(self, probability: npt.ArrayLike) -> Array:
        """The x that the noise does not exceed with the given probability, in (0, 1), or else an InputError."""
        p = np.asarray(probability, dtype=float)
        if not ((p > 0) & (p < 1)).all():
            raise InputError(f"probability = {p.tolist()}: must lie in (0, 1)")
        return np.asarray(np.sign(p - 0.5) * np.exp(_log_size(self, np.log(2 * np.minimum(p, 1 - p)))))

    @property
    def variance(self) -> Array:
        """[...] Variance of the noise, 2 E[u^-2]; infinite if u is small too often, see `_zero_power`."""
        return 2 * _inverse_moment(self, 2)

    @property
    def mean_absolute(self) -> Array:
        """[...] Mean absolute value of the noise, E[1 / u]; infinite if u is small too often, see `_zero_power`."""
        return _inverse_moment(self, 1)

    @property
    def entropy(self) -> float:
        """Differential entropy of the noise in nats, -E[log density]."""

        def integrand(x: Array, log_m: Array, first: Array) -> Array:
            log_density = log_m + np.log(first / 2)
            return -2 * np.exp(log_density) * log_density

        return _density_integral(self, integrand)

    @property
    def fisher_information(self) -> float:
        """Fisher information of the noise about its location, E[(p' / p)^2], in units of 1 / clip norm^2.

        Among all noises of one variance, the Gaussian has the least, 1 / variance (Cramer-Rao bound).
        """

        def integrand(x: Array, log_m: Array, first: Array) -> Array:
            return np.exp(log_m) * self.tilted_moments(-x)[1] ** 2 / first

        return _density_integral(self, integrand)


def _log_parts(candidates: Columns, points: list[Array]) -> list[Array]:
    """log M_k(t_k) of the Gamma, Exponential and Uniform part."""
    return [
        candidates.shape * _log_pole(points[0] * candidates.scale),
        _log_pole(points[1] / candidates.rate),
        _log_uniform(points[2], candidates.low, candidates.high),
    ]


def _tilted_parts(candidates: Columns, points: list[Array]) -> tuple[list[Array], list[Array]]:
    """First and second derivative of log M_k at t_k: mean and variance of a part tilted by exp(t_k u)."""
    scale = candidates.scale / (1 - points[0] * candidates.scale)
    mean = 1 / (candidates.rate - points[1])
    uniform = _tilted_uniform(points[2], candidates.low, candidates.high)
    return [candidates.shape * scale, mean, uniform[0]], [candidates.shape * scale**2, mean**2, uniform[1]]


def _log_pole(x: Array) -> Array:
    """-log(1 - x), infinite from 1 on."""
    with np.errstate(divide="ignore"):
        return np.where(x < 1, -np.log1p(-np.minimum(x, 1.0)), np.inf)


def _log_uniform(t: Array, low: Array, high: Array) -> Array:
    """log((e^(t high) - e^(t low)) / (t (high - low))), factored by the larger of the two exponentials."""
    size = np.abs(t) * (high - low)
    large, small = np.maximum(size, 0.01), np.minimum(size, 0.01)
    end = t * np.where(t < 0, low, high) + np.log1p(-np.exp(-large)) - np.log(large)
    return np.asarray(np.where(size < 0.01, t * (low + high) / 2 + small**2 / 24 - small**4 / 2880, end))


def _tilted_uniform(t: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Mean and variance of the density ~ exp(t u) on [low, high]: derivatives of log(sinh(x) / x), x = t half."""
    half = (high - low) / 2
    x = t * half
    size, small = np.maximum(np.abs(x), 0.01), np.clip(x, -0.01, 0.01)
    # 1 - |coth x - 1/x|: the mean's distance from the nearer end, in units of half, without cancellation.
    end_distance = half * (1 / size - 2 / np.expm1(np.minimum(2 * size, 700.0)))
    mean = np.where(x < 0, low + end_distance, high - end_distance)
    variance = half**2 * ((1 / size) ** 2 - (1 / np.sinh(np.minimum(size, 300.0))) ** 2)
    near = np.abs(x) < 0.01
    series = (low + high) / 2 + half * (small / 3 - small**3 / 45)
    return np.where(near, series, mean), np.where(near, half**2 * (1 / 3 - small**2 / 15), variance)


def _log_size(candidates: Columns, log_tail: npt.ArrayLike) -> Array:
    """log x of the x > 0 that the absolute noise exceeds with probability exp(log_tail) = M(-x); at most 690."""
    wanted = np.asarray(log_tail, dtype=float)
    shape = np.broadcast_shapes(wanted.shape, candidates.shape.shape)
    low, high = np.full(shape, -_LARGEST_LOG), np.full(shape, _LARGEST_LOG)
    for _ in range(64):
        middle = (low + high) / 2
        beyond = candidates.log_mgf(-np.exp(middle)) > wanted
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return np.asarray((low + high) / 2)


def _inverse_moment(candidates: Columns, order: int) -> Array:
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
    return np.asarray(np.where(_zero_power(candidates) > order, value, np.inf))


def _log_ratio(low: Array, high: Array) -> Array:
    """log(high / low) / (high - low), the mean of 1 / u for u uniform."""
    share = (high - low) / high
    return np.asarray(np.where(share < 1e-6, 1 + share / 2, -np.log1p(-share) / share) / high)


def _zero_power(candidates: Columns) -> Array:
    """[...] The power p in P(u < x) = O(x^p) near 0 and in M(-t) = O(t^-p); infinite if u is bounded away from 0.

    E[u^-n] is finite if n < p. Of a mixture the part with the smallest power decides; in a linear combination they add
    up.
    """
    gamma, exponential, uniform = (weight > 0 for weight in candidates.weights)
    parts = [candidates.shape, np.ones_like(candidates.rate), np.where(candidates.low > 0, np.inf, 1.0)]
    if candidates.combination == "mixture":
        powers = [np.where(has, part, np.inf) for has, part in zip((gamma, exponential, uniform), parts, strict=True)]
        return np.asarray(np.min(powers, axis=0))
    powers = [np.where(has, part, 0.0) for has, part in zip((gamma, exponential, uniform), parts, strict=True)]
    return np.asarray(np.sum(powers, axis=0))


def _density_integral(candidates: Columns, function: Callable[[Array, Array, Array], Array]) -> float:
    return float(_integral(candidates, lambda x, log_m: function(x, log_m, candidates.tilted_moments(-x)[0])))


def _integral(candidates: Columns, function: Callable[[Array, Array], Array], *, order: int = 0) -> Array:
    """[...] Integral over x > 0 of a function of x and log M(-x) that falls as fast as x^(order - 1) M(-x)."""
    size = candidates.tilted_moments(0.0)[0]
    end = _log_size(candidates, -_NEGLIGIBLE) + 1.0
    start = -np.log(size) - _NEGLIGIBLE
    log_x = start + (end - start) * np.linspace(0, 1, _NODES).reshape(-1, *(1,) * np.ndim(start))
    x = np.exp(log_x)
    values = function(x, candidates.log_mgf(-x)) * x
    # The integral beyond the end for M = x^-power, where x^order M is not small.
    power = _zero_power(candidates)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(np.isfinite(power) & (order > 0), values[-1] / (power - order), 0.0)
    return np.asarray(np.trapezoid(values, log_x, axis=0) + rest)

"""The cost of LMO noise: its event, and its divergences, as published, for a scalar, and sound, for a vector.

Let u be the random inverse scale, M its moment generating function, s the distance by which one record moves a
coordinate (in units of the clip norm, by which the noise is scaled), and

    G(s) = log[(a M((a - 1) s) + (a - 1) M(-a s)) / (2a - 1)] / (a - 1)

the Renyi divergence of order a between (noise, u) and (noise + s, u). An observer of the noise but not of u knows less,
so G is an upper bound on the mechanism's divergence, in both directions since the noise is symmetric. This is
`published`.

A record moves a vector by (D_1, ..., D_d) with sum D_i^2 <= C^2. Since u is drawn for every coordinate, divergences
add up: with g(t) = G(sqrt(t)), the cost is the supremum of sum_i g(D_i^2). With g^ the concave envelope of g on
[0, C^2], sum_i g(D_i^2) <= sum_i g^(D_i^2) <= d g^(C^2 / d) by Jensen's inequality, and d g^(C^2 / d) is at most its
limit for large d, C^2 sup g(t) / t. This is `sound`. In that limit it is at least a C^2 E[u^2] / 2, since
g(t) = a E[u^2] t / 2 + O(t^1.5).

The envelope is bounded from above on a grid. (1) M is log-convex, and so are sums of log-convex functions, so G is
convex: between two grid points G lies below its chord in s, which is concave in t = s^2 and at most
(G_2 - G_1) (s_2 - s_1) / (4 (s_1 + s_2)) above its chord in t. Lifting the points by this gap gives an envelope that g
never exceeds. (2) In the first cell, log(1 + y) <= y and e^-ax <= e^(a-1)x give g(t) <= a t E[u^2 e^((a-1) s u)] / 2,
where the expectation increases with s, so its value at the end of the cell gives a line above g. (3) For every slope,
the lowest line of that slope above all lifted points bounds the envelope, so an inexact minimum over slopes is still a
bound.

An observer of the noise alone has two further bounds, which `sound` accounting uses too. The density of one coordinate
is e^-f(|x|) with f concave and increasing, so its ratio to the shifted one is largest at 0, where it is e^h(s), with
h(s) = f(s) - f(0) = log(E[u] / M'(-s)). h is concave, so a vector's largest loss is d h(C / sqrt d). And what is e-DP
is dominated by N(0, 1) and N(m, 1) with m = 2 Phi^-1(e^e / (1 + e^e)) <= sqrt(pi / 2) e. As h(s) <= s E[u^2] / E[u],
the noise on all coordinates is dominated by Gaussian noise, with the multiplier of `gaussian_multiplier`.
docs/appendices/lmo.md has the proofs.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.gaussian import MAX_NOISE, MIN_NOISE, composed_curve, composed_loss, of_whole_orders
from fedpriv.privacy.accounting.law import SMALLEST_DIVERGENCE, Array, Event, Unit, check_non_negative, short
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import LmoAccounting, LmoParameters, check_one_of

# Who sees u, the inverse scale of every coordinate: anyone who sees a release, as curves in closed form assume, or, as
# it is in every run, nobody.
Observer = Literal["noise-and-scale", "noise-only"]

PUBLISHED_CAVEAT = "LMO noise was accounted as published, which bounds no gradient"

# Grid points of the envelope, from where G is a parabola to within 1e-5 up to the sensitivity; the result is then about
# 1e-5 too large.
_POINTS = 4096
_SMALLEST_STEP = 1e-5

# Grid points of the sound curve under sampling, which needs all integer orders; they make it about 2e-4 too large.
_FEWER_POINTS = 512

_BISECTIONS = 48

# Below this sensitivity squares would underflow; a larger sensitivity never costs less.
_SMALLEST_SENSITIVITY = 1e-9

# Relative rounding error of a curve: near s = 0 the first-order terms of G cancel.
_ROUNDING = 1e-9

# Absolute rounding error of a logarithm of M and its derivative near 0.
_LOG_ROUNDING = 1e-15


@dataclass(frozen=True, kw_only=True)
class SubsampledLmo(Event):
    """`count` compositions of LMO noise, drawn for every coordinate, on a Poisson sample of the records.

    Attributes:
        parameters: of the noise, in units of the clip norm.
        sensitivity: L2 sensitivity over the clip norm, finite and > 0: the clipping rule's factor.
        dimension: how many coordinates are noised, >= 1.
        sampling_probability: q in [0, 1], with which each record was included, independently.
        accounting: `sound`, or `published`, which is no guarantee.
        count: how many such releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite, or a whole client is said to be sampled.
    """

    parameters: LmoParameters
    sensitivity: float
    dimension: int
    sampling_probability: float
    accounting: LmoAccounting = "sound"
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, LmoParameters):
            raise ValueError(f"parameters = {short(self.parameters)}: must be LmoParameters")
        check_non_negative("sensitivity", self.sensitivity)
        if self.sensitivity == 0:
            raise ValueError("sensitivity = 0: must be > 0")
        if isinstance(self.dimension, bool) or not isinstance(self.dimension, int) or not 1 <= self.dimension <= 2**53:
            raise ValueError(f"dimension = {short(self.dimension)}: must be a whole number >= 1")
        check_one_of("accounting", self.accounting, LmoAccounting)
        super().__post_init__()

    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] Renyi divergence of all releases; of `published` accounting known at whole orders only."""
        orders = np.asarray(orders, dtype=float)
        if self.sampling_probability == 0:
            return np.zeros(orders.shape)
        is_whole = (orders >= 2) & (orders == np.floor(orders))
        curve = np.full(orders.shape, math.inf)
        noise = (self.parameters, 1 if self.accounting == "published" else self.dimension, self.sensitivity)
        if (whole := orders[is_whole].astype(int)).size:
            sampled = self.sampling_probability < 1
            every = range(2, whole.max() + 1) if sampled else whole.tolist()
            own = _unsampled(*noise, tuple(every), _FEWER_POINTS if sampled else _POINTS)
            curve[is_whole] = poisson_sampled(own, whole, self.sampling_probability) if sampled else own
        if self.accounting == "sound":
            dominating = composed_curve(self.sampling_probability, self.effective_noise_multiplier, 1, orders)
            curve = np.minimum(curve, dominating)
        return np.asarray(self.count * np.maximum(curve, SMALLEST_DIVERGENCE))

    @property
    def has_pld(self) -> bool:
        """Whether the accounting is proven, and the noise more than none."""
        return self.accounting == "sound" and self.effective_noise_multiplier >= MIN_NOISE

    def pld(self, value_interval: float) -> Any:
        """That of the Gaussian noise which dominates this one."""
        if not self.has_pld:
            return None
        noise = min(self.effective_noise_multiplier, MAX_NOISE)
        return composed_loss(self.sampling_probability, noise, self.count, value_interval)

    @property
    def loss_scale(self) -> float:
        """q / z of that Gaussian noise."""
        return self.sampling_probability / max(self.effective_noise_multiplier, 1.0)

    @property
    def max_loss(self) -> float:
        """That of pure differential privacy, log(1 + q (e^epsilon - 1)) for each release; infinite for `published`."""
        if self.accounting == "published":
            return math.inf
        of = Columns.of(self.parameters)
        epsilon = largest_loss(of, dimension=self.dimension, sensitivity=self.sensitivity)
        return self.count * float(amplified(epsilon, self.sampling_probability))

    def with_noise(self, factor: float) -> Self:
        """The same noise for a sensitivity divided by the factor, which costs the same as the multiplied noise."""
        return replace(self, sensitivity=self.sensitivity / factor)

    @property
    def effective_noise_multiplier(self) -> float:
        """That of Gaussian noise which protects no more, however the releases are composed or sampled."""
        return gaussian_multiplier(Columns.of(self.parameters), self.sensitivity)

    @property
    def caveat(self) -> str:
        """The claim that `published` accounting leaves unproven; empty for `sound`."""
        return PUBLISHED_CAVEAT if self.accounting == "published" else ""

    @property
    def proven(self) -> Self:
        """The same releases by `sound` accounting."""
        return replace(self, accounting="sound")

    def to_fields(self) -> dict[str, Any]:
        """The event as plain values that JSON takes."""
        return asdict(self) | {"parameters": self.parameters.to_dict()}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The event that `to_fields` described."""
        values = dict(fields)
        if "parameters" in values:
            values["parameters"] = LmoParameters.from_dict(values["parameters"])
        return cls(**values)


# Clients of a federation differ in q alone, so that one curve without sampling serves thousands of events.
@lru_cache(maxsize=256)
def _unsampled(
    parameters: LmoParameters, dimension: int, sensitivity: float, orders: tuple[int, ...], points: int
) -> Array:
    return sound(Columns.of(parameters), orders, dimension=dimension, sensitivity=sensitivity, points=points)


def gaussian_multiplier(candidate: Columns, sensitivity: float) -> float:
    """The noise multiplier sqrt(2 / pi) E[u] / (C E[u^2]) of Gaussian noise that protects no more, in any dimension.

    Args:
        candidate: parameters, arrays of shape [].
        sensitivity: C > 0, L2, in units of the noise's scale (the clip norm).
    """
    first, second = (float(moment) for moment in candidate.tilted_moments(0.0))
    return math.sqrt(2 / math.pi) * first / (second * sensitivity) * (1 - _ROUNDING)


def largest_loss(candidates: Columns, *, dimension: float, sensitivity: float) -> Array:
    """[...] The epsilon of pure differential privacy of one release, d log(E[u] / M'(-C / sqrt d)).

    Guarantee: the least epsilon at delta 0 for all queries into R^dimension with L2 sensitivity C, if u and the Laplace
    variable are drawn independently for every coordinate and u stays hidden.

    Args:
        candidates: parameters, arrays of shape [...].
        dimension: d >= 1, finite.
        sensitivity: C > 0, in units of the noise's scale (the clip norm).

    Source: Yang et al., Theorem A.2, for a scalar; for a vector the module docstring.
    """
    _check_sensitivity(sensitivity, "> 0")
    shift = -sensitivity / math.sqrt(dimension)
    # The logarithm of the ratio, as the difference of two loses digits where E[u] is far from 1.
    ratio = candidates.tilted_moments(0.0)[0] / candidates.tilted_moments(shift)[0]
    of_one = np.log(ratio) - candidates.log_mgf(shift)
    return np.asarray(dimension * (np.maximum(of_one, 0.0) + _LOG_ROUNDING) * (1 + _ROUNDING))


def amplified(epsilon: npt.ArrayLike, sampling_probability: float) -> Array:
    """log(1 + q (e^epsilon - 1)): pure differential privacy on a Poisson sample; epsilon itself where a float ends."""
    limited = np.minimum(epsilon, 700.0)
    return np.where(limited == epsilon, np.log1p(sampling_probability * np.expm1(limited)), epsilon)


def published(candidates: Columns, orders: npt.ArrayLike, sensitivity: float = 1.0) -> Array:
    """[..., orders] Renyi divergence of noise on a scalar with u revealed; infinite if (a - 1) s leaves M's domain.

    Guarantee: an upper bound for one real-valued query, exact if u is a constant. Not a bound for a vector.

    Args:
        candidates: parameters, arrays of shape [...].
        orders: a > 1, [orders].
        sensitivity: s >= 0, in units of the noise's scale.

    Raises:
        InputError: an order or the sensitivity is out of range.

    Source: Yang et al., Algorithm 3, line 17, with M(t) replaced by M(s t).
    """
    orders = checked_orders(orders)
    _check_sensitivity(sensitivity)
    return _divergence(candidates.with_axes(1), orders, np.full(orders.shape, float(sensitivity)))


def sound(
    candidates: Columns, orders: npt.ArrayLike, *, dimension: float, sensitivity: float = 1.0, points: int = _POINTS
) -> Array:
    """[..., orders] Upper bound on the Renyi divergence of noise on a vector; infinite outside M's domain.

    Guarantee: an upper bound for every query into R^dimension with L2 sensitivity `sensitivity`, if u and the Laplace
    variable are drawn independently for every coordinate. See the module docstring for the proof.

    Args:
        candidates: parameters, arrays of shape [...].
        orders: a > 1, [orders].
        dimension: d >= 1; infinity gives the limit.
        sensitivity: C > 0, in units of the noise's scale (the clip norm).
        points: of the grid; fewer are faster and give a larger bound.

    Raises:
        InputError: an order, the dimension or the sensitivity is out of range.
    """
    orders = checked_orders(orders)
    _check_sensitivity(sensitivity)
    if not dimension >= 1:
        raise InputError(f"dimension = {dimension}: must be >= 1")
    if dimension == 1 or sensitivity == 0:
        return published(candidates, orders, sensitivity)
    sensitivity = max(sensitivity, _SMALLEST_SENSITIVITY)
    wide = candidates.with_axes(1)
    inside = (orders - 1) * sensitivity < wide.domain_end
    # Outside the domain any finite value will do, since it is replaced at the end.
    reach = np.where(inside, sensitivity, 0.5 * wide.domain_end / (orders - 1))
    t, y = _lifted(candidates, orders, np.where(np.isfinite(reach), reach, sensitivity), points)
    steepest = (y[..., 1:] / t[..., 1:]).max(axis=-1)
    limit = sensitivity**2 * steepest
    if math.isfinite(dimension):
        limit = np.minimum(limit, dimension * _envelope(t, y, sensitivity**2 / dimension, steepest))
    return np.where(inside, limit * (1 + _ROUNDING), np.inf)


def divergences(candidate: Columns, order: float, *, dimension: float, sensitivity: float) -> dict[str, float]:
    """{name: Renyi divergence of one release}: published, sound, and limits of large dimensions.

    `sound_limit` bounds it for every dimension; the second moment and Fisher's information of the noise do so from
    below.

    Args:
        candidate: parameters, arrays of shape [].
        order: a > 1.
        dimension: d >= 1.
        sensitivity: C > 0, in units of the noise's scale (the clip norm).

    Raises:
        InputError: a value is out of range, or (a - 1) C is not inside the domain of M.
    """
    checked_orders(order)
    _check_sensitivity(sensitivity, "> 0")
    check_domain(candidate, order, sensitivity)
    return {
        "published": float(published(candidate, order, sensitivity)[0]),
        "sound": float(sound(candidate, order, dimension=dimension, sensitivity=sensitivity)[0]),
        "sound_limit": float(sound(candidate, order, dimension=math.inf, sensitivity=sensitivity)[0]),
        "second_moment_limit": order * sensitivity**2 * float(candidate.tilted_moments(0.0)[1]) / 2,
        "fisher_limit": order * sensitivity**2 * candidate.fisher_information / 2,
    }


def checked_orders(orders: npt.ArrayLike) -> Array:
    """The orders as an array; InputError if one is not finite and > 1."""
    array = np.atleast_1d(np.asarray(orders, dtype=float))
    if bad := [float(order) for order in array if not 1 < order < math.inf]:
        raise InputError(f"order = {bad[0]}: must be finite and > 1")
    return array


def check_domain(candidates: Columns, order: float, sensitivity: float) -> None:
    """Refuse an order with (order - 1) sensitivity outside of M's domain, where the curve's moments do not exist."""
    end = float(candidates.domain_end)
    if not (order - 1) * sensitivity < end:
        raise InputError(
            f"order = {order:g}: (order - 1) * sensitivity must be < {end:.6g}, where the Gamma or Exponential part "
            f"of the noise ends, so the order must be < {1 + end / sensitivity:.6g}"
        )


def _check_sensitivity(sensitivity: float, least: str = ">= 0") -> None:
    if not 0 <= sensitivity < math.inf or (sensitivity == 0 and least == "> 0"):
        raise InputError(f"sensitivity = {sensitivity}: must be finite and {least}")


def _divergence(candidates: Columns, orders: Array, s: Array) -> Array:
    """G(s), as in the module docstring, for arrays that broadcast against each other."""
    up, down = candidates.log_mgf((orders - 1) * s), candidates.log_mgf(-orders * s)
    with np.errstate(over="ignore"):
        excess = (orders * np.expm1(up) + (orders - 1) * np.expm1(down)) / (2 * orders - 1)
        near = np.log1p(np.maximum(excess, 0.0))
    far = np.logaddexp(np.log(orders) + up, np.log(orders - 1) + down) - np.log(2 * orders - 1)
    return np.asarray(np.where(near < 0.5, near, far) / (orders - 1))


def _lifted(candidates: Columns, orders: Array, reach: Array, points: int) -> tuple[Array, Array]:
    """[..., orders, points] t and heights whose concave envelope g never exceeds on [0, reach^2]."""
    wide = candidates.with_axes(1)
    size = np.sqrt(wide.tilted_moments(0.0)[1])
    first = np.minimum(reach / 2, _SMALLEST_STEP / (orders * size))
    exponents = np.linspace(0.0, 1.0, points - 1)
    s = np.concatenate(
        [np.zeros((*first.shape, 1)), first[..., None] * (reach / first)[..., None] ** exponents], axis=-1
    )
    column = orders[:, None]
    g = _divergence(candidates.with_axes(2), column, s)
    gaps = np.diff(g)[..., 1:] * np.diff(s)[..., 1:] / (4 * (s[..., 1:-1] + s[..., 2:]))
    lifted = g.copy()
    lifted[..., 1:-1] += gaps
    lifted[..., 2:] = np.maximum(lifted[..., 2:], g[..., 2:] + gaps)
    tilt = (orders - 1) * first
    line = orders * first**2 / 2 * np.exp(wide.log_mgf(tilt)) * wide.tilted_moments(tilt)[1]
    lifted[..., 1] = np.maximum(lifted[..., 1], line)
    return s**2, lifted


def _envelope(t: Array, y: Array, position: float, steepest: Array) -> Array:
    """[...] Upper bound on the concave envelope of the points [..., points] at a position, by bisection over slopes."""
    low, high = np.zeros_like(steepest), steepest
    best = high * position  # the line of slope `steepest` through 0, which lies above all points
    for _ in range(_BISECTIONS):
        slope = (low + high) / 2
        heights = y - slope[..., None] * t
        touched = heights.argmax(axis=-1)[..., None]
        best = np.minimum(best, slope * position + np.take_along_axis(heights, touched, axis=-1)[..., 0])
        beyond = np.take_along_axis(t, touched, axis=-1)[..., 0] > position
        low, high = np.where(beyond, slope, low), np.where(beyond, high, slope)
    return best


def poisson_sampled(curve: Array, orders: npt.NDArray[np.int64], sampling_probability: float) -> Array:
    """[..., orders] Upper bound on the Renyi divergence of additive symmetric noise on a Poisson sample of the records.

    Guarantee: under add-or-remove adjacency, in both directions, and exact for a single shift; infinite if the curve is
    infinite at any order up to the requested one. With P and Q the laws with and without the record, the moment of
    (1 - q) Q + q P against Q is a binomial sum over those of P; the reverse divergence is no larger, since x -> D - x
    swaps P and Q (docs/appendices/lmo.md). The divergence without sampling is a bound as well (divergences are
    quasi-convex in the pair of distributions), so the smaller of the two is returned.

    Args:
        curve: [..., l - 2] divergences of the mechanism on all records at the integer orders l = 2, 3, ..., at least up
            to the largest of `orders`.
        orders: integers >= 2.
        sampling_probability: q in (0, 1).

    Source: Mironov, Talwar and Zhang 2019, Theorem 5.
    """
    each = np.arange(2.0, orders.max() + 1)
    exponents = (each - 1) * curve[..., : len(each)]
    log_moments = of_whole_orders(np.full(len(orders), sampling_probability), exponents, orders.astype(float))
    return np.asarray(np.minimum(curve[..., orders - 2], log_moments / (orders - 1)))

"""Gaussian noise: on a Poisson sample of the records, and on a sum to which a person adds at several holders.

Renyi curves are computed at all orders at once, and privacy losses at all points: dp-accounting has the same, term by
term and point by point in Python, and a calibration asks for them dozens of times.

In a sum, a person at several holders moves holder j's part by at most s_j, if j draws the person, which each holder
decides by itself. So the sum moves by the random amount sum_j s_j B_j with independent coins B_j of probability q_j:
noise on that is a mixture of Gaussians. Noise over the sum of all s_j with one holder's q is another mechanism, in
which one coin decides for all. For two holders with s = 1, q = 0.01 and noise 1, 100 steps cost 1.53 at delta 1e-5, of
which that says 6.48; and where a draw is rarer than delta it says 0, though two coins are tossed.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

from fedpriv.privacy.accounting.law import (
    SMALLEST_DIVERGENCE,
    Array,
    Event,
    Unit,
    check_non_negative,
    check_probability,
    short,
)

MAX_HOLDERS = 8
"""The most holders of one person: a sum's mixture has a Gaussian for each set of them that may draw the person."""

# Outside this range of z floating-point results are meaningless: a smaller z counts as no noise, a larger one as the
# largest. Both only raise the cost.
MIN_NOISE, MAX_NOISE = 1e-6, 1e6

# dp-accounting abandons a fractional order if, after this many terms, a term still exceeds e^-30 of the sum: the curve
# is infinite there. So is this one, so that it is never below the library's.
_MOST_TERMS, _NEGLIGIBLE_LOG_RATIO = 1000, -30.0
# How many terms are tried, one number after the other, until the last of them is negligible.
_NUM_TERMS = (64, 128, 256, 512, _MOST_TERMS)


@dataclass(frozen=True, kw_only=True)
class SubsampledGaussian(Event):
    """`count` compositions of a Gaussian mechanism on a Poisson sample of the records.

    Attributes:
        noise_multiplier: z_eff >= 0, the standard deviation of the noise over the L2 sensitivity; 0 means no noise,
            at infinite cost.
        sampling_probability: q in [0, 1], with which each record is included, independently; 1 is the plain
            Gaussian mechanism.
        count: number of releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite, or sampling is claimed for a whole client.
    """

    noise_multiplier: float
    sampling_probability: float
    count: int = 1
    unit: Unit = "record"

    noise_adds_up: ClassVar[bool] = True

    @property
    def has_pld(self) -> bool:
        """dp-accounting computes it, whatever z and q are."""
        return True

    def __post_init__(self) -> None:
        check_non_negative("noise_multiplier", self.noise_multiplier)
        super().__post_init__()

    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] Renyi divergence of all releases; infinite without noise."""
        return composed_curve(self.sampling_probability, self.noise_multiplier, self.count, orders)

    def pld(self, value_interval: float) -> Any:
        """The privacy loss distribution of all releases, built in the same steps as by dp-accounting's accountant."""
        return composed_loss(self.sampling_probability, self._noise, self.count, value_interval)

    def with_noise(self, factor: float) -> Self:
        """The same releases with the noise multiplied by a factor."""
        return type(self)(
            noise_multiplier=factor * self.noise_multiplier,
            sampling_probability=self.sampling_probability,
            count=self.count,
            unit=self.unit,
        )

    @classmethod
    def rdp_of_many(cls, events: Sequence[Self], orders: npt.ArrayLike) -> Array:
        """[events, orders] the curves; at a single order they are computed for a thousand events at a time."""
        if np.size(orders) != 1:
            return super().rdp_of_many(events, orders)
        order = float(np.ravel(orders)[0])
        q = np.array([event.sampling_probability for event in events])
        blocks = np.array_split(q, 1 + len(q) // 1000)
        curve = np.concatenate([sampled_curve(block, events[0]._noise, np.full(len(block), order)) for block in blocks])
        floor = min(order / (2 * events[0]._noise ** 2), SMALLEST_DIVERGENCE)
        return np.asarray([event.count for event in events] * np.maximum(curve, floor))[:, None]

    @property
    def effective_noise_multiplier(self) -> float:
        """z_eff."""
        return self.noise_multiplier

    @property
    def is_noised(self) -> bool:
        """Whether z_eff is at least 1e-6, below which a release counts as one without noise."""
        return self.noise_multiplier >= MIN_NOISE

    @property
    def loss_scale(self) -> float:
        """q / z."""
        return self.sampling_probability / max(self._noise, 1.0)

    @property
    def _noise(self) -> float:
        return min(self.noise_multiplier, MAX_NOISE)


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
    if is_whole.any():
        k = np.arange(2.0, orders[is_whole].max() + 1)
        log_moments[is_whole] = of_whole_orders(q[is_whole], (k * k - k) / (2 * z * z), orders[is_whole])
    log_moments[~is_whole] = _of_fractions(q[~is_whole], z, orders[~is_whole])
    return np.asarray(log_moments / (orders - 1))


def of_whole_orders(q: Array, exponents: Array, orders: Array) -> Array:
    """[..., orders] log A by the binomial theorem, Eq. (3.4), from the logs of the mean of each power without sampling.

    Without the powers' ones, which add up to 1, a small divergence is not lost to rounding.

    Args:
        q: in (0, 1), [orders].
        exponents: [..., k] logs of the means of the k-th powers, k = 2, 3, ..., up to the largest order.
        orders: whole, >= 2, at least one.
    """
    k, n = np.arange(2.0, orders.max() + 1), orders[:, None]
    terms = _log_binomial(orders, k) + k * np.log(q)[:, None] + (n - k) * np.log1p(-q)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):  # a mean may be 1, or infinite, also where k > n
        terms = terms + (exponents + np.log(-np.expm1(-exponents)))[..., None, :]
    return np.asarray(np.logaddexp(0.0, logsumexp(np.where(k <= n, terms, -np.inf), axis=-1)))


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
    """[orders] Renyi divergence of `count` releases at orders > 1; infinite without noise."""
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
    """The privacy loss distribution of `count` releases, built in the same steps as by dp-accounting's accountant."""
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
    """The probabilities of losses that are multiples of the interval (Doroshenko et al. 2022, Algorithm 1)."""
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


@dataclass(frozen=True, kw_only=True)
class SummedGaussian(Event):
    """`count` sums with Gaussian noise, to which a person adds at several holders, drawn at each independently.

    Attributes:
        noise_multiplier: standard deviation of the sum's noise >= 0, in the units of the sensitivities.
        sensitivities: s_j > 0 of each holder, at least one and at most `MAX_HOLDERS`: the most that the person moves
            the holder's part of the sum by, in L2.
        sampling_probabilities: q_j in [0, 1] of each holder.
        count: number of sums, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite, or there is another number of one than of the other.

    Source: Choquette-Choo et al. 2024, corollary 4.7, on vectors: norms may stand for
        vectors. The distribution grows with each s_j and q_j, since the sum of coins then is larger, whatever happens.
    """

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    sampling_probabilities: tuple[float, ...]
    count: int = 1
    unit: Unit = "person"

    @property
    def has_pld(self) -> bool:
        """dp-accounting computes it, whatever z and q are."""
        return True

    def __post_init__(self) -> None:
        check_non_negative("noise_multiplier", self.noise_multiplier)
        for name, values in (("sensitivities", self.sensitivities), ("probabilities", self.sampling_probabilities)):
            if not isinstance(values, tuple) or not 1 <= len(values) <= MAX_HOLDERS:
                raise ValueError(f"{name} = {short(values)}: must be those of 1 to {MAX_HOLDERS} holders")
        for sensitivity in self.sensitivities:
            check_non_negative("sensitivity", sensitivity)
        for probability in self.sampling_probabilities:
            check_probability("sampling_probability", probability)
        if len(self.sensitivities) != len(self.sampling_probabilities) or 0 in self.sensitivities:
            raise ValueError(
                f"sensitivities = {short(self.sensitivities)}: must be > 0, and one for each of "
                f"{len(self.sampling_probabilities)} probabilities"
            )
        super().__post_init__()

    @property
    def sampling_probability(self) -> float:
        """1 - prod_j (1 - q_j): that any holder draws the person."""
        first, *others = self.sampling_probabilities
        return 1 - (1 - first) * math.prod(1 - q for q in others) if others else first

    @property
    def effective_noise_multiplier(self) -> float:
        """The noise over all that the person can move the sum by."""
        return self.noise_multiplier / math.fsum(self.sensitivities)

    @property
    def is_noised(self) -> bool:
        """Whether the effective noise multiplier is at least 1e-6, below which a sum counts as one without noise."""
        return self.effective_noise_multiplier >= MIN_NOISE

    @property
    def loss_scale(self) -> float:
        """The smallest q_j s_j over the noise."""
        typical = (q * s for q, s in zip(self.sampling_probabilities, self.sensitivities, strict=True))
        return min(typical) / max(self.noise_multiplier, 1.0)

    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] a bound on the divergence: whenever anyone draws the person, as if all holders did.

        The moment of order a, exp((a - 1) times the divergence), is convex in the pair of laws, and largest for the
        largest shift, so that the average over the sets that draw the person is at most that of the set of all.
        """
        return composed_curve(self.sampling_probability, self.effective_noise_multiplier, self.count, orders)

    def pld(self, value_interval: float) -> Any:
        """The privacy loss distribution of all sums, from the mixture."""
        if len(self.sensitivities) == 1 or min(self.sampling_probabilities) == 1:
            noise, q = self.effective_noise_multiplier, self.sampling_probability
            return composed_loss(q, noise, self.count, value_interval)
        return _mixture_loss(self.with_count(1), value_interval).self_compose(self.count)

    def with_noise(self, factor: float) -> Self:
        """The same sums with the noise multiplied by a factor."""
        return replace(self, noise_multiplier=factor * self.noise_multiplier)

    def moves(self) -> dict[float, float]:
        """{amount that the person moves the sum by: its probability}, of all that have one."""
        found: defaultdict[float, float] = defaultdict(float)
        for drawn in itertools.product((0, 1), repeat=len(self.sensitivities)):
            coins = zip(self.sampling_probabilities, drawn, strict=True)
            moved = math.fsum(s * is_in for s, is_in in zip(self.sensitivities, drawn, strict=True))
            found[moved] += math.prod(q if is_in else 1 - q for q, is_in in coins)
        return {moved: share for moved, share in sorted(found.items()) if share > 0}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The event that `to_fields` described; JSON has lists for tuples."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)


@lru_cache(maxsize=64)
def _mixture_loss(event: SummedGaussian, value_interval: float) -> Any:
    """The privacy loss distribution of one sum, as dp-accounting builds it, 50 times faster: all losses at once."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss

    moves, found = event.moves(), []
    for adjacency in (AdjacencyType.REMOVE, AdjacencyType.ADD):
        loss = MixtureGaussianPrivacyLoss(
            event.noise_multiplier, list(moves), list(moves.values()), adjacency_type=adjacency
        )
        bounds = loss.connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / value_interval)
        high = math.ceil(bounds.epsilon_upper / value_interval)
        losses = np.arange(low, high + 1) * value_interval
        deltas = _divergences(event, losses, removed=adjacency == AdjacencyType.REMOVE)
        found.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(value_interval, low, high, deltas))
    return privacy_loss_distribution.PrivacyLossDistribution(*found)


def _divergences(event: SummedGaussian, losses: Array, *, removed: bool) -> Array:
    """[losses] hockey-stick divergence at exp(loss): of the sum with the person from that without, or the reverse."""
    moves, shares = (np.array(list(values)) for values in (event.moves().keys(), event.moves().values()))
    noise, sign = event.noise_multiplier, 1.0 if removed else -1.0
    at = _points(sign * losses, moves, shares, noise)
    # The tail above the point, where the sum with the person is likelier, or the one below it.
    with_person = shares @ ndtr(sign * (moves[:, None] - at) / noise)
    without = ndtr(-sign * at / noise)
    first, second = (with_person, without) if removed else (without, with_person)
    return np.asarray(np.clip(first - np.exp(losses) * second, 0.0, 1.0))


def _points(losses: Array, moves: Array, shares: Array, noise: float) -> Array:
    """[losses] where log(density with the person / without) has this value; minus infinity where it is always more.

    Newton's method on the logarithm of the part that depends on the point, convex and steep, from above.
    """
    never = float(shares[moves == 0].sum())
    known = losses > (math.log(never) if never else -math.inf)
    target = losses[known] + np.log1p(-never * np.exp(-losses[known]))
    slopes = moves[moves > 0][:, None] / noise**2
    offsets = np.log(shares[moves > 0])[:, None] - slopes * moves[moves > 0][:, None] / 2
    at = ((target - offsets) / slopes).min(axis=0)
    for _ in range(50):
        terms = offsets + slopes * at
        total = logsumexp(terms, axis=0)
        step = (total - target) / (np.exp(terms - total) * slopes).sum(axis=0)
        at = at - step
        if np.abs(step).max(initial=0.0) < 1e-12 * noise:
            break
    points = np.full(losses.shape, -math.inf)
    points[known] = at
    return points


def worst_other_holders(
    sensitivities: Mapping[int, float], probabilities: Mapping[int, float], client: int, holders: int
) -> tuple[tuple[float, float], ...]:
    """(s_j, q_j) of the other holders that cost a client's person most in a sum, s_j over the client's own.

    They are the largest sensitivities of any, each with the largest probability of any that is left: no other holders,
    nor the same with other coins, move the sum by more, whatever happens.

    Args:
        sensitivities: {client: > 0} of all that may be in the sum, in one unit: the most that a person moves the
            client's part by in L2, as it is added. On a grid that has the rounding of the client itself, see
            `mechanisms.discrete_gaussian.sensitivity`; weights of clients, without it, are no bound.
        probabilities: {client: q_j} of the same.
        holders: h >= 1, the most holders of a person; where fewer are in the sum, those count.
    """
    others = [other for other in sensitivities if other != client]
    largest = sorted((sensitivities[other] / sensitivities[client] for other in others), reverse=True)[: holders - 1]
    likeliest = sorted((probabilities[other] for other in others), reverse=True)[: holders - 1]
    return tuple(zip(largest, likeliest, strict=True))

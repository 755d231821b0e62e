"""A person with records at several holders: what a sum of their uploads costs, and what all of their uploads cost.

In a sum, the person moves holder j's part by at most s_j, if j draws the person, which each holder decides by itself.
So the sum moves by the random amount sum_j s_j B_j with independent coins B_j of probability q_j: noise on that is a
mixture of Gaussians. Noise over the sum of all s_j with one holder's q is another mechanism, in which one coin decides
for all. For two holders with s = 1, q = 0.01 and noise 1, 100 steps cost 1.53 at delta 1e-5, of which that says 6.48;
and where a draw is rarer than delta it says 0, though two coins are tossed.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp, ndtr

from fedpriv.privacy.accounting._gaussian import MIN_NOISE, composed_curve, composed_loss
from fedpriv.privacy.accounting.law import (
    Array,
    Event,
    Unit,
    check_non_negative,
    check_probability,
    short,
)

MAX_HOLDERS = 8
"""The most holders of one person: a sum's mixture has a Gaussian for each set of them that may draw the person."""


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

    has_pld: ClassVar[bool] = True

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
        client: whose person is protected.
        holders: h >= 1, the most holders of a person; where fewer are in the sum, those count.
    """
    others = [other for other in sensitivities if other != client]
    largest = sorted((sensitivities[other] / sensitivities[client] for other in others), reverse=True)[: holders - 1]
    likeliest = sorted((probabilities[other] for other in others), reverse=True)[: holders - 1]
    return tuple(zip(largest, likeliest, strict=True))

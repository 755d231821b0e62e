"""Trade-off functions: how well any test tells two worlds apart, from any kind of guarantee.

A test that wrongly accuses the share x of outsiders misses at least the share f(x) of the insiders, and finds at most
1 - f(x). All functions here are symmetric and convex: both questions, "added?" and "removed?", count.

(e, d(e))-DP for every e >= 0 at once, with d the larger of both directions, bounds a test by the lines d + e^e x and
1 - e^-e (1 - d - x), and the lines of all e meet the convex envelope of both questions (Dong, Roth and Su 2022,
Proposition 2.12). One (epsilon, delta) alone is one pair of lines, and says far less. A Renyi divergence bounds a test
by what it bounds between two coins: an accusation is one.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from fedpriv.privacy.accounting.law import Array

# [tests] f of each share of outsiders that a test wrongly accuses.
TradeOff = Callable[[Array], Array]

# Mu is bounded between tests until the bound exceeds what a test needs by so large a share, or after so many rounds, in
# which each cell with a larger bound is cut into so many.
_MU_SHARE, _MU_ROUNDS, _MU_CUTS = 1e-4, 6, 10
_SMALL = 1e-12
_BISECTIONS = 45
_MOST_ORDERS = 32


def gaussian(mu: npt.ArrayLike) -> TradeOff:
    """mu-GDP, mu >= 0 for all tests or each: telling the worlds apart is at least as hard as N(0, 1) from N(mu, 1)."""
    mu = np.asarray(mu, dtype=float)
    return lambda x: np.asarray(special.ndtr(-special.ndtri(x) - mu))


def profile(epsilons: Array, deltas: Array) -> TradeOff:
    """(epsilon_j, delta_j)-DP for all j at once, such as a privacy profile; fewer points make a weaker claim.

    Args:
        epsilons: [points], >= 0.
        deltas: [points] or [tests, points].
    """
    ratio = np.exp(epsilons)

    def missed(x: Array) -> Array:
        x = np.asarray(x, dtype=float)[:, None]
        lines = np.maximum(1 - deltas - ratio * x, (1 - deltas - x) / ratio)
        return np.asarray(np.maximum(0.0, lines.max(axis=-1)))

    return missed


def renyi(orders: Array, divergences: Array) -> TradeOff:
    """Renyi divergences of these orders, in both directions, are at most so much.

    Two coins that show heads with the probabilities of an accusation, x and y, are post-processing, so their divergence
    is bounded too: y is at most the largest one for which it is.

    Args:
        orders: [orders], > 1.
        divergences: [orders], >= 0; an infinite one says nothing, and of many finite ones some are enough.
    """
    known = np.flatnonzero(np.isfinite(divergences))
    known = known[np.unique(np.linspace(0, len(known) - 1, min(len(known), _MOST_ORDERS)).round().astype(int))]
    order, limit = orders[known], (orders[known] - 1) * divergences[known]

    def missed(x: Array) -> Array:
        x = np.asarray(x, dtype=float)[:, None]
        low, high = np.broadcast_to(x, (len(x), len(order))), np.ones((len(x), len(order)))
        with np.errstate(divide="ignore", invalid="ignore"):
            own = np.log(x), np.log1p(-x)
            for _ in range(_BISECTIONS):
                # By ratio, once halves of 1 no longer resolve it.
                y = np.where(high < _SMALL, np.sqrt(low * high), (low + high) / 2)
                other = np.log(y), np.log1p(-y)
                fits = np.maximum(_log_moment(other, own, order), _log_moment(own, other, order)) <= limit
                low, high = np.where(fits, y, low), np.where(fits, high, y)
        return np.asarray(np.where(x[:, 0] == 0, 1.0, 1 - high.min(axis=1, initial=1.0)))

    return missed


def _log_moment(p: tuple[Array, Array], q: tuple[Array, Array], order: Array) -> Array:
    """Log of p^a q^(1-a) + (1-p)^a (1-q)^(1-a), from the logarithms of p, 1 - p, q and 1 - q."""
    heads, tails = (order * of_p + (1 - order) * of_q for of_p, of_q in zip(p, q, strict=True))
    return np.asarray(np.logaddexp(heads, tails))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon >= 0 that mu-GDP, mu >= 0, implies at delta (Dong, Roth and Su 2022, Corollary 2.13)."""

    def excess(epsilon: float) -> float:
        tail = math.exp(min(700.0, epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2))))
        return float(special.ndtr(mu / 2 - epsilon / mu)) - tail - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-12))


def of_group(trade_off: TradeOff, size: int) -> TradeOff:
    """How well any test tells worlds apart that differ in `size` >= 1 of the protected together.

    Source: Dong, Roth and Su 2022, Theorem 2.14: 1 - (1 - f) applied so many times.
    """

    def missed(x: Array) -> Array:
        found = np.asarray(x, dtype=float)
        for _ in range(size):
            found = 1 - trade_off(found)
        return 1 - found

    return missed


def revealing(trade_off: TradeOff, delta: float) -> TradeOff:
    """The curve of releases that reveal everything with probability delta, in [0, 1), and else are as this one says."""
    if delta == 0:
        return trade_off
    return lambda x: (1 - delta) * trade_off(np.minimum(np.asarray(x) / (1 - delta), 1.0))


def mu_of(trade_off: TradeOff, delta: float) -> float:
    """The smallest mu with 1 - f(x) <= 1 - f_mu(x) + delta for all x, from above; infinite if there is none.

    Only tests with x <= 1/2 count: those beyond mirror them, and ask for less.
    """
    z = np.linspace(-37.0, 0.0, 500)
    missed = trade_off(special.ndtr(z))
    if missed[0] + delta < 1:  # more than delta is found without a wrong accusation
        return math.inf
    for _ in range(_MU_ROUNDS):
        least, bounds = max(0.0, _mu_needed(missed + delta, z).max()), _mu_between(missed, z, delta)
        (open_,) = np.nonzero(bounds > least * (1 + _MU_SHARE) + 1e-9)
        if not len(open_):
            break
        width = (z[open_ + 1] - z[open_])[:, None]
        new = (z[open_, None] + width * np.arange(1, _MU_CUTS) / _MU_CUTS).ravel()
        z, missed = np.append(z, new), np.append(missed, trade_off(special.ndtr(new)))
        order = z.argsort()
        z, missed = z[order], missed[order]
    return float(max(0.0, _mu_between(missed, z, delta).max()))


def _mu_needed(missed: Array, z: Array) -> Array:
    """[tests] The mu that each test asks for, by the share missed and delta; minus infinity if it finds nothing."""
    return np.asarray(-special.ndtri(np.clip(missed, 0.0, 1.0)) - z)


def _mu_between(missed: Array, z: Array, delta: float) -> Array:
    """[tests - 1] A bound on the mu that any test between two neighbours asks for.

    The share found grows with x, and lies, being concave, below the line through the two tests before. Where that line
    is below the curve of a mu at both ends of a cell, it is below all along: that curve is concave too.
    """
    x = special.ndtr(z)
    slope = np.append(np.inf, np.diff(missed[:-1]) / -np.diff(x[:-1]))
    with np.errstate(invalid="ignore"):
        lines = np.minimum(missed[:-1] - slope * np.diff(x), missed[1:])
    grown = _mu_needed(missed[1:] + delta, z[:-1])
    return np.minimum(grown, np.maximum(_mu_needed(missed[:-1] + delta, z[:-1]), _mu_needed(lines + delta, z[1:])))


def regret_of(trade_off: TradeOff, mu: float) -> float:
    """The least k with f(x + k) - k <= f_mu(x) at all x of a fine grid; between them it may be larger, so no bound.

    Source: Kaissis et al. 2024, of two trade-off functions; Gomez et al. 2025, of one and Gaussian DP.
    """
    if mu == math.inf:
        return 0.0
    x = np.concatenate([np.geomspace(1e-8, 1e-3, 60), np.linspace(1e-3, 1.0, 300)])
    missed = trade_off(x)
    claimed = gaussian(mu)
    low, high = np.zeros(len(x)), np.minimum(x, missed)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_short = claimed(x - middle) < missed - middle
        low, high = np.where(is_short, middle, low), np.where(is_short, high, middle)
    return float(high.max(initial=0.0))


def advantage_of(trade_off: TradeOff) -> float:
    """The largest 1 - x - f(x): by symmetry and convexity it is at x = f(x)."""
    low, high = 0.0, 0.5
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_below = bool(trade_off(np.array([middle]))[0] >= middle)
        low, high = (middle, high) if is_below else (low, middle)
    return 1 - 2 * low

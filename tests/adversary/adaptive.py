"""The exact delta of an adaptive coordinator, by quadrature with NumPy and SciPy alone, and strategies to search among.

An upload in one dimension is the worst case: with the record its law is (1 - q) N(0, z^2) + q N(1, z^2), without it
N(0, z^2). After each upload the coordinator picks, among the releases that it may ask for next, the one with which it
tells the two apart best. H(gamma) = sup_S Pr[S with] - gamma Pr[S without] of all that is still to come obeys

    H(gamma) = max over releases of E_without[L(y) H_next(gamma / L(y))],   H_end(gamma) = max(0, 1 - gamma),

where L is the likelihood ratio of the release's upload y. delta is H(e^epsilon) of the first release, and the larger of
this and its mirror image, where the record is absent in the first world and present in the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

# Standard deviations of noise on each side of the two means, and points on it.
_REACH, _POINTS = 9.0, 900


@dataclass(frozen=True)
class Ask:
    """A release that the coordinator asks for: q, z, and, after its upload, those among which it picks the next.

    Attributes:
        q: in (0, 1].
        z: noise multiplier, > 0.
        then: none ends the interaction.
    """

    q: float
    z: float
    then: tuple[Ask, ...] = ()


def delta_of(first: Ask, epsilon: float) -> float:
    """The exact delta at this epsilon of the best play, whichever of the two worlds has the record."""
    return max(float(_divergence(first, np.array([epsilon]), adds)[0]) for adds in (False, True))


def _divergence(ask: Ask, log_gamma: np.ndarray, adds: bool) -> np.ndarray:
    """H(e^log_gamma) of a release and all that follows it; `adds` puts the record into the second world."""
    if not ask.then:
        return _last(ask, log_gamma, adds)
    y = np.linspace(-_REACH * ask.z, 1.0 + _REACH * ask.z, _POINTS)
    log_ratio = np.logaddexp(_log1m(ask.q), math.log(ask.q) + (2 * y - 1) / (2 * ask.z**2))
    without = np.exp(-(y**2) / (2 * ask.z**2)) / (ask.z * math.sqrt(2 * math.pi))
    first, loss = (without, -log_ratio) if adds else (without * np.exp(log_ratio), log_ratio)
    later = (log_gamma[:, None] - loss).ravel()
    best = np.max([_divergence(each, later, adds) for each in ask.then], axis=0)
    return np.trapezoid(first * best.reshape(len(log_gamma), -1), y, axis=1)


def _last(ask: Ask, log_gamma: np.ndarray, adds: bool) -> np.ndarray:
    """H of one sampled Gaussian release, in closed form by that of the Gaussian without sampling."""
    gamma, rest = np.exp(np.minimum(log_gamma, 700.0)), 1.0 - ask.q
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if adds:
            share = 1.0 - gamma * rest
            inner = np.where(share > 0, log_gamma + math.log(ask.q) - np.log(np.maximum(share, 1e-300)), np.inf)
            return np.where(share > 0, share * _gaussian(inner, ask.z), 0.0)
        inner = np.log(np.maximum((gamma - rest) / ask.q, 1e-300))
        return np.where(gamma > rest, ask.q * _gaussian(inner, ask.z), 1.0 - gamma)


def _gaussian(log_gamma: np.ndarray, z: float) -> np.ndarray:
    """H of N(1, z^2) against N(0, z^2), and the other way round (Balle and Wang 2018)."""
    above = np.exp(log_ndtr(0.5 / z - log_gamma * z))
    below = np.exp(np.minimum(log_gamma, 700.0) + log_ndtr(-0.5 / z - log_gamma * z))
    return np.maximum(np.where(np.isinf(log_gamma), 0.0, above - np.nan_to_num(below)), 0.0)


def _log1m(q: float) -> float:
    return math.log1p(-q) if q < 1 else -math.inf

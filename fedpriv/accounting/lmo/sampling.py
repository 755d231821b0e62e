"""LMO noise on a Poisson sample of the records, by a bound that needs only the noise's Renyi curve."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from fedpriv.accounting.lmo.moments import Array, Columns
from fedpriv.accounting.lmo.parameters import LmoAccounting
from fedpriv.accounting.lmo.renyi import POINTS, published, sound

# Grid points of the sound curve under sampling, which needs all integer orders; the difference of 2e-4 is negligible
# beside its factor 3.
_POINTS = 512


def sampled_curve(
    candidates: Columns,
    orders: npt.NDArray[np.int64],
    *,
    accounting: LmoAccounting,
    dimension: float,
    sensitivity: float,
    sampling_probability: float,
    points: int | None = None,
) -> Array:
    """[..., orders] Renyi divergence of one release of LMO noise on a Poisson sample, under add-or-remove adjacency.

    Args:
        candidates: parameters, arrays of shape [...].
        orders: integers >= 2.
        accounting: `sound`, or `published`, which is not a bound for a vector and ignores the dimension.
        dimension: d >= 1, may be infinite.
        sensitivity: C > 0, L2, in units of the clip norm.
        sampling_probability: q in [0, 1].
        points: of the sound curve's grid; None chooses a number that suits q.
    """
    if sampling_probability == 0:
        return np.zeros((*candidates.shape.shape, len(orders)))
    sampled = sampling_probability < 1
    every = np.arange(2, orders.max() + 1) if sampled else orders
    curve = unsampled_curve(
        candidates,
        every,
        accounting=accounting,
        dimension=dimension,
        sensitivity=sensitivity,
        sampled=sampled,
        points=points,
    )
    return poisson_sampled(curve, orders, sampling_probability) if sampled else curve


def unsampled_curve(
    candidates: Columns,
    orders: npt.NDArray[np.int64],
    *,
    accounting: LmoAccounting,
    dimension: float,
    sensitivity: float,
    sampled: bool = False,
    points: int | None = None,
) -> Array:
    """[..., orders] Renyi divergence of one release of LMO noise on all records.

    Args:
        candidates: parameters, arrays of shape [...].
        orders: integers >= 2.
        accounting: `sound`, or `published`, which is no bound for a vector and does not use the dimension.
        dimension: d >= 1, may be infinite.
        sensitivity: C > 0, L2, in units of the clip norm.
        sampled: whether `poisson_sampled` follows, for which a coarser grid is enough.
        points: of the sound curve's grid; None chooses a number.
    """
    if accounting == "published":
        return published(candidates, orders, sensitivity)
    points = points or (_POINTS if sampled else POINTS)
    return sound(candidates, orders, dimension=dimension, sensitivity=sensitivity, points=points)


def poisson_sampled(curve: Array, orders: npt.NDArray[np.int64], sampling_probability: float) -> Array:
    """[..., orders] Upper bound on the Renyi divergence of a mechanism on a Poisson sample of the records.

    Guarantee: under add-or-remove adjacency, in both directions. The divergence without sampling is a bound as well
    (divergences are quasi-convex in the pair of distributions), so the smaller of the two is returned. Infinite if the
    curve is infinite at any order up to the requested one.

    Args:
        curve: [..., l - 2] divergences of the mechanism on all records at the integer orders l = 2, 3, ..., at least up
            to the largest of `orders`.
        orders: integers >= 2.
        sampling_probability: q in (0, 1).

    Source: Zhu and Wang 2019, Theorem 5, the bound for any mechanism, with its factor 3. The sum of all binomial
    chances, 1, is taken off it, so that no digit is lost where it is small.
    """
    column, each = orders[:, None], np.arange(2, orders.max() + 1)
    rest = np.maximum(column - each, 0)
    log_binomial = special.gammaln(column + 1) - special.gammaln(each + 1) - special.gammaln(rest + 1)
    log_binomial += each * math.log(sampling_probability) + rest * math.log1p(-sampling_probability)
    moments = (each - 1) * curve[..., : len(each)]
    with np.errstate(divide="ignore"):  # log(factor e^x - 1), where e^x may be too large for a float
        excess = moments + np.log(np.where(each == 2, -np.expm1(-moments), 3 - np.exp(-moments)))
    terms = np.where(each <= column, log_binomial + excess[..., None, :], -np.inf)
    sampled = np.logaddexp(0.0, special.logsumexp(terms, axis=-1)) / (orders - 1)
    return np.asarray(np.minimum(curve[..., orders - 2], sampled))

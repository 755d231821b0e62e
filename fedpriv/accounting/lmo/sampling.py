"""LMO noise on a Poisson sample of the records, by a bound that needs the noise's Renyi curve only."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from fedpriv.accounting.lmo.moments import Array, Columns
from fedpriv.accounting.lmo.parameters import LmoAccounting
from fedpriv.accounting.lmo.renyi import POINTS, published, sound

# Of the sound curve's grid: sampling needs every whole order, and its factor 3 hides the difference of 2e-4.
_POINTS = 512


def sampled_curve(
    of: Columns,
    orders: npt.NDArray[np.int64],
    *,
    accounting: LmoAccounting,
    dimension: float,
    sensitivity: float,
    sampling_probability: float,
    points: int | None = None,
) -> Array:
    """[..., orders] Renyi divergence of one release of LMO noise on a Poisson sample, add-or-remove adjacency.

    Args:
        of: parameters, arrays of shape [...].
        orders: whole, >= 2.
        accounting: `sound`, or `published`, which is no bound for a vector and does not use the dimension.
        dimension: d >= 1, may be infinite.
        sensitivity: C > 0, L2, in units of the clip norm.
        sampling_probability: q in [0, 1].
        points: of the sound curve's grid; None for what suits q.
    """
    if sampling_probability == 0:
        return np.zeros((*of.shape.shape, len(orders)))
    sampled = sampling_probability < 1
    every = np.arange(2, orders.max() + 1) if sampled else orders
    curve = unsampled_curve(
        of,
        every,
        accounting=accounting,
        dimension=dimension,
        sensitivity=sensitivity,
        sampled=sampled,
        points=points,
    )
    return poisson_sampled(curve, orders, sampling_probability) if sampled else curve


def unsampled_curve(
    of: Columns,
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
        of: parameters, arrays of shape [...].
        orders: whole, >= 2.
        accounting: `sound`, or `published`, which is no bound for a vector and does not use the dimension.
        dimension: d >= 1, may be infinite.
        sensitivity: C > 0, L2, in units of the clip norm.
        sampled: whether `poisson_sampled` follows, which a coarser grid suits.
        points: of the sound curve's grid; None for what suits.
    """
    if accounting == "published":
        return published(of, orders, sensitivity)
    points = points or (_POINTS if sampled else POINTS)
    return sound(of, orders, dimension=dimension, sensitivity=sensitivity, points=points)


def poisson_sampled(curve: Array, orders: npt.NDArray[np.int64], sampling_probability: float) -> Array:
    """[..., orders] upper bound of the Renyi divergence of a mechanism on a Poisson sample of the records.

    Guarantee: add-or-remove adjacency, both directions. The divergence without sampling is a bound as well (divergences
    are quasi-convex in the pair of distributions), so the smaller of the two is returned. Infinite where the curve is
    infinite at any order up to the one asked for.

    Args:
        curve: [..., l - 2] divergences of the mechanism on all records at the whole orders l = 2, 3, ..., at least up
            to the largest of `orders`.
        orders: whole, >= 2.
        sampling_probability: q, inside (0, 1).

    Source: Zhu and Wang 2019, Theorem 5, the bound for any mechanism, with its factor 3. The sum of all binomial
    chances, 1, is taken off it, so that no digit is lost where it is small.
    """
    column, each = orders[:, None], np.arange(2, orders.max() + 1)
    rest = np.maximum(column - each, 0)
    chances = special.gammaln(column + 1) - special.gammaln(each + 1) - special.gammaln(rest + 1)
    chances += each * math.log(sampling_probability) + rest * math.log1p(-sampling_probability)
    moments = (each - 1) * curve[..., : len(each)]
    with np.errstate(divide="ignore"):  # log(factor e^x - 1), where e^x may be too large for a float
        excess = moments + np.log(np.where(each == 2, -np.expm1(-moments), 3 - np.exp(-moments)))
    terms = np.where(each <= column, chances + excess[..., None, :], -np.inf)
    sampled = np.logaddexp(0.0, special.logsumexp(terms, axis=-1)) / (orders - 1)
    return np.asarray(np.minimum(curve[..., orders - 2], sampled))

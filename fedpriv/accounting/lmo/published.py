"""Formulas of the LMO-DP paper that do not hold, kept for reproduction. Nothing else may use them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.lmo.moments import Array, Columns, log_mgf
from fedpriv.accounting.lmo.renyi import checked_orders


def theorem_4_2(candidates: Columns, orders: npt.ArrayLike, sensitivity: float = 1.0) -> Array:
    """[orders] The paper's Renyi divergence for a query of sensitivity C. Too small for C > 1: not a guarantee.

    At C = 1 it equals the `published` curve. Its proof integrates the density of Laplace(1, b), shifted by 1, over the
    intervals of a shift by C; at C = 0 it is not zero.

    Args:
        candidates: parameters, arrays of shape [].
        orders: a > 1.
        sensitivity: C >= 0.

    Source: Yang et al., Theorem 4.2, Eq. 4.
    """
    a, c = checked_orders(orders), sensitivity
    moments = (
        a / (2 * a - 1) * np.exp(log_mgf(candidates, a - 1))
        + np.exp(log_mgf(candidates, 1 - c - a)) / 2
        + np.exp(log_mgf(candidates, (1 - 2 * c) * a + (c - 1))) / (2 * (1 - 2 * a))
    )
    return np.asarray(np.log(moments) / (a - 1))


def equation_1(curve: Array, orders: npt.ArrayLike, delta: float) -> Array:
    """[orders] The paper's conversion to epsilon at every order, as printed: log((log(1/delta) + eps_a) / a).

    This is the logarithm of an epsilon, and is negative at large orders however small the noise: not a guarantee.

    Args:
        curve: [orders] Renyi divergences.
        orders: a > 1.
        delta: in (0, 1).

    Source: Yang et al., Eq. 1, of which the smallest counts; its Algorithm 3, line 19, takes the largest.
    """
    return np.asarray(np.log((math.log(1 / delta) + curve) / checked_orders(orders)))

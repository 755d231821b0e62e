"""The privacy budget of LMO noise, and the scale of noise that meets it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
from scipy import optimize

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import INTEGER_ORDERS, check_delta, epsilon_of
from fedpriv.privacy.accounting.events import SubsampledLmo
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import LmoAccounting, LmoParameters, UniformPart
from fedpriv.privacy.accounting.lmo_renyi import sampled_curve

# Relative tolerance of the scale.
_SCALE_TOLERANCE = 1e-7

# The scale is searched for within this factor of the given parameters.
_MAX_FACTOR = 1e6


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget for all releases of a run together, and the kind of these releases.

    Attributes:
        epsilon: finite and > 0.
        delta: in (0, 1).
        steps: number of releases, >= 1; 1 gives the paper's budget for each step.
        sampling_probability: q in (0, 1].
        sensitivity: L2, in units of the clip norm, > 0.
        dimension: number of coordinates, >= 1.
        accounting: `sound`, or `published`, which is valid for a scalar query only.
    """

    epsilon: float
    delta: float
    steps: int = 1
    sampling_probability: float = 1.0
    sensitivity: float = 1.0
    dimension: int = 1
    accounting: LmoAccounting = "sound"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise InputError(f"epsilon = {self.epsilon}: must be finite and > 0")
        check_delta(self.delta)
        if not 0 < self.sampling_probability <= 1:
            raise InputError(f"sampling_probability = {self.sampling_probability}: must lie in (0, 1]")
        if not 0 < self.sensitivity < math.inf:
            raise InputError(f"sensitivity = {self.sensitivity}: must be finite and > 0")
        if self.steps < 1 or self.dimension < 1:
            raise InputError(f"steps = {self.steps}, dimension = {self.dimension}: must be whole numbers >= 1")
        if self.accounting not in get_args(LmoAccounting):
            known = ", ".join(get_args(LmoAccounting))
            raise InputError(f"accounting = {self.accounting!r}: must be one of {known}")

    @property
    def valid_dimension(self) -> int:
        """The largest dimension for which the cost is an upper bound."""
        return self.dimension if self.accounting == "sound" else 1

    def event(self, parameters: LmoParameters) -> SubsampledLmo:
        """The event of all releases, with noise of these parameters."""
        return SubsampledLmo(
            parameters=parameters,
            sensitivity=self.sensitivity,
            dimension=self.dimension,
            sampling_probability=self.sampling_probability,
            accounting=self.accounting,
            count=self.steps,
        )


def cost(parameters: LmoParameters, budget: Budget) -> float:
    """Epsilon of all releases by the budget's accounting; with `published` it is the paper's figure."""
    return epsilon_of([budget.event(parameters)], budget.delta, "rdp", allow_unproven=True).epsilon


def costs(candidates: Columns, budget: Budget, orders: npt.NDArray[np.int64], points: int) -> Array:
    """[...] Epsilon of many candidates; below `cost` at most by what its shortcuts for tiny epsilons account for.

    Args:
        candidates: parameters, arrays of shape [...].
        budget: gives delta and the kind of the releases.
        orders: integers >= 2; fewer are faster and give a larger epsilon.
        points: of the sound curve's grid; fewer are faster and give a larger epsilon.
    """
    curve = budget.steps * sampled_curve(
        candidates,
        orders,
        accounting=budget.accounting,
        dimension=budget.dimension,
        sensitivity=budget.sensitivity,
        sampling_probability=budget.sampling_probability,
        points=points,
    )
    # dp_accounting.rdp.compute_epsilon: Canonne, Kamath and Steinke 2020, Proposition 12.
    conversion = np.log1p(-1 / orders) - np.log(budget.delta * orders) / (orders - 1)
    return np.asarray(np.maximum(curve + conversion, 0.0).min(axis=-1))


def fitted(parameters: LmoParameters, budget: Budget, *, largest_factor: float = _MAX_FACTOR) -> LmoParameters:
    """The parameters with u scaled by the largest factor within the budget, which gives the least such noise.

    Args:
        parameters: to be scaled.
        budget: not to be exceeded.
        largest_factor: upper limit of the factor.

    Raises:
        InputError: no noise of this kind within a factor of 1e6 meets the budget.
    """

    log_limit = math.log(_MAX_FACTOR)
    log_largest = min(math.log(largest_factor), log_limit)

    def excess(log_factor: float) -> float:
        # Outside the domain the cost is infinite, which a root-finder cannot handle.
        return min(cost(parameters.scaled(math.exp(log_factor)), budget), 10 * budget.epsilon) - budget.epsilon

    high = min(0.0, log_largest)
    while excess(high) <= 0:
        if high == log_largest:
            return parameters.scaled(math.exp(log_largest))
        high = min(high + 1.0, log_largest)
    low = high - 1.0
    while excess(low) > 0:
        if low < -log_limit:
            raise InputError(
                f"epsilon = {budget.epsilon:g} at delta = {budget.delta:g}: no scale of this noise meets it"
            )
        low -= 1.0
    root = float(optimize.brentq(excess, low, min(high, low + 1.0), xtol=_SCALE_TOLERANCE))
    while excess(root) > 0:
        root -= _SCALE_TOLERANCE
    return parameters.scaled(math.exp(root))


def laplace(budget: Budget) -> LmoParameters:
    """Plain Laplace noise (constant u) of the smallest scale within the budget."""
    return fitted(LmoParameters(combination="mixture", uniform=UniformPart(weight=1, low=1, high=1)), budget)


def search_orders(budget: Budget) -> npt.NDArray[np.int64]:
    """A subset of the integer orders of `cost` that suffices to rank candidates."""
    sparse = np.array([*range(2, 17), *range(18, 33, 2), 36, 40, 48, 56, 63, 128, 256, 512, 1024])
    chosen = sparse[np.isin(sparse, INTEGER_ORDERS)]
    # The bound for sampling needs every order below the largest.
    return chosen if budget.sampling_probability == 1 else chosen[chosen <= 63]

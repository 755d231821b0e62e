"""The search for LMO noise: the least noise of given ranges that a budget allows (Algorithm 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.stats import qmc

from fedpriv.accounting.lmo.density import mean_absolute, variance
from fedpriv.accounting.lmo.moments import Array, Columns, columns, log_mgf
from fedpriv.accounting.lmo.parameters import (
    Combination,
    ExponentialPart,
    GammaPart,
    LmoParameters,
    UniformPart,
)
from fedpriv.errors import InputError
from fedpriv.lmo.budget import Budget, cost, costs, fitted, search_orders

# `usefulness`: how often the noise is at most `tolerance` in size (Mohammady et al. 2020), here as 1 - usefulness.
Objective = Literal["variance", "mean-absolute", "usefulness"]
PartName = Literal["gamma", "exponential", "uniform"]
PARTS: tuple[PartName, ...] = get_args(PartName)

Range = tuple[float, float]

# The coarse grid, a Sobol sequence; the population and the generations of the optimiser. The sound curve is some 20
# times as dear as the published one.
_COARSE = {"published": 2048, "sound": 256}
_POPULATION, _GENERATIONS = 32, {"published": 60, "sound": 20}
_POINTS, _BISECTIONS = 48, 14


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What noise is searched: parts, how they are combined, and ranges from the smallest to the largest value.

    Attributes:
        combination: `mixture` or `linear`.
        parts: which distributions take part.
        weight: of each part, where there are more than one; those of a mixture sum to one.
        shape, scale, rate, low, high: as in `LmoParameters`.

    Raises:
        InputError: a range is empty or not positive, or no weights within theirs sum to one.

    Source: Yang et al., Appendix E.1, for the weights; it gives no other ranges, and these are wide.
    """

    combination: Combination = "mixture"
    parts: tuple[PartName, ...] = PARTS
    weight: Range = (0.1, 0.9)
    shape: Range = (0.5, 50.0)
    scale: Range = (1e-5, 10.0)
    rate: Range = (0.1, 1e5)
    low: Range = (1e-4, 100.0)
    high: Range = (1e-4, 100.0)

    def __post_init__(self) -> None:
        if self.combination not in get_args(Combination):
            known = ", ".join(get_args(Combination))
            raise InputError(f"combination = {self.combination!r}: must be one of {known}")
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise InputError(f"parts = {', '.join(self.parts)!r}: must be some of {', '.join(PARTS)}")
        for name in RANGES:
            values = getattr(self, name)
            if len(values) != 2 or not 0 < values[0] <= values[1] < math.inf:
                raise InputError(f"{name} = {list(values)}: must be [smallest, largest], both finite and > 0")
        low, high = self.weight
        if (
            self.combination == "mixture"
            and len(self.parts) > 1
            and not low * len(self.parts) <= 1 <= high * len(self.parts)
        ):
            raise InputError(f"weight = {list(self.weight)}: no {len(self.parts)} weights in this range sum to 1")
        if "uniform" in self.parts and self.low[0] > self.high[1]:
            raise InputError(f"low = {list(self.low)}, high = {list(self.high)}: no low is at most a high")


RANGES = tuple(field.name for field in fields(SearchSpace))[2:]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Noise that a search found.

    Attributes:
        parameters: of the noise.
        value: of the objective; of `usefulness` the share of noise beyond the tolerance.
        epsilon: what it costs, at the budget's delta and by its accounting.
        valid_dimension: up to which dimension that is a bound.
        num_candidates: how many shapes were tried.
    """

    parameters: LmoParameters
    value: float
    epsilon: float
    valid_dimension: int
    num_candidates: int


def search(
    space: SearchSpace, budget: Budget, *, objective: Objective = "variance", tolerance: float = 1.0, seed: int = 0
) -> Found:
    """The noise of the space that costs at most the budget and has the least objective, as far as was found.

    Every candidate is a shape, whose largest scale of u within the budget and the ranges follows by bisection. A Sobol
    sequence covers the shapes, differential evolution refines its best. Equal arguments give equal results.

    Args:
        space: parts and ranges.
        budget: of one step or of a whole run.
        objective: what is to be small: variance, mean size, or how often the noise is larger than `tolerance`.
        tolerance: in units of the clip norm, > 0, for `usefulness`.
        seed: of both stages.

    Raises:
        InputError: no noise of the space meets the budget, the objective is infinite for all that do, or an argument is
            out of range.

    Source: Yang et al., Algorithm 3.
    """
    if objective not in get_args(Objective):
        raise InputError(f"objective = {objective!r}: must be one of {', '.join(get_args(Objective))}")
    if not 0 < tolerance < math.inf:
        raise InputError(f"tolerance = {tolerance}: must be finite and > 0")
    orders = search_orders(budget)

    def values(units: Array) -> Array:
        """[n] logs of the objective at [n, axes] shapes, infinite for those that do not fit."""
        of = _decoded(space, units)
        factor = _largest_factor(space, of, budget, orders)
        fits = np.isfinite(factor)
        found = measure(of.scaled(np.where(fits, factor, 1.0)), objective, tolerance)
        return np.where(fits & np.isfinite(found), np.log(np.maximum(found, 1e-300)), np.inf)

    num = _COARSE[budget.accounting]
    coarse = _sobol(space, num, seed)
    scores = values(coarse)
    if np.isinf(scores).all():
        raise InputError(_nothing_fits(space, budget, objective, orders, coarse))
    best = coarse[np.argsort(scores, kind="stable")[:_POPULATION]]
    refined = optimize.differential_evolution(
        lambda units: values(units.T),
        [(0.0, 1.0)] * coarse.shape[1],
        init=best,
        maxiter=_GENERATIONS[budget.accounting],
        tol=1e-6,
        polish=False,
        vectorized=True,
        updating="deferred",
        seed=seed,
    )
    return _finished(space, budget, refined.x, objective, tolerance, num + _POPULATION * refined.nfev, orders)


def drawn(space: SearchSpace, num: int, *, seed: int) -> Columns:
    """`num` candidates spread evenly over the space, those of a Sobol sequence with this seed."""
    return _decoded(space, _sobol(space, num, seed))


def measure(of: Columns, objective: Objective, tolerance: float) -> Array:
    """[...] the objective of candidates, smaller is better; see `search`."""
    if objective == "variance":
        return variance(of)
    return mean_absolute(of) if objective == "mean-absolute" else np.exp(log_mgf(of, -tolerance))


def _finished(
    space: SearchSpace,
    budget: Budget,
    unit: Array,
    objective: Objective,
    tolerance: float,
    num_candidates: int,
    orders: npt.NDArray[np.int64],
) -> Found:
    """The candidate at the scale that the full accounting allows."""
    of = _decoded(space, unit[None, :])
    shape = of.scaled(_largest_factor(space, of, budget, orders))
    parameters = fitted(_parameters(space, shape), budget, largest_factor=float(_factors(space, shape)[1][0]))
    return Found(
        parameters=parameters,
        value=float(measure(columns(parameters), objective, tolerance)),
        epsilon=cost(parameters, budget),
        valid_dimension=budget.valid_dimension,
        num_candidates=num_candidates,
    )


def _nothing_fits(
    space: SearchSpace, budget: Budget, objective: str, orders: npt.NDArray[np.int64], units: Array
) -> str:
    of = _decoded(space, units)
    least = float(costs(of.scaled(_factors(space, of)[0]), budget, orders, _POINTS).min())
    if least <= budget.epsilon:
        return f"objective = {objective}: infinite for all noise in these ranges; use usefulness, or other parts"
    return (
        f"epsilon = {budget.epsilon:g} at delta = {budget.delta:g}: no noise in these ranges meets it, the least cost "
        f"found is {least:.4g}; allow smaller scale, low and high or a larger rate"
    )


def _largest_factor(space: SearchSpace, of: Columns, budget: Budget, orders: npt.NDArray[np.int64]) -> Array:
    """[n] the largest factor on u within the budget and the ranges, NaN where there is none."""
    smallest, largest = _factors(space, of)

    def fits(factor: Array) -> npt.NDArray[np.bool_]:
        return np.asarray(costs(of.scaled(factor), budget, orders, _POINTS) <= budget.epsilon)

    possible, whole = fits(smallest), fits(largest)
    low, high = np.log(smallest), np.log(largest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        good = fits(np.exp(middle))
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return np.where(whole, largest, np.where(possible, np.exp(low), np.nan))


def _factors(space: SearchSpace, of: Columns) -> tuple[Array, Array]:
    """[n] by which factors u may be scaled before one of its parameters leaves its range."""
    bounds: list[tuple[Array, Range]] = []
    if "gamma" in space.parts:
        bounds.append((of.scale, space.scale))
    if "exponential" in space.parts:
        bounds.append((1 / of.rate, (1 / space.rate[1], 1 / space.rate[0])))
    if "uniform" in space.parts:
        bounds += [(of.low, space.low), (of.high, space.high)]
    smallest = np.max([low / value for value, (low, _) in bounds], axis=0)
    largest = np.min([high / value for value, (_, high) in bounds], axis=0)
    return np.minimum(smallest, 1.0), np.maximum(largest, 1.0)


def _sobol(space: SearchSpace, num: int, seed: int) -> Array:
    """[num, axes] points of the unit cube; drawn in powers of two, in which the sequence is balanced."""
    points = qmc.Sobol(len(_axes(space)), seed=seed).random_base2(max(0, (num - 1).bit_length()))
    return np.asarray(points[:num])


def _axes(space: SearchSpace) -> list[str]:
    """What the unit cube's axes stand for."""
    weights = [f"{name} weight" for name in space.parts] if len(space.parts) > 1 else []
    own: Mapping[str, list[str]] = {"gamma": ["shape", "scale"], "exponential": ["rate"], "uniform": ["low", "high"]}
    return weights + [axis for name in space.parts for axis in own[name]]


def _decoded(space: SearchSpace, units: Array) -> Columns:
    """Candidates at points [n, axes] of the unit cube: logs of the ranges, weights as shares of what is left."""
    at = dict(zip(_axes(space), units.T, strict=True))
    one = np.ones(len(units))

    def value(name: str, without: float = 0.0) -> Array:
        if name not in at:
            return one * without
        low, high = (math.log(bound) for bound in getattr(space, name))
        return np.asarray(np.exp(low + (high - low) * at[name]))

    weights = np.stack([at.get(f"{name} weight", one * (name in space.parts)) for name in PARTS])
    if len(space.parts) > 1:
        weights = _weights(space, weights)
    high = np.maximum(value("high"), space.low[0]) if "high" in at else 0.0 * one
    return Columns(
        combination=space.combination,
        weights=weights,
        shape=value("shape", 1.0),
        scale=value("scale"),
        rate=value("rate", math.inf),
        low=np.minimum(value("low"), high),
        high=high,
    )


def _weights(space: SearchSpace, units: Array) -> Array:
    """[3, n] weights within their range, those of a mixture summing to one."""
    low, high = space.weight
    active = np.array([name in space.parts for name in PARTS])[:, None]
    if space.combination == "linear":
        return np.asarray(active * (low + (high - low) * units))
    spare, room = 1 - low * active.sum(), (high - low) * active
    # In equal shares to the units, and what would pass a part's room to the others in proportion to theirs.
    shares = active * np.maximum(units, 1e-9)
    filled = np.minimum(spare * shares / shares.sum(axis=0), room)
    left = room - filled
    total = left.sum(axis=0)
    return np.asarray(active * low + filled + left * (spare - filled.sum(axis=0)) / np.where(total > 0, total, 1.0))


def _parameters(space: SearchSpace, of: Columns) -> LmoParameters:
    """The one candidate as a record."""
    gamma, exponential, uniform = (float(weight[0]) for weight in of.weights)
    has = {name: name in space.parts for name in PARTS}
    return LmoParameters(
        combination=space.combination,
        gamma=GammaPart(weight=gamma, shape=float(of.shape[0]), scale=float(of.scale[0])) if has["gamma"] else None,
        exponential=ExponentialPart(weight=exponential, rate=float(of.rate[0])) if has["exponential"] else None,
        uniform=UniformPart(weight=uniform, low=float(of.low[0]), high=float(of.high[0])) if has["uniform"] else None,
    )

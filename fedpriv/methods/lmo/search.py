"""The search for LMO noise: a budget, the scale of noise that meets it, and the least noise within given ranges.

The search is the paper's Algorithm 3.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.stats import qmc

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import INTEGER_ORDERS, check_delta, epsilon_of
from fedpriv.privacy.accounting.events import SubsampledLmo
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import (
    Combination,
    LmoAccounting,
    LmoParameters,
    UniformPart,
    check_one_of,
)
from fedpriv.privacy.accounting.lmo_renyi import amplified, largest_loss, poisson_sampled, sound

# Relative tolerance of the scale.
_SCALE_TOLERANCE = 1e-7

# The scale is searched for within this factor of the given parameters.
_MAX_FACTOR = 1e6

# `usefulness`: how often the noise is at most `tolerance` in size (Mohammady et al. 2020), here as 1 - usefulness.
Objective = Literal["variance", "mean-absolute", "usefulness"]

PartName = Literal["gamma", "exponential", "uniform"]
PARTS: tuple[PartName, ...] = get_args(PartName)
_OWN_AXES = {"gamma": ("shape", "scale"), "exponential": ("rate",), "uniform": ("low", "high")}
_Range = tuple[float, float]

# Points of the coarse Sobol sequence; population and generations of the optimiser. The sound curve takes about 20 times
# as long to compute as the published one.
_COARSE = {"published": 2048, "sound": 256}

_POPULATION, _GENERATIONS = 32, {"published": 60, "sound": 20}
_POINTS, _BISECTIONS = 48, 14


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
        check_one_of("accounting", self.accounting, LmoAccounting)

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
        orders: integers >= 2; fewer are faster and give a larger epsilon.
        points: of the sound curve's grid; fewer are faster and give a larger epsilon.
    """
    q, is_sound = budget.sampling_probability, budget.accounting == "sound"
    noise = {"dimension": budget.dimension if is_sound else 1, "sensitivity": budget.sensitivity}
    every = orders if q == 1 else np.arange(2, orders.max() + 1)
    curve = sound(candidates, every, points=points, **noise)
    curve = budget.steps * (curve if q == 1 else poisson_sampled(curve, orders, q))
    # dp_accounting.rdp.compute_epsilon: Canonne, Kamath and Steinke 2020, Proposition 12.
    conversion = np.log1p(-1 / orders) - np.log(budget.delta * orders) / (orders - 1)
    pure = budget.steps * amplified(largest_loss(candidates, **noise), q) if is_sound else math.inf
    return np.asarray(np.minimum(np.maximum(curve + conversion, 0.0).min(axis=-1), pure))


def fitted(parameters: LmoParameters, budget: Budget, *, largest_factor: float = _MAX_FACTOR) -> LmoParameters:
    """The parameters with u scaled by the largest factor within the budget, for the least noise; InputError if none."""

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


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The space of noises to search: parts, their combination, and ranges from the smallest to the largest value.

    Attributes:
        combination: `mixture` or `linear`.
        weight: of each part, if there is more than one; the weights of a mixture sum to one.

    Raises:
        InputError: a range is empty or not positive, or no weights within their range sum to one.

    Source: Yang et al., Appendix E.1, for the weights; it gives no other ranges, and these are wide.
    """

    combination: Combination = "mixture"
    parts: tuple[PartName, ...] = PARTS
    weight: _Range = (0.1, 0.9)
    shape: _Range = (0.5, 50.0)
    scale: _Range = (1e-5, 10.0)
    rate: _Range = (0.1, 1e5)
    low: _Range = (1e-4, 100.0)
    high: _Range = (1e-4, 100.0)

    def __post_init__(self) -> None:
        check_one_of("combination", self.combination, Combination)
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
class FoundNoise:
    """The noise that a search found.

    Attributes:
        value: of the objective; for `usefulness` the share of noise beyond the tolerance.
        epsilon: its cost, at the budget's delta and by its accounting.
        valid_dimension: the largest dimension for which that is an upper bound.
    """

    parameters: LmoParameters
    value: float
    epsilon: float
    valid_dimension: int
    num_candidates: int


def search(
    space: SearchSpace, budget: Budget, *, objective: Objective = "variance", tolerance: float = 1.0, seed: int = 0
) -> FoundNoise:
    """The best noise found in the space, by the objective, among those within the budget.

    Every candidate is a shape; bisection gives its largest scale of u within the budget and the ranges. A Sobol
    sequence covers the shapes, and differential evolution refines the best of them. Equal arguments give equal
    results.

    Args:
        objective: to be minimised: variance, mean absolute value, or how often the noise exceeds `tolerance`.
        tolerance: in units of the clip norm, > 0, for `usefulness`.

    Raises:
        InputError: no noise of the space meets the budget, the objective is infinite for all noises that do, or an
            argument is out of range.

    Source: Yang et al., Algorithm 3.
    """
    check_one_of("objective", objective, Objective)
    if not 0 < tolerance < math.inf:
        raise InputError(f"tolerance = {tolerance}: must be finite and > 0")
    orders = search_orders(budget)

    def values(units: Array) -> Array:
        """[n] Logs of the objective at [n, axes] shapes, infinite for those that exceed the budget."""
        candidates = _decoded(space, units)
        factor = _largest_factor(space, candidates, budget, orders)
        fits = np.isfinite(factor)
        objectives = _measure(candidates.scaled(np.where(fits, factor, 1.0)), objective, tolerance)
        return np.where(fits & np.isfinite(objectives), np.log(np.maximum(objectives, 1e-300)), np.inf)

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
    # At the scale that the full accounting allows.
    found = _decoded(space, refined.x[None, :])
    shape = found.scaled(_largest_factor(space, found, budget, orders))
    parameters = fitted(_parameters(space, shape), budget, largest_factor=float(_factors(space, shape)[1][0]))
    return FoundNoise(
        parameters=parameters,
        value=float(_measure(Columns.of(parameters), objective, tolerance)),
        epsilon=cost(parameters, budget),
        valid_dimension=budget.dimension if budget.accounting == "sound" else 1,
        num_candidates=num + _POPULATION * refined.nfev,
    )


def _measure(candidates: Columns, objective: Objective, tolerance: float) -> Array:
    """[...] The objective of the candidates, smaller is better; see `search`."""
    if objective == "variance":
        return candidates.variance
    return candidates.mean_absolute if objective == "mean-absolute" else np.exp(candidates.log_mgf(-tolerance))


def _nothing_fits(
    space: SearchSpace, budget: Budget, objective: str, orders: npt.NDArray[np.int64], units: Array
) -> str:
    candidates = _decoded(space, units)
    least = float(costs(candidates.scaled(_factors(space, candidates)[0]), budget, orders, _POINTS).min())
    if least <= budget.epsilon:
        return f"objective = {objective}: infinite for all noise in these ranges; use usefulness, or other parts"
    return (
        f"epsilon = {budget.epsilon:g} at delta = {budget.delta:g}: no noise in these ranges meets it, the least cost "
        f"found is {least:.4g}; allow smaller scale, low and high or a larger rate"
    )


def _largest_factor(space: SearchSpace, candidates: Columns, budget: Budget, orders: npt.NDArray[np.int64]) -> Array:
    """[n] The largest factor on u within the budget and the ranges; NaN if there is none."""
    smallest, largest = _factors(space, candidates)

    def fits(factor: Array) -> npt.NDArray[np.bool_]:
        return np.asarray(costs(candidates.scaled(factor), budget, orders, _POINTS) <= budget.epsilon)

    smallest_fits, largest_fits = fits(smallest), fits(largest)
    low, high = np.log(smallest), np.log(largest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        middle_fits = fits(np.exp(middle))
        low, high = np.where(middle_fits, middle, low), np.where(middle_fits, high, middle)
    return np.where(largest_fits, largest, np.where(smallest_fits, np.exp(low), np.nan))


def _factors(space: SearchSpace, candidates: Columns) -> tuple[Array, Array]:
    """[n] The smallest and largest factor on u that keep all of its parameters in their ranges."""
    bounds: list[tuple[Array, _Range]] = []
    if "gamma" in space.parts:
        bounds.append((candidates.scale, space.scale))
    if "exponential" in space.parts:
        bounds.append((1 / candidates.rate, (1 / space.rate[1], 1 / space.rate[0])))
    if "uniform" in space.parts:
        bounds += [(candidates.low, space.low), (candidates.high, space.high)]
    smallest = np.max([low / value for value, (low, _) in bounds], axis=0)
    largest = np.min([high / value for value, (_, high) in bounds], axis=0)
    return np.minimum(smallest, 1.0), np.maximum(largest, 1.0)


def sobol_candidates(space: SearchSpace, num: int, *, seed: int) -> Columns:
    """`num` candidates spread evenly over the space by a Sobol sequence with this seed."""
    return _decoded(space, _sobol(space, num, seed))


def _sobol(space: SearchSpace, num: int, seed: int) -> Array:
    """[num, axes] Points of the unit cube; drawn in powers of two, for which the sequence is balanced."""
    points = qmc.Sobol(len(_axes(space)), seed=seed).random_base2(max(0, (num - 1).bit_length()))
    return np.asarray(points[:num])


def _axes(space: SearchSpace) -> list[str]:
    """The meaning of the unit cube's axes."""
    weights = [f"{name} weight" for name in space.parts] if len(space.parts) > 1 else []
    return weights + [axis for name in space.parts for axis in _OWN_AXES[name]]


def _decoded(space: SearchSpace, units: Array) -> Columns:
    """Candidates at points [n, axes] of the unit cube, on a log scale within the ranges; see `_weights`."""
    unit_by_axis = dict(zip(_axes(space), units.T, strict=True))
    one = np.ones(len(units))

    def value(name: str, default: float = 0.0) -> Array:
        if name not in unit_by_axis:
            return one * default
        low, high = (math.log(bound) for bound in getattr(space, name))
        return np.asarray(np.exp(low + (high - low) * unit_by_axis[name]))

    weights = np.stack([unit_by_axis.get(f"{name} weight", one * (name in space.parts)) for name in PARTS])
    if len(space.parts) > 1:
        weights = _weights(space, weights)
    high = np.maximum(value("high"), space.low[0]) if "high" in unit_by_axis else 0.0 * one
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
    """[3, n] Weights within their range; those of a mixture sum to one."""
    low, high = space.weight
    active = np.array([name in space.parts for name in PARTS])[:, None]
    if space.combination == "linear":
        return np.asarray(active * (low + (high - low) * units))
    excess, max_increase = 1 - low * active.sum(), (high - low) * active
    # Divide the excess over the least weights in proportion to the units, cap each share at the part's range, and
    # distribute the remainder in proportion to what each part can still take.
    shares = active * np.maximum(units, 1e-9)
    increase = np.minimum(excess * shares / shares.sum(axis=0), max_increase)
    slack = max_increase - increase
    total = slack.sum(axis=0)
    remainder = excess - increase.sum(axis=0)
    return np.asarray(active * low + increase + slack * remainder / np.where(total > 0, total, 1.0))


def _parameters(space: SearchSpace, candidates: Columns) -> LmoParameters:
    """The single candidate as a record."""
    weights = {name: {"weight": float(weight[0])} for name, weight in zip(PARTS, candidates.weights, strict=True)}
    axes = {name: {axis: float(getattr(candidates, axis)[0]) for axis in _OWN_AXES[name]} for name in space.parts}
    parts = {name: weights[name] | own for name, own in axes.items()}
    return LmoParameters.from_dict({"combination": space.combination} | parts)

"""The search for LMO noise: the least noise within given ranges that a budget allows (Algorithm 3).

The paper's Algorithm 2 asks how closely the noises of such a space approximate arbitrary noise on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy import optimize, special
from scipy.spatial.distance import cdist
from scipy.stats import qmc

from fedpriv.errors import InputError
from fedpriv.methods.lmo._budget import Budget, cost, costs, fitted, search_orders
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import (
    Combination,
    ExponentialPart,
    GammaPart,
    LmoParameters,
    UniformPart,
)

# `usefulness`: how often the noise is at most `tolerance` in size (Mohammady et al. 2020), here as 1 - usefulness.
Objective = Literal["variance", "mean-absolute", "usefulness"]
PartName = Literal["gamma", "exponential", "uniform"]
PARTS: tuple[PartName, ...] = get_args(PartName)

_Range = tuple[float, float]

# Points of the coarse Sobol sequence; population and generations of the optimiser. The sound curve takes about 20 times
# as long to compute as the published one.
_COARSE = {"published": 2048, "sound": 256}
_POPULATION, _GENERATIONS = 32, {"published": 60, "sound": 20}
_POINTS, _BISECTIONS = 48, 14


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The space of noises to search: parts, their combination, and ranges from the smallest to the largest value.

    Attributes:
        combination: `mixture` or `linear`.
        parts: which distributions are used.
        weight: of each part, if there is more than one; the weights of a mixture sum to one.
        shape, scale, rate, low, high: as in `LmoParameters`.

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
class FoundNoise:
    """The noise that a search found.

    Attributes:
        parameters: of the noise.
        value: of the objective; for `usefulness` the share of noise beyond the tolerance.
        epsilon: its cost, at the budget's delta and by its accounting.
        valid_dimension: the largest dimension for which that is an upper bound.
        num_candidates: number of shapes tried.
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
        space: parts and ranges.
        budget: of one step or of a whole run.
        objective: to be minimised: variance, mean absolute value, or how often the noise exceeds `tolerance`.
        tolerance: in units of the clip norm, > 0, for `usefulness`.
        seed: of both stages.

    Raises:
        InputError: no noise of the space meets the budget, the objective is infinite for all noises that do, or an
            argument is out of range.

    Source: Yang et al., Algorithm 3.
    """
    if objective not in get_args(Objective):
        raise InputError(f"objective = {objective!r}: must be one of {', '.join(get_args(Objective))}")
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
        valid_dimension=budget.valid_dimension,
        num_candidates=num + _POPULATION * refined.nfev,
    )


def _sobol_candidates(space: SearchSpace, num: int, *, seed: int) -> Columns:
    """`num` candidates spread evenly over the space by a Sobol sequence with this seed."""
    return _decoded(space, _sobol(space, num, seed))


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


def _sobol(space: SearchSpace, num: int, seed: int) -> Array:
    """[num, axes] Points of the unit cube; drawn in powers of two, for which the sequence is balanced."""
    points = qmc.Sobol(len(_axes(space)), seed=seed).random_base2(max(0, (num - 1).bit_length()))
    return np.asarray(points[:num])


def _axes(space: SearchSpace) -> list[str]:
    """The meaning of the unit cube's axes."""
    weights = [f"{name} weight" for name in space.parts] if len(space.parts) > 1 else []
    own: Mapping[str, list[str]] = {"gamma": ["shape", "scale"], "exponential": ["rate"], "uniform": ["low", "high"]}
    return weights + [axis for name in space.parts for axis in own[name]]


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
    weights = dict(zip(PARTS, (float(weight[0]) for weight in candidates.weights), strict=True))
    shape, scale, rate = float(candidates.shape[0]), float(candidates.scale[0]), float(candidates.rate[0])
    low, high = float(candidates.low[0]), float(candidates.high[0])
    has = {name: name in space.parts for name in PARTS}
    return LmoParameters(
        combination=space.combination,
        gamma=GammaPart(weight=weights["gamma"], shape=shape, scale=scale) if has["gamma"] else None,
        exponential=ExponentialPart(weight=weights["exponential"], rate=rate) if has["exponential"] else None,
        uniform=UniformPart(weight=weights["uniform"], low=low, high=high) if has["uniform"] else None,
    )


def coverage(
    space: SearchSpace,
    *,
    quantisations: Sequence[float] = (0.1, 0.01, 0.001),
    domain_sizes: Sequence[int] = (11, 51, 101),
    num_samples: int = 256,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """For every quantisation and domain size, the distance of simulated noise from the nearest LMO noise.

    A simulated noise is the histogram of 1 / quantisation random draws over equal cells. LMO noise with random
    parameters is discretised to the same cells, which cover [-1, 1] clip norms; its mass outside is dropped and the
    rest normalised. `kl` (divergence of the simulated noise from LMO noise, nats), `l2` and `emd` (earth mover's
    distance, in shares of the domain) are means over simulated noises of the distance to the nearest LMO noise;
    `..._worst` are the largest.

    Args:
        space: of the LMO noise.
        quantisations: in (0, 1].
        domain_sizes: numbers of cells, >= 2.
        num_samples: noises of each kind, >= 1.
        seed: of both kinds.

    Raises:
        InputError: an argument is out of range.

    Source: Yang et al., Algorithm 2 and Figure 5. It averages over pairs; the claim there is about the nearest, and
    its step C.1.2, which fits parameters to each simulated noise, is the choice of the nearest here.
    """
    for quantisation in quantisations:
        if not 0 < quantisation <= 1:
            raise InputError(f"quantisation = {quantisation}: must lie in (0, 1]")
    for size in domain_sizes:
        if size < 2:
            raise InputError(f"domain_size = {size}: must be >= 2")
    if num_samples < 1:
        raise InputError(f"num_samples = {num_samples}: must be >= 1")
    generator = np.random.default_rng(seed)
    noises = _sobol_candidates(space, num_samples, seed=seed)
    records = []
    for quantisation in quantisations:
        throws = round(1 / quantisation)
        for size in domain_sizes:
            simulated = generator.multinomial(throws, np.full(size, 1 / size), size=num_samples) / throws
            records.append(
                {"quantisation": quantisation, "domain_size": size, "num_samples": num_samples}
                | _nearest_distances(simulated, _cell_probabilities(noises, size))
            )
    return records


def _cell_probabilities(candidates: Columns, num_cells: int) -> Array:
    """[n, cells] Probability of equal cells of [-1, 1] under each noise, normalised to sum to one."""
    edges = np.linspace(-1, 1, num_cells + 1)
    tails = np.exp(candidates.with_axes(1).log_mgf(-np.abs(edges))) / 2
    shares = np.diff(np.where(edges < 0, tails, 1 - tails))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def _nearest_distances(simulated: Array, noises: Array) -> dict[str, float]:
    """Mean and largest distance of rows [m, cells] to the nearest of rows [n, cells]; each row is a distribution."""
    floor = np.maximum(noises, np.finfo(float).tiny)
    kl = special.xlogy(simulated, simulated).sum(axis=1)[:, None] - simulated @ np.log(floor).T
    emd = cdist(simulated.cumsum(axis=1), noises.cumsum(axis=1), "cityblock") / simulated.shape[1]
    summary: dict[str, float] = {}
    for name, distances in (("kl", kl), ("l2", cdist(simulated, noises)), ("emd", emd)):
        nearest = distances.min(axis=1)
        summary |= {name: float(nearest.mean()), f"{name}_worst": float(nearest.max())}
    return summary

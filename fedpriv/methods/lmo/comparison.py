"""LMO noise compared with Gaussian and Laplace noise of the same cost, and plots of it (Figures 6 and 7).

The paper's Algorithm 2 asks how closely LMO noise approximates arbitrary noise on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special, stats
from scipy.spatial.distance import cdist

from fedpriv.errors import InputError
from fedpriv.methods.lmo.search import (
    PARTS,
    Budget,
    Objective,
    SearchSpace,
    cost,
    fitted,
    laplace,
    search,
    sobol_candidates,
)
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import Combination, LmoParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure


EPSILONS = (0.3, 0.7, 2.0, 3.0)

# Average reduction of the noise's absolute value against Gaussian noise: Yang et al., Figure 6.
_PAPER_REDUCTION = {0.3: 0.9513, 0.7: 0.9219, 2.0: 0.8771, 3.0: 0.8731}

Record = dict[str, Any]

# Laplace noise is drawn wide and pale, so that it stays visible under LMO noise where the two coincide.
_STYLES: dict[str, Any] = {"gaussian": {}, "laplace": {"linewidth": 6, "alpha": 0.35}, "lmo": {}}

_SHARES = np.linspace(0.002, 0.998, 400)


def compare(
    budget: Budget,
    *,
    epsilons: Sequence[float] = EPSILONS,
    dimensions: Sequence[int] = (1,),
    combination: Combination = "linear",
    objective: Objective = "usefulness",
    ablations: bool = False,
    seed: int = 0,
) -> list[Record]:
    """A record for every epsilon, dimension and kind of noise; all noises of one epsilon and dimension cost the same.

    Noise is `gaussian`, `laplace` or `lmo`. The last is searched under the scalar curve; in larger dimensions it has
    the same shape at the scale that the sound curve allows there. All costs are computed by rdp. The columns are
    `variance`, `entropy` (nats), `mean_absolute` and `median_absolute` in units of the clip norm, and the reduction of
    the last two against the Gaussian. `epsilon_at_dimension` is the cost of the scalar noise in the largest dimension.

    Args:
        budget: delta, steps, sampling and sensitivity; its epsilon and dimension are not used.
        epsilons: costs at which noises are compared, > 0.
        dimensions: of the noised vectors; 1 is a scalar, as in the paper.
        objective: of the search; the tolerance of `usefulness` is the sensitivity.
        ablations: search every choice of one, two and three parts instead of only all three.
    """
    some = [choice for num in range(1, len(PARTS) + 1) for choice in combinations(PARTS, num)]
    choices = some if ablations else [PARTS]
    records: list[Record] = []
    for epsilon in epsilons:
        scalar = replace(budget, epsilon=epsilon, dimension=1, accounting="sound")
        shapes = {}
        for parts in choices:
            space = SearchSpace(combination=combination, parts=parts)
            found = search(space, scalar, objective=objective, tolerance=budget.sensitivity, seed=seed)
            shapes["+".join(parts)] = found.parameters
        for dimension in dimensions:
            records += _at_dimension(replace(scalar, dimension=dimension), shapes, max(dimensions))
    return records


def reductions(records: Sequence[Record], sensitivity: float = 1.0) -> list[Record]:
    """The reduction of mean absolute noise on a scalar, of `compare` at all epsilons, beside what the paper reports.

    For every epsilon: `paper`, None if it has no figure; `laplace` and `lmo` (all three parts) of the same cost;
    `staircase`, the largest reduction of any noise that is epsilon-DP at delta 0.
    """
    rows = []
    for epsilon in dict.fromkeys(record["epsilon"] for record in records):
        scalar = [record for record in records if (record["epsilon"], record["dimension"]) == (epsilon, 1)]
        noises = {r["noise"]: r for r in scalar if r["noise"] != "lmo" or r["parts"] == "+".join(PARTS)}
        means = {name: noises[name]["mean_absolute"] for name in ("laplace", "lmo")}
        means["staircase"] = sensitivity * _least_mean_absolute(epsilon)
        row: Record = {"epsilon": epsilon, "paper": _PAPER_REDUCTION.get(epsilon)}
        rows.append(row | {name: 1 - mean / noises["gaussian"]["mean_absolute"] for name, mean in means.items()})
    return rows


def _least_mean_absolute(epsilon: float) -> float:
    """The least mean absolute value of any epsilon-DP noise on a scalar of sensitivity 1: the staircase mechanism's.

    Source: Geng and Viswanath 2014, Theorem 3: e^(epsilon / 2) / (e^epsilon - 1).
    """
    return math.exp(epsilon / 2) / math.expm1(epsilon)


def _at_dimension(budget: Budget, shapes: dict[str, LmoParameters], largest: int) -> Iterator[Record]:
    multiplier = noise_multiplier_for(
        budget.epsilon,
        budget.delta,
        sampling_probability=budget.sampling_probability,
        steps=budget.steps,
        scale=1 / budget.sensitivity,
        accountant="rdp",
    )
    gaussian = _gaussian_sizes(multiplier)
    common = {"epsilon": budget.epsilon, "delta": budget.delta, "dimension": budget.dimension}
    yield common | {"noise": "gaussian", "parts": None, **gaussian, "noise_multiplier": multiplier}
    noises = {("laplace", ""): laplace(budget)}
    for parts, shape in shapes.items():
        noises["lmo", parts] = shape if budget.dimension == 1 else fitted(shape, budget)
    for (name, parts), parameters in noises.items():
        record = common | {"noise": name, "parts": parts or None, **sizes(parameters)}
        for size in ("mean_absolute", "median_absolute"):
            record[f"{size}_reduction"] = 1 - record[size] / gaussian[size]
        if budget.dimension == 1 and largest > 1:
            record["epsilon_at_dimension"] = cost(parameters, replace(budget, dimension=largest))
        yield record | {"parameters": parameters.to_dict()}


def sizes(parameters: LmoParameters) -> Record:
    """Variance, entropy, and mean and median absolute value of LMO noise, in units of the clip norm; may be inf."""
    candidates = Columns.of(parameters)
    return {
        "variance": float(candidates.variance),
        "entropy": candidates.entropy,
        "mean_absolute": float(candidates.mean_absolute),
        "median_absolute": float(candidates.quantile(0.75)),
    }


def _gaussian_sizes(stddev: float) -> Record:
    """The same for Gaussian noise."""
    return {
        "variance": stddev**2,
        "entropy": 0.5 * math.log(2 * math.pi * math.e * stddev**2),
        "mean_absolute": math.sqrt(2 / math.pi) * stddev,
        "median_absolute": float(stats.norm.ppf(0.75)) * stddev,
    }


def write_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the plots of `compare`'s records and return their files: sizes (Figure 6), variance and entropy (7)."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"lmo-amplitude.png": _amplitudes(records), "lmo-variance-entropy.png": _against_epsilon(records)}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
    return [folder / name for name in figures]


def _figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure  # deferred: a search draws nothing

    return Figure(figsize=(width, height), layout="constrained")


def _amplitudes(records: Sequence[Record]) -> Figure:
    """Quantiles of the absolute value of scalar noise, one panel for each epsilon."""
    scalar = [record for record in records if record["dimension"] == min(r["dimension"] for r in records)]
    epsilons = sorted({record["epsilon"] for record in scalar})
    figure = _figure(3.2 * len(epsilons), 3.2)
    for index, epsilon in enumerate(epsilons):
        axes = figure.add_subplot(1, len(epsilons), index + 1)
        for record in _main(scalar, epsilon):
            axes.plot(_SHARES, _size_quantiles(record), label=record["noise"], **_STYLES[record["noise"]])
        axes.set(title=f"epsilon {epsilon:g}", yscale="log", xlabel="share of the noise")
        axes.set_ylabel("size at most, clip norms" if index == 0 else "")
        axes.legend(frameon=False, fontsize=8)
    return figure


def _against_epsilon(records: Sequence[Record]) -> Figure:
    """Variance and entropy over epsilon, in every dimension."""
    figure = _figure(9, 3.4)
    dimensions = sorted({record["dimension"] for record in records})
    epsilons = sorted({record["epsilon"] for record in records})
    for index, column in enumerate(("variance", "entropy")):
        axes = figure.add_subplot(1, 2, index + 1)
        for dimension, style in zip(dimensions, ("-", "--", ":"), strict=False):
            selected = [record for record in records if record["dimension"] == dimension]
            lines = zip(*(_main(selected, epsilon) for epsilon in epsilons), strict=True)
            for colour, line in enumerate(lines):
                values = [record[column] for record in line]
                label = f"{line[0]['noise']}, dimension {dimension}"
                options = {"color": f"C{colour}", "label": label} | _STYLES[line[0]["noise"]]
                axes.plot(epsilons, values, style, marker="o", ms=3, **options)
        axes.set(xlabel="epsilon", ylabel=column, yscale="log" if column == "variance" else "linear")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _main(records: Sequence[Record], epsilon: float) -> list[Record]:
    """Gaussian noise, Laplace noise, and the LMO noise with the most parts, in this order."""
    selected = [record for record in records if record["epsilon"] == epsilon]
    lmo = max((r for r in selected if r["noise"] == "lmo"), key=lambda r: r["parts"].count("+"))
    return [next(r for r in selected if r["noise"] == name) for name in ("gaussian", "laplace")] + [lmo]


def _size_quantiles(record: Record) -> np.ndarray[Any, np.dtype[np.float64]]:
    if record["noise"] == "gaussian":
        return np.asarray(record["noise_multiplier"] * stats.norm.ppf((1 + _SHARES) / 2))
    return Columns.of(LmoParameters.from_dict(record["parameters"])).quantile((1 + _SHARES) / 2)


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
        quantisations: in (0, 1].
        domain_sizes: numbers of cells, >= 2.
        num_samples: noises of each kind, >= 1.

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
    noises = sobol_candidates(space, num_samples, seed=seed)
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

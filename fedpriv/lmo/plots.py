"""Plots of a comparison of noises, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from fedpriv.accounting.lmo.distribution import quantile
from fedpriv.accounting.lmo.parameters import from_dict

Record = dict[str, Any]

# Laplace noise is drawn wide and pale, so that it stays visible under LMO noise where the two coincide.
_STYLES: dict[str, Any] = {"gaussian": {}, "laplace": {"linewidth": 6, "alpha": 0.35}, "lmo": {}}

_SHARES = np.linspace(0.002, 0.998, 400)


def write_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the plots and return their files: noise sizes (Figure 6), variance and entropy (7), and any ablations.

    Args:
        records: from `comparison.compare`; with ablations they also give Figures 10 to 15.
        folder: created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"lmo-amplitude.png": _amplitudes(records), "lmo-variance-entropy.png": _against_epsilon(records)}
    if len({record["parts"] for record in records if record["noise"] == "lmo"}) > 1:
        figures["lmo-ablations.png"] = _ablations(records)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
    return [folder / name for name in figures]


def _amplitudes(records: Sequence[Record]) -> Figure:
    """Quantiles of the absolute value of scalar noise, one panel for each epsilon."""
    scalar = [record for record in records if record["dimension"] == min(r["dimension"] for r in records)]
    epsilons = sorted({record["epsilon"] for record in scalar})
    figure = Figure(figsize=(3.2 * len(epsilons), 3.2), layout="constrained")
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
    figure = Figure(figsize=(9, 3.4), layout="constrained")
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


def _ablations(records: Sequence[Record]) -> Figure:
    """Median absolute value of scalar noise by the parts of u, one group of bars for each epsilon."""
    scalar = [record for record in records if record["dimension"] == 1 and record["noise"] == "lmo"]
    epsilons = sorted({record["epsilon"] for record in scalar})
    names = list(dict.fromkeys(record["parts"] for record in scalar))
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes: Axes = figure.add_subplot()
    for index, name in enumerate(names):
        heights = [r["median_absolute"] for e in epsilons for r in scalar if (r["epsilon"], r["parts"]) == (e, name)]
        axes.bar(np.arange(len(epsilons)) + 0.8 * index / len(names), heights, 0.8 / len(names), label=name)
    axes.set_xticks(np.arange(len(epsilons)) + 0.35, [f"epsilon {epsilon:g}" for epsilon in epsilons])
    axes.set(ylabel="median size, clip norms", yscale="log")
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
    return quantile(from_dict(record["parameters"]), (1 + _SHARES) / 2)

"""A sweep's plots: pure functions from its tidy table to figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fedpriv.config import Fact, RunConfig
from fedpriv.runs.figures import format_bytes
from simulations.sweeps.plan import Metric, Sweep, metric_of
from simulations.sweeps.result import settings

_INK, _GRID = "#1d2126", "#d5d9de"
_COLOURS = ("#00589c", "#b84300", "#007557", "#a03d80", "#8a6000", "#2379ad", "#5a5a5a", "#6f6a00")
_MARKERS = "os^DvPX"  # fewer than colours, so that their combinations repeat late


def write(frame: pd.DataFrame, sweep: Sweep, out: Path) -> list[Path]:
    """Write the plots of a sweep as PNG and SVG, and return the paths of the PNGs."""
    paths = []
    for name, figure in figures_of(frame, sweep).items():
        for suffix in (".svg", ".png"):
            figure.savefig(out / f"{name}{suffix}", dpi=160, bbox_inches="tight")
        paths.append(out / f"{name}.png")
    return paths


def figures_of(frame: pd.DataFrame, sweep: Sweep) -> dict[str, Figure]:
    """Draw the plots that suit the varied keys, by name; runs that were not tested are in none of them."""
    metric = metric_of(sweep)
    done = frame[frame["status"] == "done"]
    done = done[done[metric.name].notna()] if len(done) else done
    if done.empty:
        return {}
    figures: dict[str, Figure] = {}
    if any(key in sweep.keys for key in RunConfig.keys_with(Fact.PRIVACY)):
        figures[f"{metric.name}-against-epsilon"] = _metric_against(
            done, sweep, "epsilon_local_max", f"local epsilon at delta {_range(done['delta_max'])}"
        )
    for key, label in (("rank", "LoRA rank"), ("num_clients", "clients"), ("delta", "delta")):
        if key in sweep.keys:
            figures[f"{metric.name}-against-{key}"] = _metric_against(done, sweep, key, label, log=True)
    if done["bytes_up"].nunique() > 1:
        figures[f"bytes-against-{metric.name}"] = _bytes_against_metric(done, sweep)
    return figures


def _metric_against(done: pd.DataFrame, sweep: Sweep, x: str, label: str, *, log: bool = False) -> Figure:
    """The metric's mean with the seeds' standard deviation over a quantity, a line for each of the other settings.

    Runs that differ in their seed alone are one point, at their mean x.
    """
    metric = metric_of(sweep)
    figure, axes = _axes(sweep.title, label, metric)
    done, keys = settings(done, sweep)
    private = (*RunConfig.keys_with(Fact.PRIVACY), "privacy")
    others = [key for key in keys if key != x and not (x == "epsilon_local_max" and key in private)]
    positions = _position_of_infinity(done[x].astype(float))
    for index, (name, line) in enumerate(_lines(done, others)):
        points = line.assign(position=line[x].astype(float).fillna(math.inf).map(lambda v: positions.get(v, v)))
        points = points.groupby(keys or [x], dropna=False).agg(
            x=("position", "mean"), mean=(metric.name, "mean"), spread=(metric.name, "std")
        )
        points = points.sort_values("x")
        axes.errorbar(
            points["x"],
            points["mean"],
            yerr=points["spread"].fillna(0.0),
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=1.4,
            capsize=3,
            label=name or "with DP",
        )
    _draw_references(axes, done, metric)
    if log:
        axes.set_xscale("log")
        values = sorted(done[x].unique())
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    elif math.inf in positions:
        finite = sorted({round(value, 1) for value in done[x].astype(float).dropna() if math.isfinite(value)})
        axes.set_xticks([*finite, positions[math.inf]], [*(f"{value:g}" for value in finite), "no noise"])
    _legend(axes)
    return figure


def _position_of_infinity(values: pd.Series) -> dict[float, float]:
    """{infinity: where it is drawn}, to the right of all finite values; empty if all are finite."""
    finite = values[values.notna() & (values != math.inf)]
    return {} if len(finite) == len(values) else {math.inf: 1.25 * float(finite.max()) if len(finite) else 1.0}


def _bytes_against_metric(done: pd.DataFrame, sweep: Sweep) -> Figure:
    """The metric's mean with the seeds' standard deviation over what all clients sent and received, by setting."""
    metric = metric_of(sweep)
    figure, axes = _axes(sweep.title, "bytes sent and received by all clients", metric)
    done, keys = settings(done.assign(bytes=done["bytes_up"] + done["bytes_down"]), sweep)
    for index, (name, line) in enumerate(_lines(done, keys)):
        axes.errorbar(
            [line["bytes"].mean()],
            [line[metric.name].mean()],
            yerr=[line[metric.name].std() if len(line) > 1 else 0.0],
            linestyle="",
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            capsize=3,
            label=name or "with DP",
        )
    if done["bytes"].max() > 5 * done["bytes"].min():
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_formatter(format_bytes))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _legend(axes)
    return figure


def _legend(axes: Axes) -> None:
    """Place a short legend within the axes, and a long one to their right, where it hides nothing."""
    if len(axes.get_legend_handles_labels()[0]) > 5:
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.legend(frameon=False, fontsize=8)


def _lines(done: pd.DataFrame, keys: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """The runs of each combination of the keys' values, with what to call it."""
    if not keys:
        return [("", done)]
    return [
        (", ".join(_named(key, value) for key, value in zip(keys, values, strict=True)), line)
        for values, line in done.groupby(keys, dropna=False)
    ]


def _named(key: str, value: object) -> str:
    """The value alone for aggregation rules and privacy, else with its key."""
    if key in ("aggregation", "privacy"):
        return str(value)
    return f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"


def _draw_references(axes: Axes, done: pd.DataFrame, metric: Metric) -> None:
    """Draw what runs are compared with, each the mean of what was measured; one far from the runs is only named.

    Chance stands for the largest class where that is not known.
    """
    low, high = float(done[metric.name].min()), float(done[metric.name].max())
    margin = 2 * max(high - low, metric.far)
    known = [column for column, *_ in metric.references if done.get(column, pd.Series(dtype=float)).notna().any()]
    for column, label, style in metric.references:
        if column not in known or (column == "chance_accuracy" and "majority_accuracy" in known):
            continue
        value = float(done[column].dropna().astype(float).mean())
        if low - margin <= value <= high + margin:
            axes.axhline(value, color=_INK, linestyle=style, linewidth=1, label=label)
        else:
            axes.plot([], [], " ", label=f"{label}: {metric.text(value)}")


def _axes(title: str, label: str, metric: Metric) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.8))
    axes = figure.add_subplot()
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.set_xlabel(label, color=_INK)
    axes.set_ylabel(metric.label, color=_INK)
    axes.yaxis.set_major_formatter(_formatter(metric.text))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _formatter(format_value: Callable[[float], str]) -> FuncFormatter:
    return FuncFormatter(lambda value, _: format_value(value))


def _range(values: pd.Series) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"

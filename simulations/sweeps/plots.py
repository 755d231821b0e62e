"""A sweep's plots: pure functions from its tidy table to figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fedpriv.reports.tables import format_bytes
from simulations.sweeps.plan import Sweep

_INK, _GRID = "#1d2126", "#d5d9de"
_COLOURS = ("#00589c", "#b84300", "#007557", "#a03d80", "#8a6000", "#2379ad", "#5a5a5a", "#6f6a00")
_MARKERS = "os^DvPXp"

# Each of these is a target that the finished run's epsilon stands for.
_PRIVACY_KEYS = ("target_epsilon", "noise_multiplier", "budget_epsilon")


def write(frame: pd.DataFrame, sweep: Sweep, out: Path) -> list[Path]:
    """Draw what makes sense for what varies, as PNG and SVG, and return the PNGs."""
    done = frame[frame["status"] == "done"]
    if done.empty:
        return []
    figures: dict[str, Figure] = {}
    if any(key in sweep.keys for key in _PRIVACY_KEYS):
        figures["accuracy-against-epsilon"] = accuracy_against(
            done, sweep, "epsilon_local_max", f"local epsilon at delta {_range(done['delta_max'])}"
        )
    for key, label in (("rank", "LoRA rank"), ("num_clients", "clients"), ("delta", "delta")):
        if key in sweep.keys:
            figures[f"accuracy-against-{key}"] = accuracy_against(done, sweep, key, label, log=True)
    if done["bytes_up"].nunique() > 1:
        figures["bytes-against-accuracy"] = bytes_against_accuracy(done, sweep)
    paths = []
    for name, figure in figures.items():
        for suffix in (".svg", ".png"):
            figure.savefig(out / f"{name}{suffix}", dpi=160, bbox_inches="tight")
        paths.append(out / f"{name}.png")
    return paths


def accuracy_against(done: pd.DataFrame, sweep: Sweep, x: str, label: str, *, log: bool = False) -> Figure:
    """Mean accuracy with the seeds' standard deviation over a quantity, a line for each of the other settings.

    Runs that differ in their seed alone are one point, at their mean x.
    """
    figure, axes = _axes(sweep.title, label)
    keys = [key for key in sweep.keys if key != "seed"]
    others = [key for key in keys if key != x and not (x == "epsilon_local_max" and key in _PRIVACY_KEYS)]
    for place, (name, line) in enumerate(_lines(done, others)):
        points = line.groupby(keys or [x], dropna=False).agg(
            x=(x, "mean"), mean=("accuracy", "mean"), spread=("accuracy", "std")
        )
        points = points.sort_values("x")
        axes.errorbar(
            points["x"],
            points["mean"],
            yerr=points["spread"].fillna(0.0),
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            linewidth=1.4,
            capsize=3,
            label=name or "with DP",
        )
    _draw_references(axes, done)
    if log:
        axes.set_xscale("log")
        values = sorted(done[x].unique())
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return figure


def bytes_against_accuracy(done: pd.DataFrame, sweep: Sweep) -> Figure:
    """Accuracy of every run over what all its clients sent."""
    figure, axes = _axes(sweep.title, "bytes sent by all clients")
    for place, (name, line) in enumerate(_lines(done, [key for key in sweep.keys if key != "seed"])):
        axes.plot(
            line["bytes_up"],
            line["accuracy"],
            linestyle="",
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            label=name or "with DP",
        )
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(_formatter(format_bytes))
    axes.legend(frameon=False, fontsize=8)
    return figure


def _lines(done: pd.DataFrame, keys: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """The runs of each combination of the keys' values, with what to call it."""
    if not keys:
        return [("", done)]
    return [
        (", ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True)), line)
        for values, line in done.groupby(keys, dropna=False)
    ]


def _draw_references(axes: Axes, done: pd.DataFrame) -> None:
    """The mean accuracy without noise, where it was run, and chance."""
    for column, label, style in (
        ("accuracy_non_private", "z = 0, clipping kept", "--"),
        ("chance_accuracy", "chance", ":"),
    ):
        values = done[column].dropna()
        if len(values):
            axes.axhline(float(values.astype(float).mean()), color=_INK, linestyle=style, linewidth=1, label=label)


def _axes(title: str, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.8))
    axes = figure.add_subplot()
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.set_xlabel(label, color=_INK)
    axes.set_ylabel("test accuracy", color=_INK)
    axes.yaxis.set_major_formatter(_formatter(lambda value: f"{100 * value:.0f} %"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _formatter(format_value: Callable[[float], str]) -> FuncFormatter:
    return FuncFormatter(lambda value, _: format_value(value))


def _range(values: pd.Series) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"

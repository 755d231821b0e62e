"""A run's plots: pure functions from a table of lines over rounds (`series.py`) to an inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedpriv.runs.show.series import merge_equal
from fedpriv.runs.show.svg import GRID, INK, SERIES, to_svg
from fedpriv.runs.show.tables import INFINITY, format_bound, format_bytes, format_number, format_percent

# In points: small enough that a telephone shows the text at its size, large enough for half a column.
WIDTH, HEIGHT = 340.0, 215.0
LEFT, BOTTOM, TOP = 46.0, 34.0, 8.0
FONT_SIZE, LABEL_GAP, CHARACTER = 9.0, 11.5, 5.2
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES = ("-", (0, (5, 2)), "-", (0, (5, 2)), "-", (0, (5, 2)), "-", (0, (5, 2)))

Format = Callable[[float], str]
Label = tuple[str, float, float, str]  # text, x, y, colour


def accuracy_plot(frame: pd.DataFrame, *, references: Mapping[str, float], name: str = "accuracy") -> str:
    """Test accuracy over rounds, each run a line, and what it has to beat as dotted ones, by name."""
    figure, axes = _axes([*_labels_of(frame), *references], _percent_tick)
    labels = _draw_lines(axes, frame)
    labels += _draw_references(axes, references, float(frame.index.max()))
    axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(1.0, axes.get_ylim()[1]))
    _draw_labels(axes, labels)
    return to_svg(figure, name=name, description=describe(frame, "Test accuracy", format_percent))


def evaluation_plot(frame: pd.DataFrame, *, references: Mapping[str, float], name: str = "evaluation") -> str:
    """One accuracy with its interval as an error bar, and what it has to beat as dotted lines.

    Args:
        frame: from `series.evaluated`.
        references: {name: accuracy}.
        name: a word that is unique on the page.
    """
    (round_,), (label, *_) = frame.index, frame.columns
    accuracy, low, high = frame.iloc[0]
    figure, axes = _axes([label, *references], _percent_tick)
    middle = (low + high) / 2 if math.isnan(accuracy) else accuracy
    ends = [[middle - low], [high - middle]]
    axes.errorbar([round_], [middle], yerr=ends, fmt="none", ecolor=SERIES[0], capsize=6, elinewidth=1.6)
    axes.plot([round_], [accuracy], color=SERIES[0], marker=MARKERS[0], markersize=5)
    axes.set_xticks([round_])
    axes.set_xlim(round_ - 1, round_ + 1)
    axes.set_ylim(0.0, 1.0)
    labels = [(label, float(round_), middle, SERIES[0]), *_draw_references(axes, references, float(round_) + 1)]
    _draw_labels(axes, labels)
    interval = f"95% interval {format_percent(low)} to {format_percent(high)}"
    description = f"Accuracy after round {round_:g}: {format_percent(accuracy)}, {interval}."
    return to_svg(figure, name=name, description=description)


def loss_plot(frame: pd.DataFrame, *, title: str = "Test loss", name: str = "loss") -> str:
    """Test loss, or another quantity of that name, over rounds, each run a line."""
    figure, axes = _axes(_labels_of(frame), format_number)
    _draw_labels(axes, _draw_lines(axes, frame))
    return to_svg(figure, name=name, description=describe(frame, title, format_number))


def epsilon_plot(frame: pd.DataFrame, *, title: str, name: str, limits: Mapping[str, float] | None = None) -> str:
    """Cumulative epsilon over rounds: a line per client, or a band from the 10% to the 90% quantile.

    Args:
        frame: from `series.epsilon`; infinite values are named, not drawn.
        title: what the plot shows, for a screen reader.
        name: a word that is unique on the page.
        limits: {name: epsilon} of what may be spent, as dotted lines; finite and > 0.
    """
    banded = "highest" in frame
    labels = list(frame.columns) if banded else _labels_of(frame, "client ")
    limits = limits or {}
    figure, axes = _axes([*labels, *limits], format_number)
    drawn = _draw_lines(axes, frame, prefix="" if banded else "client ")
    if banded:
        finite = frame.replace(math.inf, math.nan)
        axes.fill_between(finite.index, finite["10%"], finite["90%"], color=SERIES[0], alpha=0.15, linewidth=0)
    drawn += _draw_references(axes, limits, float(frame.index.max()))
    _start_at_zero(axes, at_least=max(limits.values(), default=0.0))
    if frame.shape[1] and frame.iloc[-1].map(math.isinf).all():
        axes.set_yticks([])
        axes.text(0.5, 0.5, f"ε = {INFINITY}: no bound", transform=axes.transAxes, ha="center", color=INK)
    else:
        _draw_labels(axes, drawn)
    return to_svg(figure, name=name, description=describe(frame, title, format_bound))


def traffic_plot(frame: pd.DataFrame, *, title: str, name: str) -> str:
    """Bytes sent and received over rounds."""
    figure, axes = _axes(_labels_of(frame), format_bytes)
    labels = _draw_lines(axes, frame)
    _start_at_zero(axes)
    _draw_labels(axes, labels)
    return to_svg(figure, name=name, description=describe(frame, title, format_bytes))


def describe(frame: pd.DataFrame, title: str, format_value: Format) -> str:
    """One sentence that says what a plot shows and where its lines end."""
    if frame.empty:
        return f"{title}: no data."
    ends = ", ".join(f"{name} {format_value(float(frame[name].iloc[-1]))}" for name in frame.columns)
    return f"{title} over rounds {frame.index.min():g} to {frame.index.max():g}; at the end: {ends}."


def spread(targets: Sequence[float], gap: float, high: float) -> list[float]:
    """Positions near the targets, in their order, at least gap apart and none above high."""
    order = sorted(range(len(targets)), key=lambda index: targets[index])
    positions = [0.0] * len(targets)
    below = -math.inf
    for index in order:
        below = positions[index] = max(targets[index], below + gap)
    above = high + gap
    for index in reversed(order):
        above = positions[index] = min(positions[index], above - gap)
    return positions


def _axes(labels: Sequence[str], format_value: Format) -> tuple[Figure, Axes]:
    """Empty axes in the page's colours, with room on the right for the longest label."""
    right = 16.0 + CHARACTER * max((len(label) for label in labels), default=0)
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    width, height = WIDTH - LEFT - right, HEIGHT - BOTTOM - TOP
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / HEIGHT, width / WIDTH, height / HEIGHT))
    axes.tick_params(colors=INK, labelsize=FONT_SIZE, length=3, width=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("round", color=INK, fontsize=FONT_SIZE)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    return figure, axes


def _draw_lines(axes: Axes, frame: pd.DataFrame, prefix: str = "") -> list[Label]:
    """Draw each distinct line once; returns a label for each end, at the top where a line ends at infinity."""
    labels: list[Label] = []
    first, final = float(frame.index.min()), float(frame.index.max())
    margin = 0.03 * max(1.0, final - first)
    axes.set_xlim(first - margin, final + margin)
    for index, (names, values) in enumerate(merge_equal(frame).items()):
        finite = values.replace(math.inf, math.nan)
        style = index % len(SERIES)
        marker = MARKERS[style] if len(frame) <= 25 else ""
        axes.plot(
            finite.index,
            finite,
            color=SERIES[style],
            linestyle=DASHES[style],
            linewidth=1.6,
            marker=marker,
            markersize=3.5,
        )
        text = _label(names, frame.shape[1], prefix)
        if math.isinf(values.iloc[-1]):
            labels.append((f"{text} {INFINITY}", final, math.inf, SERIES[style]))
        elif finite.notna().any():
            last = finite.last_valid_index()
            labels.append((text, float(str(last)), float(finite.loc[last]), SERIES[style]))
    return labels


def _draw_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each label beside its line's end, with a leader, moved apart from labels that it would overlap."""
    low, high = axes.get_ylim()
    height = HEIGHT - BOTTOM - TOP
    ends = [height * (min(y, high) - low) / (high - low) for _, _, y, _ in labels]
    for (text, x, y, colour), end, position in zip(labels, ends, spread(ends, LABEL_GAP, height), strict=True):
        axes.annotate(
            text,
            xy=(x, min(y, high)),
            xytext=(12, position - end),
            textcoords="offset points",
            color=colour,
            fontsize=FONT_SIZE,
            va="center_baseline",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def _draw_references(axes: Axes, references: Mapping[str, float], end: float) -> list[Label]:
    for accuracy in references.values():
        axes.axhline(accuracy, color=INK, linestyle=":", linewidth=1)
    return [(name, end, accuracy, INK) for name, accuracy in references.items()]


def _percent_tick(share: float) -> str:
    return f"{100 * share:.3g}%"


def _start_at_zero(axes: Axes, *, at_least: float = 0.0) -> None:
    high = max(at_least, float(axes.dataLim.ymax))
    axes.set_ylim(0.0, 1.05 * high if math.isfinite(high) and high > 0 else 1.0)


def _labels_of(frame: pd.DataFrame, prefix: str = "") -> list[str]:
    labels = [_label(names, frame.shape[1], prefix) for names in merge_equal(frame)]
    infinite = frame.shape[0] > 0 and bool(frame.iloc[-1].map(math.isinf).any())
    return [f"{label} {INFINITY}" if infinite else label for label in labels]


def _label(names: Sequence[str], num_lines: int, prefix: str) -> str:
    """`client 3`; a line that several clients share names up to three of them, or says that it stands for all."""
    if prefix and len(names) == num_lines > 1:
        return f"all {num_lines}"
    shown = ", ".join(names[:3])
    return f"{prefix}{shown}" if len(names) <= 3 else f"{prefix}{shown} …"

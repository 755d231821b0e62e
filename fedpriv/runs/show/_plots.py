"""A run's plots: from its tables to lines over rounds, and from these to figures; all functions are pure.

The lines are also shown as a table: the index is the round, and each column is a line. A figure is drawn in placeholder
colours, which an inline SVG takes from its page, in light and dark mode.
"""

import html
import io
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fedpriv.privacy.accounting.views import View
from fedpriv.runs.figures import INFINITY, format_bytes, format_number
from fedpriv.texts import percent_up

# In points: small enough that a telephone shows the text at its size, large enough for half a column.
WIDTH, HEIGHT = 340.0, 215.0

LEFT, BOTTOM, TOP = 46.0, 34.0, 8.0
FONT_SIZE, LABEL_GAP, CHARACTER = 9.0, 11.5, 5.2
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES = ("-", (0, (5, 2)), "-", (0, (5, 2)), "-", (0, (5, 2)), "-", (0, (5, 2)))
Format = Callable[[float], str]
Label = tuple[str, float, float, str]  # text, x, y, colour

# Placeholder colours that occur nowhere else; each is replaced by a colour of the page.
INK = "#010203"

GRID = "#010204"
SERIES = tuple(f"#0102{blue:02x}" for blue in range(16, 24))

# Fallbacks for an SVG outside a page: Okabe and Ito's hues, darkened so that text in them is readable on white.
_FALLBACKS = ("#00589c", "#b84300", "#007557", "#a03d80", "#8a6000", "#2379ad", "#5a5a5a", "#6f6a00")

_CSS = {INK: "var(--ink, #1d2126)", GRID: "var(--grid, #d5d9de)"} | {
    sentinel: f"var(--series-{number}, {fallback})"
    for number, (sentinel, fallback) in enumerate(zip(SERIES, _FALLBACKS, strict=True), start=1)
}

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

# matplotlib's settings belong to the whole process.
_drawing = threading.Lock()

# More bars than this cannot be read.
MOST_BARS = 20

# More lines than this cannot be told apart, and are replaced by quantiles over the clients.
MAX_LINES = 8


def standard_errors(accuracies: pd.Series, summary: Mapping[str, Any]) -> pd.Series | None:
    """The standard error of each accuracy, from the number of test records that the final one's implies; or None."""
    error, final = summary.get("accuracy_standard_error"), summary["accuracy"]
    if not error or final is None:
        return None
    found: pd.Series = np.sqrt(accuracies * (1 - accuracies) / (final * (1 - final))) * float(error)
    return found


def accuracy_figure(frame: pd.DataFrame, references: Mapping[str, float], errors: pd.Series | None = None) -> Figure:
    """Test accuracy over rounds, a line for each run, the first with any errors, and those to beat, dotted, by name."""
    figure, axes = _axes([*_labels_of(frame), *references], _percent_tick)
    labels = _draw_lines(axes, frame)
    if errors is not None:
        axes.errorbar(frame.index, frame.iloc[:, 0], yerr=errors, fmt="none", ecolor=SERIES[0], elinewidth=0.8)
    labels += _draw_references(axes, references, float(frame.index.max()))
    axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(1.0, axes.get_ylim()[1]))
    _draw_labels(axes, labels)
    return figure


def evaluation_figure(frame: pd.DataFrame, references: Mapping[str, float]) -> Figure:
    """The accuracy of `evaluation_lines` with its interval, and what it has to beat as dotted lines."""
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
    return figure


def trade_off_figure(found: pd.DataFrame, points: Mapping[str, float]) -> Figure:
    """The shares found by the share wrongly accused, both on logarithmic axes, against accusing at random.

    Args:
        found: columns in [0, 1], the claim's first, over shares in (0, 1], which rise.
        points: {share wrongly accused: share found} of those of the claim that are told in figures.
    """
    labels = [percent_up(share) for share in points.values()]
    figure, axes = _axes([*labels, "at random"], _percent_tick)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(float(found.index.min()), 1.0)
    axes.set_ylim(float(found.index.min()), 1.0)
    axes.plot(found.index, found.index, color=INK, linestyle=":", linewidth=1)
    for place, column in enumerate(found):
        style, colour = DASHES[place], SERIES[place]
        axes.plot(found.index, found[column], color=colour, linestyle=style, linewidth=1.6, clip_on=place > 0)
    if len(found.columns) > 1:
        axes.text(
            0.98, 0.06, found.columns[-1], transform=axes.transAxes, ha="right", color=SERIES[1], fontsize=FONT_SIZE
        )
    axes.plot([float(x) for x in points], list(points.values()), "o", color=SERIES[0], markersize=5, clip_on=False)
    for i, (x, y) in enumerate(points.items()):
        axes.annotate(
            percent_up(y),
            xy=(float(x), y),
            xytext=(-3, 5) if i else (4, -4),  # the axis leaves no room beside the first
            textcoords="offset points",
            ha="right" if i else "left",
            va="bottom" if i else "top",
            color=SERIES[0],
            fontsize=FONT_SIZE,
        )
    axes.annotate("at random", (0.1, 0.1), (6, -10), textcoords="offset points", color=INK, fontsize=FONT_SIZE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([0.001, 0.01, 0.1, 1.0]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda share, _: _percent_tick(share)))
    axes.set_ylabel("found", color=INK, fontsize=FONT_SIZE, labelpad=-2)
    axes.set_xlabel("wrongly accused", color=INK, fontsize=FONT_SIZE)
    return figure


def loss_figure(frame: pd.DataFrame) -> Figure:
    """Test loss, or another quantity, over rounds, each run a line."""
    figure, axes = _axes(_labels_of(frame), format_number)
    _draw_labels(axes, _draw_lines(axes, frame))
    return figure


def epsilon_figure(frame: pd.DataFrame, limits: Mapping[str, float] | None = None) -> Figure:
    """Cumulative epsilon over rounds: a line per client, or a band from the 10% to the 90% quantile.

    Args:
        frame: from `epsilon_lines`; infinite values are named, not drawn.
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
    return figure


def label_figure(frame: pd.DataFrame) -> Figure:
    """The shares of labels, a bar for each client: a row of numbers of records, with a column for each label."""
    labels = list(map(str, frame.columns))
    figure, axes = _axes(labels, _percent_tick)
    shares, left = frame.div(frame.sum(axis=1).clip(lower=1), axis=0), np.zeros(len(frame))
    middles = []
    for place, column in enumerate(shares):
        colour, alpha = SERIES[place % len(SERIES)], 1.0 if place < len(SERIES) else 0.5
        axes.bar(range(len(frame)), shares[column], bottom=left, width=0.8, edgecolor="none", color=colour, alpha=alpha)
        middles.append(float(left[-1] + shares[column].iloc[-1] / 2))
        left = left + shares[column].to_numpy()
    axes.set_ylim(0.0, 1.0)
    axes.set_xticks(range(len(frame)), [str(place) for place in range(len(frame))])
    axes.set_xlabel("client", color=INK, fontsize=FONT_SIZE)
    colours = (SERIES[place % len(SERIES)] for place in range(len(labels)))
    _draw_labels(axes, list(zip(labels, [len(frame) - 0.6] * len(labels), middles, colours, strict=True)))
    return figure


def traffic_figure(frame: pd.DataFrame) -> Figure:
    """Bytes sent and received over rounds."""
    figure, axes = _axes(_labels_of(frame), format_bytes)
    labels = _draw_lines(axes, frame)
    _start_at_zero(axes)
    _draw_labels(axes, labels)
    return figure


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
        # Without the rounds that have no figure, or a curve that is tested in some rounds alone would have no line.
        finite = values.replace(math.inf, math.nan).dropna()
        style = index % len(SERIES)
        look: dict[str, Any] = {
            "color": SERIES[style],
            "linestyle": DASHES[style],
            "marker": MARKERS[style] if len(finite) <= 25 else "",
        }
        axes.plot(finite.index, finite, linewidth=1.6, markersize=3.5, **look)
        text = _label(names, frame.shape[1], prefix)
        if math.isinf(values.iloc[-1]):
            labels.append((f"{text} {INFINITY}", final, math.inf, SERIES[style]))
        elif len(finite):
            labels.append((text, float(finite.index[-1]), float(finite.iloc[-1]), SERIES[style]))
    return labels


def _draw_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each label next to its line's end, with a leader, moved apart from labels that it would overlap."""
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


def to_svg(figure: Figure, *, name: str, description: str) -> str:
    """The figure as an SVG element; text stays text, and the bytes depend on the figure and the name alone.

    Args:
        figure: drawn in INK, GRID and SERIES on a transparent background.
        name: a word that is unique on the page; every id in the SVG starts with it.
        description: what a screen reader reads out instead of the picture.
    """
    buffer = io.StringIO()
    with _drawing, matplotlib.rc_context({"svg.hashsalt": f"fedpriv-{name}", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue()
    body = text[text.index("<svg") :].strip()
    # matplotlib's style sheet would apply to the whole page once the SVG stands in it.
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>\s*", "", body, count=1, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{name}-", body)
    for sentinel, css in _CSS.items():
        body = body.replace(sentinel, css)
    return _open_tag(body, description) + body[body.index(">") + 1 :]


def to_pdf(figure: Figure, y_label: str) -> bytes:
    """The figure, in the colours of paper and with names of both axes, as PDF; the same figure gives the same bytes."""
    axes = figure.axes[0]
    axes.set_ylabel(y_label, color=INK, fontsize=FONT_SIZE)
    buffer = io.BytesIO()
    with _drawing, matplotlib.rc_context({"pdf.fonttype": 42}):
        coloured(figure).savefig(buffer, format="pdf", bbox_inches="tight", metadata={"CreationDate": None})
    return buffer.getvalue()


def coloured(figure: Figure) -> Figure:
    """Give a figure that was drawn in placeholder colours those that are readable on white."""
    colours = {to_rgba(sentinel): css.rpartition(" ")[2].rstrip(")") for sentinel, css in _CSS.items()}
    for artist in figure.findobj():
        for kind in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            found = getattr(artist, f"get_{kind}", None)
            set_to = getattr(artist, f"set_{kind}", None)
            if found is None or set_to is None:
                continue
            now = np.atleast_2d(to_rgba_array(found()))
            if len(now) == 1 and (new := colours.get((*now[0][:3], 1.0))):
                set_to(to_rgba(new, now[0][3]))
    return figure


def _open_tag(body: str, description: str) -> str:
    """The root tag without a fixed size, so that the page decides how wide the plot is."""
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None  # matplotlib always writes one
    label = html.escape(description, quote=True)
    style = "stroke-linejoin: round; stroke-linecap: butt"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} role="img" aria-label="{label}" style="{style}">'


def compared_lines(rounds: pd.DataFrame, comparison: pd.DataFrame | None, column: str, name: str) -> pd.DataFrame:
    """A column of `rounds.csv` over the rounds, with that of the comparison run if there is one.

    Args:
        rounds: round and the column; if a round is written twice (a resumed run), its last row counts.
        comparison: the same of the run with z = 0, or None.
        column: such as `test_accuracy`.
        name: the label of the run itself, such as `with DP`.
    """
    lines = {name: _by_round(rounds)[column]}
    if comparison is not None:
        lines["without noise"] = _by_round(comparison)[column]
    return pd.DataFrame(lines).rename_axis("round")


def evaluation_lines(summary: Mapping[str, Any], name: str) -> pd.DataFrame:
    """The accuracy that was read from the holders' noised counts after the last round, with its interval; one row.

    Args:
        summary: accuracy, which may be None, accuracy_interval and num_rounds.
        name: the label of the run, such as `with DP`.
    """
    low, high = summary["accuracy_interval"]
    accuracy = math.nan if summary["accuracy"] is None else summary["accuracy"]
    row = {name: [accuracy], "low": [low], "high": [high]}
    return pd.DataFrame(row, index=pd.Index([summary["num_rounds"]], name="round"), dtype=float)


def epsilon_lines(clients: pd.DataFrame, rounds: pd.DataFrame, view: View) -> pd.DataFrame:
    """Each client's cumulative epsilon after each round.

    A client's epsilon stays the same in rounds that it misses. A missing epsilon of a successful reply counts as
    infinite.

    Args:
        clients: round, client, status and epsilon_<view>; one row per client and round.
        rounds: round, which becomes the index.

    Returns:
        A column per client; beyond MAX_LINES clients the highest, the 90% and 10% quantiles and the median.
    """
    spent = clients[f"epsilon_{view}"]
    spent = spent.mask(spent.isna() & (clients["status"] == "ok"), math.inf)
    cumulative = (
        clients.assign(spent=spent)
        .groupby(["round", "client"])["spent"]
        .max()
        .unstack("client")
        .reindex(_by_round(rounds).index)
        .ffill()
        .fillna(0.0)
    )
    if cumulative.shape[1] > MAX_LINES:
        cumulative = _quantiles(cumulative)
    else:
        cumulative.columns = pd.Index([f"{client:g}" for client in cumulative.columns])
    return cumulative.rename_axis("round")


def traffic_lines(rounds: pd.DataFrame) -> pd.DataFrame:
    """The bytes that all clients together sent and received in each round."""
    sent = _by_round(rounds)[["bytes_up", "bytes_down"]].fillna(0.0)
    return sent.rename(columns={"bytes_up": "sent", "bytes_down": "received"}).rename_axis("round")


def merge_equal(frame: pd.DataFrame) -> dict[tuple[str, ...], pd.Series]:
    """The distinct lines of a frame, each with the names of all columns that are equal to it, in column order."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name in frame.columns:
        values = frame[name].astype(float).fillna(-math.inf)
        groups.setdefault(tuple(values), []).append(name)
    return {tuple(names): frame[names[0]] for names in groups.values()}


def _by_round(rounds: pd.DataFrame) -> pd.DataFrame:
    return rounds.drop_duplicates("round", keep="last").set_index("round").sort_index()


def _quantiles(cumulative: pd.DataFrame) -> pd.DataFrame:
    # `higher` picks a client's own value: never below the quantile, and infinity does not become NaN.
    def at(share: float) -> pd.Series:
        return cumulative.quantile(share, axis=1, interpolation="higher")

    return pd.DataFrame({"highest": at(1.0), "90%": at(0.9), "median": at(0.5), "10%": at(0.1)})

"""The paper's figures, drawn from the study's lines; each is None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from PIL import Image

from simulations.studies.dedup.report import settings
from simulations.studies.dedup.report.paper import EIGHT
from simulations.studies.dedup.report.results import DedupResults, found

INK, GRID = "#1d2126", "#d5d9de"
BLUE, RED, GREEN, PURPLE, BROWN, GREY = "#00589c", "#b84300", "#007557", "#a03d80", "#8a6000", "#5a5a5a"
_DRAWN = (INK, "black", BLUE, RED, GREEN, PURPLE, BROWN, GREY)


def lengths(results: DedupResults) -> Figure | None:
    """Validations against C.R., a panel for each scenario: `drd` and `dred` over L, Greedy, the rule, published."""
    here = results.having(settings.TABLE, EIGHT)
    if not here:
        return None
    num_columns = min(4, len(here))
    figure, panels = _grid("L: validations against C.R.", -(-len(here) // num_columns), num_columns)
    for axes, scenario in zip(panels, here, strict=False):
        axes.set_title(scenario, fontsize=9)
        for name, colour in (("drd", BLUE), ("dred", RED)):
            _draw_lengths(axes, results, scenario, name, colour)
        for name, marker in (("greedy-20", "s"), ("greedy-30", "D")):
            pair = found(settings.measured(results, scenario, name))
            if pair:
                axes.plot(pair[1], pair[0], marker, color=GREEN, markersize=6, label=name)
        axes.set_xscale("log")
        axes.margins(0.15)  # room for the labels of points
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("validations", fontsize=8)
    panels[0].set_ylabel("C.R. %", fontsize=8)
    return _finished(figure, panels, len(here))


def _draw_lengths(axes: Axes, results: DedupResults, scenario: str, name: str, colour: str) -> None:
    rows = [row for row in results.rows(settings.TABLE, [scenario]) if row.startswith(f"{name}-")]
    rows.sort(key=lambda row: int(row.rsplit("-", 1)[-1]))
    points = [pair for row in rows if (pair := found(results.cells(scenario, settings.TABLE, row)))]
    if points:
        numbers, ratios = [num for _, num in points], [ratio for ratio, _ in points]
        axes.plot(numbers, ratios, "o-", color=colour, markersize=3, linewidth=1, label=name)
    lengths: dict[tuple[float, float], list[str]] = {}  # several L may end in one point
    for row, (ratio, num) in zip(rows, points, strict=True):
        lengths.setdefault((num, ratio), []).append(row.rsplit("-", 1)[-1])
    for point, several in lengths.items():
        label = ", ".join(several)
        axes.annotate(label, point, (2, 3), textcoords="offset points", fontsize=6, color=colour)
    rule, published = (found(settings.measured(results, scenario, row)) for row in (name, f"{name}-published"))
    for pair, marker, label in ((rule, "*", "rule"), (published, "x", "published")):
        if pair:
            axes.plot(pair[1], pair[0], marker, color=colour, markersize=9, label=f"{name}, {label}")


def latency(results: DedupResults) -> Figure | None:
    """Figures 5 and 8: seconds of loading and inference of every arm, from every disk."""
    if not results.serving:
        return None
    num = len(results.serving)
    title, columns = "Serving under a limit of memory (the paper's Figures 5 and 8)", min(num, 4)
    figure, panels = _grid(title, -(-num // columns), columns, width=3.4)
    for axes, line in zip(panels, results.serving, strict=False):
        axes.set_title(line["scenario"], fontsize=9)
        places = range(len(line["arms"]))
        for key, label, colour, shift in (("load", "loading", BLUE, 0.2), ("infer", "inference", BROWN, -0.2)):
            seconds = [max(arm[f"{key}_seconds"], 1e-3) for arm in line["arms"]]  # log scale has no zero
            axes.barh([place + shift for place in places], seconds, height=0.38, color=colour, label=label)
        axes.set_yticks(places, [f"{arm['arm']}, {arm['disk']}" for arm in line["arms"]])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("seconds for all queries", fontsize=8)
    return _finished(figure, panels, num)


def places(results: DedupResults) -> Figure | None:
    """Figure 1: the place of each block of one model, and of the block of another one that is nearest to it."""
    if not results.pairs:
        return None
    figure, panels = _grid("Nearest blocks of two models (the paper's Figure 1)", 1, len(results.pairs), width=3.4)
    for axes, line in zip(panels, results.pairs, strict=True):
        axes.plot(line["nearest"], ".", color=BLUE, markersize=3)
        one, other = line["key"].split()
        axes.set_xlabel(f"place of a block in\n{one}", fontsize=6)
        axes.set_ylabel(f"place of the nearest in\n{other}", fontsize=6)
    return _finished(figure, panels, len(results.pairs))


def _grid(title: str, rows: int, columns: int, *, width: float = 2.6) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(width * columns, 4.5), 2.5 * rows + 0.8), layout="constrained")
    figure.suptitle(title, fontsize=10, color=INK)
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def _finished(figure: Figure, panels: Sequence[Axes], num_used: int) -> Figure:
    """With a grid, small ticks, and one legend for all panels below them."""
    labels = {}
    for axes in panels[:num_used]:
        axes.grid(visible=True, color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=7)
        labels.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    for axes in panels[num_used:]:
        axes.set_visible(False)
    columns = min(len(labels), int(figure.get_figwidth() / 1.4))
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=columns, fontsize=8)
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure in shades of its own colours: a third of the bytes, and the same bytes each time."""
    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, dpi=110, metadata={"Software": None})
    palette = Image.new("P", (1, 1))
    palette.putpalette(_shades())
    plain = Image.open(drawn).convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    plain.save(small, "PNG", optimize=True)
    return small.getvalue()


def _shades() -> list[int]:
    """RGB of each colour and its mixtures with white, 16 of each; of more, Pillow would take one for plain white."""
    shades = np.linspace(0, 1, 16)[:, None, None]
    mixed = shades + (1 - shades) * np.array([to_rgb(colour) for colour in _DRAWN])
    return [round(255 * float(value)) for value in mixed.ravel()]

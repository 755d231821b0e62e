"""A matplotlib figure as one inline SVG that takes its colours from the page, in light and dark mode."""

from __future__ import annotations

import html
import io
import re

import matplotlib
from matplotlib.figure import Figure

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


def to_svg(figure: Figure, *, name: str, description: str) -> str:
    """The figure as an SVG element; text stays text, and the bytes depend on the figure and the name alone.

    Args:
        figure: drawn in INK, GRID and SERIES on a transparent background.
        name: a word that is unique on the page; every id in the SVG starts with it.
        description: what a screen reader reads out instead of the picture.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"fedpriv-{name}", "svg.fonttype": "none"}):
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


def _open_tag(body: str, description: str) -> str:
    """The root tag without a fixed size, so that the page decides how wide the plot is."""
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None  # matplotlib always writes one
    label = html.escape(description, quote=True)
    style = "stroke-linejoin: round; stroke-linecap: butt"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} role="img" aria-label="{label}" style="{style}">'

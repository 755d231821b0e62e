"""One or two lines that are rewritten while a run goes on: in a terminal, or below a notebook's cell."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

# A notebook keeps every version of its output until it is drawn.
_NOTEBOOK_SECONDS = 0.5
_PER_SECOND = 4


class Screen(Protocol):
    """Where lines are rewritten."""

    def update(self) -> None:
        """Something changed; it need not be shown at once."""

    def stop(self) -> None:
        """Take the lines away."""


def screen_of(console: Console, lines: Callable[[], str]) -> Screen | None:
    """A screen that shows the lines from now on; None where nothing can be rewritten, as in a pipe or a file.

    Args:
        console: in whose place they are shown.
        lines: what they are just now.
    """
    if console.is_jupyter:
        return _Notebook(lines)
    # Colours may be forced upon a pipe; lines that are rewritten would litter it.
    return _Terminal(console, lines) if console.is_terminal and console.file.isatty() else None


class _Terminal:
    def __init__(self, console: Console, lines: Callable[[], str]) -> None:
        self._live = Live(
            get_renderable=lambda: Text(lines()), console=console, refresh_per_second=_PER_SECOND, transient=True
        )
        self._live.start()

    def update(self) -> None:
        """Nothing: the lines are drawn several times a second anyway."""

    def stop(self) -> None:
        self._live.stop()


class _Notebook:
    """rich's own needs ipywidgets in a notebook, and leaves nothing in one that is executed without a browser."""

    def __init__(self, lines: Callable[[], str]) -> None:
        display: Any = import_module("IPython.display").display  # a notebook has it
        self._lines = lines
        self._shown = time.monotonic()
        self._handle = display(_preformatted(lines()), raw=True, display_id=True)

    def update(self) -> None:
        if time.monotonic() - self._shown >= _NOTEBOOK_SECONDS:
            self._shown = time.monotonic()
            self._handle.update(_preformatted(self._lines()), raw=True)

    def stop(self) -> None:
        self._handle.update(_preformatted(""), raw=True)


def _preformatted(text: str) -> dict[str, str]:
    return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}

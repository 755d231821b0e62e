"""Pages of whole runs without their plots, which take as long to draw as all else that a small run does."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fedpriv.runs.show import _plots


@contextmanager
def without_plots() -> Iterator[None]:
    """Every plot of a page is an empty text; what a plot is given must still suit it."""
    with mock.patch.object(_plots, "to_svg", autospec=True, return_value=""):
        yield

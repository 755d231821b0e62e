"""Pages of whole runs without their plots, which take as long to draw as all else that a small run does."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fedpriv.runs.show import _plots

_DRAWN = ("accuracy_plot", "loss_plot", "evaluation_plot", "epsilon_plot", "traffic_plot", "trade_off_plot")


@contextmanager
def without_plots() -> Iterator[None]:
    """Every plot of a page is an empty text; what a plot is given must still suit it."""
    empty = {name: mock.create_autospec(getattr(_plots, name), return_value="") for name in _DRAWN}
    with mock.patch.multiple(_plots, **empty):
        yield

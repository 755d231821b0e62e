"""Pages of whole runs without their plots, which take as long to draw as all else that a small run does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fedpriv.runs.show import _plots


@contextmanager
def without_plots() -> Iterator[None]:
    """Every plot of a page is an empty text; what a plot is given must still suit it."""
    with mock.patch("fedpriv.runs.show.report_page.plots", mock.create_autospec(_plots)) as empty:
        for name in ("accuracy_plot", "loss_plot", "evaluation_plot", "epsilon_plot", "traffic_plot"):
            getattr(empty, name).return_value = ""
        yield

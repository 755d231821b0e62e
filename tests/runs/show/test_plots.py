from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedpriv.runs.show._plots import _draw_lines, accuracy_plot, epsilon_plot, loss_plot, spread, traffic_plot

INDEX = pd.Index([0, 1, 2], name="round")
CLIENTS = pd.DataFrame({"0": [0.0, 0.5, 0.8], "1": [0.0, 0.6, 0.9]}, index=INDEX)
MANY = pd.DataFrame({name: [0.0, 0.5, 0.8] for name in ("highest", "90%", "median", "10%")}, index=INDEX)
PLOTS: dict[str, Callable[[], str]] = {
    "accuracy": lambda: accuracy_plot(
        pd.DataFrame({"with DP": [0.1, 0.5, 0.9]}, index=INDEX), references={"chance": 0.125}
    ),
    "loss": lambda: loss_plot(pd.DataFrame({"with DP": [2.0, math.nan, 0.5]}, index=INDEX)),
    "clients": lambda: epsilon_plot(CLIENTS, title="ε", name="clients"),
    "many": lambda: epsilon_plot(MANY, title="ε", name="many"),
    "nobody": lambda: epsilon_plot(CLIENTS[[]], title="ε", name="nobody"),
    "bytes": lambda: traffic_plot(pd.DataFrame({"sent": [0, 5, 9]}, index=INDEX), title="Bytes", name="bytes"),
    "one round": lambda: loss_plot(pd.DataFrame({"with DP": [2.0]}, index=INDEX[:1])),
}


@pytest.mark.parametrize("plot", PLOTS.values(), ids=list(PLOTS))
def test_a_plot_is_one_svg_element_in_the_page_s_colours(plot: Callable[[], str]) -> None:
    svg = plot()
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert "var(--ink" in svg
    assert "#0102" not in svg
    assert "<metadata" not in svg
    assert "<style" not in svg


@pytest.mark.parametrize("plot", PLOTS.values(), ids=list(PLOTS))
def test_the_same_table_gives_the_same_bytes(plot: Callable[[], str]) -> None:
    assert plot() == plot()


def test_a_curve_that_is_tested_in_some_rounds_alone_is_one_line_through_these() -> None:
    tested = pd.Series({0: 0.5, 10: 0.7, 20: 0.8}, name="with DP").reindex(range(31)).to_frame()
    axes = Figure().subplots()
    _draw_lines(axes, tested)
    (line,) = axes.lines
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0, 0.5), (10, 0.7), (20, 0.8)]
    assert line.get_marker() == "o"


def test_line_ends_are_labelled() -> None:
    svg = PLOTS["clients"]()
    assert ">client 0<" in svg
    assert ">client 1<" in svg


def test_clients_who_spent_the_same_share_a_label() -> None:
    equal = pd.DataFrame(dict.fromkeys("012", CLIENTS["0"]))
    assert ">all 3<" in epsilon_plot(equal, title="ε", name="equal")


def test_an_infinite_client_is_named_with_the_sign() -> None:
    svg = epsilon_plot(CLIENTS.assign(**{"1": [0.0, math.inf, math.inf]}), title="ε", name="one")
    assert ">client 1 ∞<" in svg
    assert "1 ∞" in str(ElementTree.fromstring(svg).get("aria-label"))


def test_infinity_everywhere_is_said_instead_of_drawn() -> None:
    svg = epsilon_plot(CLIENTS.where(CLIENTS == 0, math.inf), title="ε", name="none")
    assert "ε = ∞" in svg


def test_spread_keeps_order_gap_and_bound() -> None:
    targets = [100.0, 99.0, 3.0, 98.5]
    placed = spread(targets, gap=10.0, high=100.0)
    assert sorted(placed) == [placed[place] for place in (2, 3, 1, 0)]
    assert all(b - a >= 10 for a, b in itertools.pairwise(sorted(placed)))
    assert max(placed) <= 100
    assert placed[2] == 3.0


def test_labels_that_have_room_stay_at_their_lines() -> None:
    assert spread([50.0, 10.0], gap=10.0, high=100.0) == [50.0, 10.0]
    assert spread([], gap=10.0, high=100.0) == []

"""Lines over rounds come from a run's tables, and a plot of them is one SVG in the page's colours."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedpriv.runs.figures import format_bound
from fedpriv.runs.show._plots import (
    MAX_LINES,
    _draw_lines,
    accuracy_figure,
    compared_lines,
    describe,
    epsilon_figure,
    epsilon_lines,
    loss_figure,
    merge_equal,
    spread,
    to_svg,
    traffic_figure,
    traffic_lines,
)

INDEX = pd.Index([0, 1, 2], name="round")
CLIENTS = pd.DataFrame({"0": [0.0, 0.5, 0.8], "1": [0.0, 0.6, 0.9]}, index=INDEX)
MANY = pd.DataFrame({name: [0.0, 0.5, 0.8] for name in ("highest", "90%", "median", "10%")}, index=INDEX)


def epsilon_plot(frame: pd.DataFrame) -> str:
    return to_svg(epsilon_figure(frame), name="epsilon", description=describe(frame, "ε", format_bound))


FIGURES: dict[str, Callable[[], Figure]] = {
    "accuracy": lambda: accuracy_figure(pd.DataFrame({"with DP": [0.1, 0.5, 0.9]}, index=INDEX), {"chance": 0.125}),
    "loss": lambda: loss_figure(pd.DataFrame({"with DP": [2.0, math.nan, 0.5]}, index=INDEX)),
    "clients": lambda: epsilon_figure(CLIENTS),
    "many": lambda: epsilon_figure(MANY),
    "nobody": lambda: epsilon_figure(CLIENTS[[]]),
    "bytes": lambda: traffic_figure(pd.DataFrame({"sent": [0, 5, 9]}, index=INDEX)),
    "one round": lambda: loss_figure(pd.DataFrame({"with DP": [2.0]}, index=INDEX[:1])),
}

ROUNDS = pd.DataFrame({"round": [0, 1, 2, 3]})


@pytest.mark.parametrize("figure", FIGURES.values(), ids=list(FIGURES))
def test_a_plot_is_one_svg_element_in_the_page_s_colours(figure: Callable[[], Figure]) -> None:
    svg, again = (to_svg(figure(), name="plot", description="a plot") for _ in range(2))
    assert svg == again, "the same table gives the same bytes"
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert "var(--ink" in svg
    assert "#0102" not in svg
    assert "<metadata" not in svg
    assert "<style" not in svg


def test_a_curve_that_is_tested_in_some_rounds_alone_is_one_line_through_these() -> None:
    tested = pd.Series({0: 0.5, 10: 0.7, 20: 0.8}, name="with DP").reindex(range(31)).to_frame()
    axes = Figure().subplots()
    _draw_lines(axes, tested)
    (line,) = axes.lines
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0, 0.5), (10, 0.7), (20, 0.8)]
    assert line.get_marker() == "o"


@pytest.mark.parametrize(
    ("frame", "labels"),
    [
        (CLIENTS, {"client 0", "client 1"}),
        (pd.DataFrame(dict.fromkeys("012", CLIENTS["0"])), {"all 3"}),
        (CLIENTS.assign(**{"1": [0.0, math.inf, math.inf]}), {"client 0", "client 1 ∞"}),
    ],
)
def test_line_ends_are_labelled_with_those_who_spent_the_same_together(frame: pd.DataFrame, labels: set[str]) -> None:
    svg = epsilon_plot(frame)
    assert labels <= set(re.findall(r">([^<>]+)<", svg))
    assert ("1 ∞" in str(ElementTree.fromstring(svg).get("aria-label"))) == ("client 1 ∞" in labels)
    assert "ε = ∞" in epsilon_plot(frame.where(frame == 0, math.inf)), "said instead of drawn"


def test_spread_keeps_order_gap_and_bound() -> None:
    targets = [100.0, 99.0, 3.0, 98.5]
    placed = spread(targets, gap=10.0, high=100.0)
    assert sorted(placed) == [placed[place] for place in (2, 3, 1, 0)]
    assert all(b - a >= 10 for a, b in itertools.pairwise(sorted(placed)))
    assert max(placed) <= 100
    assert placed[2] == 3.0
    assert spread([50.0, 10.0], gap=10.0, high=100.0) == [50.0, 10.0], "there is room"
    assert spread([], gap=10.0, high=100.0) == []


def spent(*rows: tuple[int, int, str, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["round", "client", "status", "epsilon_local"])


def test_what_is_spent_stays_spent_in_missed_rounds() -> None:
    frame = epsilon_lines(spent((1, 0, "ok", 0.5), (3, 0, "ok", 0.8), (2, 4, "ok", 0.1)), ROUNDS, "local")
    assert frame["0"].tolist() == [0.0, 0.5, 0.5, 0.8]
    assert frame["4"].tolist() == [0.0, 0.0, 0.1, 0.1]


def test_a_missing_epsilon_is_infinite_for_a_reply_and_ignored_for_a_failure() -> None:
    rows = spent((1, 0, "ok", math.nan), (1, 1, "ok", 0.5), (2, 1, "timeout", math.nan))
    frame = epsilon_lines(rows, ROUNDS, "local")
    assert frame["0"].tolist()[1:] == [math.inf] * 3
    assert frame["1"].tolist() == [0.0, 0.5, 0.5, 0.5]
    nobody = epsilon_lines(spent().astype({"epsilon_local": float}), ROUNDS, "local")
    assert nobody.shape == (4, 0), "over the rounds all the same"


def test_many_clients_become_quantiles_that_infinity_does_not_break() -> None:
    rows = [(1, k, "ok", float(k)) for k in range(MAX_LINES)] + [(1, MAX_LINES, "ok", math.inf)]
    frame = epsilon_lines(spent(*rows), ROUNDS, "local")
    assert frame.loc[1].to_dict() == {"highest": math.inf, "90%": math.inf, "median": 4.0, "10%": 1.0}


def test_a_round_written_twice_counts_as_last_written() -> None:
    rounds = pd.DataFrame({"round": [1, 0, 1], "test_loss": [9.0, 2.0, 1.0]})
    assert compared_lines(rounds, None, "test_loss", "run")["run"].tolist() == [2.0, 1.0]


def test_traffic_without_a_figure_is_zero() -> None:
    rounds = pd.DataFrame({"round": [0, 1], "bytes_up": [math.nan, 5], "bytes_down": [0, 7]})
    assert traffic_lines(rounds).to_numpy().tolist() == [[0, 0], [5, 7]]


def test_equal_lines_are_one_line_under_all_their_names() -> None:
    frame = pd.DataFrame({"a": [1.0, math.nan], "b": [2.0, 3.0], "c": [1.0, math.nan]})
    assert list(merge_equal(frame)) == [("a", "c"), ("b",)]

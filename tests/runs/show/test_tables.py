from __future__ import annotations

import math

import pandas as pd
import pytest

from fedpriv.runs._rows import parse_epsilon
from fedpriv.runs.figures import (
    format_bound,
    format_bytes,
    format_delta,
    format_epsilon,
    format_percent,
    format_seconds,
)
from fedpriv.runs.show._tables import client_table, format_range, spread_table


def test_an_epsilon_is_shown_with_its_delta_and_rounded_up() -> None:
    # 1.828: dp-accounting 0.6.0 (pld) at q = 0.01, z = 1, 1000 steps, delta = 1e-5.
    assert format_epsilon(1.828, 1e-5) == "ε = 1.83 at δ = 1e-5"
    assert format_epsilon(1.821, 1e-5) == "ε = 1.83 at δ = 1e-5"


@pytest.mark.parametrize("value", [math.inf, "inf", "Infinity", None, math.nan])
def test_whatever_stands_for_no_bound_shows_the_sign_for_infinity(value: float | str | None) -> None:
    assert format_bound(value) == "∞"


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (0, "0.000"),
        (1.2e-7, "1.2e-7"),
        (0.1061, "0.107"),
        (2.0, "2.00"),
        (9.999, "10.00"),
        (17.91, "18.0"),
        (353.2, "354"),
        (1e40, "1e40"),
    ],
)
def test_bounds_keep_about_three_figures(epsilon: float, shown: str) -> None:
    assert format_bound(epsilon).replace("+", "") == shown


@pytest.mark.parametrize("epsilon", [0.0007, 0.12345, 1.00001, 99.99999, 1234.5])
def test_a_shown_bound_is_never_below_the_bound(epsilon: float) -> None:
    assert float(format_bound(epsilon)) >= epsilon


@pytest.mark.parametrize("value", [-0.1, "many", True, [1.0]])
def test_what_is_no_epsilon_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_epsilon(value)


@pytest.mark.parametrize(
    ("delta", "shown"),
    [(1e-5, "1e-5"), (1 / 120_000, "8.4e-6"), (0.05, "0.05"), (9.99e-6, "1e-5"), (None, "–")],
)
def test_deltas_are_rounded_up_to_two_figures(delta: float | None, shown: str) -> None:
    assert format_delta(delta) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (307_232, "307 kB"),
        (999_700, "1 MB"),
        (3_072_320, "3.07 MB"),
        (2e16, "2e+04 TB"),
        (None, "–"),
    ],
)
def test_sizes_are_decimal(size: float | None, shown: str) -> None:
    assert format_bytes(size) == shown


def test_what_was_not_measured_is_a_dash() -> None:
    assert format_percent(None) == format_percent(math.nan) == format_seconds(None) == "–"
    assert format_range(pd.Series([math.nan])) == "–"


@pytest.mark.parametrize(("seconds", "shown"), [(8.21, "8.21 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")])
def test_durations_read_as_clocks_do(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_a_range_of_one_value_is_that_value() -> None:
    assert format_range(pd.Series([0.04, 0.04])) == "0.04"
    assert format_range(pd.Series([0.04, 0.05, math.nan])) == "0.04 to 0.05"


def entries(num_clients: int) -> list[dict[str, object]]:
    """Clients of which number k has spent k / 1000; on the aggregate view nobody's cost is known."""
    return [
        {
            "client": k,
            "num_records": 40,
            "rounds": k % 4,
            "epsilon_local": k / 1000,
            "epsilon_rho": None if k == 7 else k / 500,
            "epsilon_aggregate": None,
            "delta": 1e-5,
            "bytes_up": 1000 * k,
            "bytes_down": 0,
        }
        for k in range(num_clients)
    ]


def test_of_many_clients_those_that_spent_most_are_listed_and_the_others_counted() -> None:
    table = client_table(entries(1001), "pld", view="local")
    assert [row[0] for row in table.rows[:2]] == ["client 1000", "client 999"]
    assert (len(table.rows), table.caption.split(",")[0]) == (50, "The 50 of 1")
    assert client_table(entries(1001), "pld", view="rho").rows[0][0] == "client 7", "no figure is no small one"
    spread = spread_table(entries(1001), view="local")
    assert spread is not None
    assert spread.rows == (
        ("rounds", "0", "1", "3", "3", "3"),
        ("ε local", "0.000", "0.500", "0.900", "0.990", "1.00"),
        ("ε rho", "0.000", "1.01", "1.81", "1.99", "∞"),
        ("sent", "0 B", "500 kB", "900 kB", "990 kB", "1 MB"),
        ("received", "0 B", "0 B", "0 B", "0 B", "0 B"),
    )


def test_a_few_clients_are_all_listed() -> None:
    assert spread_table(entries(200), view="local") is None
    assert [row[0] for row in client_table(entries(200), "pld", view="local").rows] == [
        f"client {k}" for k in range(200)
    ]

"""Tables of text, and what was spent in one line: first on the view that was asked for; and an audit's verdict."""

import math
from typing import Any

import pandas as pd
import pytest

from fedpriv.runs._rows import parse_epsilon
from fedpriv.runs.figures import (
    _audit_line,
    _closing_line,
    audit_bound,
    audit_curve_bound,
    format_bound,
    format_bytes,
    format_delta,
    format_epsilon,
    format_percent,
    format_seconds,
    limit_of,
)
from fedpriv.runs.show._tables import client_table, format_range, spread_table, views_text

SUMMARY: dict[str, Any] = {
    **{"privacy_view": "local", "target_epsilon": 8.0, "budget_epsilon": [], "delta_max": 1e-5, "accountant": "pld"},
    **{"epsilon_local_max": 7.996, "epsilon_rho_max": 16.2, "epsilon_aggregate_max": None},
}

AUDIT: dict[str, Any] = {
    **{"kind": "tokens", "epsilon_lower": 0.129, "epsilon_lower_f_dp": 0.258, "delta": 1e-5, "confidence": 0.95},
    **{"num_correct": 44, "num_guesses": 74, "num_canaries": 150, "claimed_epsilon": 8.0, "refuted": False},
}


BOUNDS = {0: "0.000", 1.2e-7: "1.2e-7", 0.1061: "0.107", 0.12345: "0.124", 1.00001: "1.01", 2.0: "2.00"}
BOUNDS |= {9.999: "10.00", 17.91: "18.0", 99.99999: "100.0", 353.2: "354", 1e40: "1e40"}


def test_bounds_keep_about_three_figures_and_are_rounded_up_and_what_is_no_epsilon_is_refused() -> None:
    for epsilon, shown in BOUNDS.items():
        assert format_bound(epsilon).replace("+", "") == shown
        assert float(shown) >= epsilon
    for value in (math.inf, "inf", "Infinity", None, math.nan):
        assert format_bound(value) == "∞", value
    for wrong in (-0.1, "many", True, [1.0]):
        with pytest.raises(ValueError, match=r".+"):
            parse_epsilon(wrong)


SIZES = {0: "0 B", 512: "512 B", 307_232: "307 kB", 999_700: "1 MB", 3_072_320: "3.07 MB", 2e16: "2e+04 TB"}


@pytest.mark.parametrize(
    ("format_", "shown"),
    [
        (format_delta, {1e-5: "1e-5", 1 / 120_000: "8.4e-6", 0.05: "0.05", 9.99e-6: "1e-5", None: "–"}),
        (format_bytes, SIZES | {None: "–"}),
        (format_seconds, {8.21: "8.21 s", 185: "3 min 5 s", 7800: "2 h 10 min", None: "–"}),
        (format_percent, {None: "–", math.nan: "–"}),
        (lambda of: format_range(pd.Series(of)), {(0.04, 0.04): "0.04", (0.04, 0.05, math.nan): "0.04 to 0.05"}),
        (lambda of: format_range(pd.Series(of)), {(math.nan,): "–"}),
    ],
    ids=["deltas are rounded up", "sizes are decimal", "durations", "shares", "ranges", "no range"],
)
def test_figures_are_shown_for_readers_and_what_was_not_measured_is_a_dash(format_, shown: dict[Any, str]) -> None:
    assert {value: format_(value) for value in shown} == shown


def test_an_epsilon_is_rounded_up_beside_its_delta() -> None:
    # 1.828: dp-accounting 0.6.0 (pld) at q = 0.01, z = 1, 1000 steps, delta = 1e-5
    for delta in (1e-5, 9.99e-6):
        assert format_epsilon(1.828, delta) == format_epsilon(1.821, delta) == "ε = 1.83 at δ = 1e-5"


def entries(num_clients: int) -> list[dict[str, object]]:
    """Clients of which number k has spent k / 1000; on the aggregate view nobody's cost is known."""
    return [
        {
            **{"client": k, "num_records": 40, "rounds": k % 4, "delta": 1e-5, "bytes_up": 1000 * k, "bytes_down": 0},
            **{"epsilon_local": k / 1000, "epsilon_rho": None if k == 7 else k / 500, "epsilon_aggregate": None},
        }
        for k in range(num_clients)
    ]


def test_of_many_clients_those_that_spent_most_are_listed_and_the_others_counted() -> None:
    table = client_table(entries(1001), "pld", view="local")
    assert [row[0] for row in table.rows[:2]] == ["client 1000", "client 999"]
    assert (len(table.rows), table.caption.split(",")[0]) == (50, "The 50 of 1")
    assert client_table(entries(1001), "pld", view="rho").rows[0][0] == "client 7", "no figure is no small one"
    spread = spread_table(entries(1001), view="local")
    assert spread_table(entries(200), view="local") is None, "a few clients are all listed"
    assert len(client_table(entries(200), "pld", view="local").rows) == 200
    assert spread.rows == (
        ("rounds", "0", "1", "3", "3", "3"),
        ("ε local", "0.000", "0.500", "0.900", "0.990", "1.00"),
        ("ε rho", "0.000", "1.01", "1.81", "1.99", "∞"),
        ("sent", "0 B", "500 kB", "900 kB", "990 kB", "1 MB"),
        ("received", "0 B", "0 B", "0 B", "0 B", "0 B"),
    )


def test_the_closing_line_quotes_the_view_that_the_target_was_set_on_or_the_smallest_budget():
    assert limit_of(None, [4.0, 2.0]) == ("smallest budget", 2.0)
    assert limit_of(None, [4.0, 4.0]) == ("budget", 4.0)
    assert limit_of(3.0, [4.0]) == ("target", 3.0)
    assert limit_of(None, []) is None
    assert _closing_line(SUMMARY) == "ε 8.00 on the local view, target 8; by pld, at δ 1e-5"
    on_rho = _closing_line(SUMMARY | {"privacy_view": "rho", "target_epsilon": None, "budget_epsilon": [20.0]})
    assert on_rho == "ε 16.2 on the rho view, budget 20; by pld, at δ 1e-5; local 8.00"
    summed = _closing_line(SUMMARY | {"privacy_view": "aggregate", "epsilon_aggregate_max": 1.0})
    assert summed.startswith("ε 1.00 on the aggregate view, target 8")
    older = {key: value for key, value in SUMMARY.items() if key != "target_epsilon"}
    assert _closing_line(older) == "ε 8.00 on the local view; by pld, at δ 1e-5"
    assert _closing_line(SUMMARY | {"epsilon_local_max": None}).startswith("ε ∞ on the local view")


def test_a_target_stands_with_what_this_run_spent_and_a_budget_with_the_whole_of_a_shared_account():
    shared = SUMMARY | {"target_epsilon": 1.0, "epsilon_this_run_max": 0.996, "epsilon_before_max": 9.0}
    shared |= {"epsilon_local_max": 9.4}
    assert _closing_line(shared) == (
        "ε 0.996 of target 1 in this run, 9.00 in the account before it: 9.40 on the local view; by pld, at δ 1e-5"
    )
    budgeted = _closing_line(shared | {"target_epsilon": None, "budget_epsilon": [12.0]})
    assert "0.996 in this run, 9.00 in the account before it: 9.40 on the local view, budget 12" in budgeted
    unbounded = _closing_line(shared | {"epsilon_before_max": None, "epsilon_local_max": None})
    assert "∞ in the account before it" in unbounded
    text = views_text({"local": 9.4, "rho": 16.2}, "local", ("target", 1.0), (0.996, 9.0))
    assert text == "0.996 of target 1 in this run, 9.00 in the account before it: 9.40 local"
    epsilons = {"local": 1.0, "rho": 2.0, "aggregate": None}  # which does not hold
    assert views_text(epsilons, "rho", ("target", 3.0)) == "2.00 of 3 rho, 1.00 local"


@pytest.mark.parametrize(("refuted", "verdict"), [(False, "the claim of ε = 8.00 stands"), (True, "this refutes")])
def test_an_audit_is_a_lower_bound_rounded_down_with_what_it_means_for_the_claim(refuted, verdict):
    line = _audit_line(AUDIT | {"refuted": refuted})
    assert line.startswith("ε ≥ 0.12 at δ = 1e-5, ≥ 0.25 by f-DP, with 95% confidence: 44 of 74 guesses about 150 can")
    assert verdict in line


def test_an_audit_of_an_earlier_version_and_one_that_rejects_everything_are_told_too():
    earlier = {key: value for key, value in AUDIT.items() if key != "epsilon_lower_f_dp"}
    assert _audit_line(earlier).startswith("ε ≥ 0.12 at δ = 1e-5, with 95% confidence")
    assert audit_bound(earlier) == "ε = 0.12 at δ = 1e-5"
    assert audit_bound(AUDIT) == "ε = 0.12 at δ = 1e-5"
    assert audit_curve_bound(AUDIT) == "ε = 0.25"
    assert audit_curve_bound(AUDIT | {"epsilon_lower_f_dp": None}) == "ε = ∞"
    assert audit_curve_bound(earlier) is None

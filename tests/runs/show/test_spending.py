"""What was spent in one line: on the view that was asked for first; and what an audit says against it."""

from __future__ import annotations

from typing import Any

import pytest

from fedpriv.runs.figures import _audit_line, _closing_line, audit_bound, audit_curve_bound, limit_of
from fedpriv.runs.show._tables import views_text

SUMMARY: dict[str, Any] = {
    "privacy_view": "local",
    "target_epsilon": 8.0,
    "budget_epsilon": [],
    "epsilon_local_max": 7.996,
    "epsilon_rho_max": 16.2,
    "epsilon_aggregate_max": None,
    "delta_max": 1e-5,
    "accountant": "pld",
}
AUDIT: dict[str, Any] = {
    "kind": "tokens",
    "epsilon_lower": 0.129,
    "epsilon_lower_f_dp": 0.258,
    "delta": 1e-5,
    "confidence": 0.95,
    "num_correct": 44,
    "num_guesses": 74,
    "num_canaries": 150,
    "claimed_epsilon": 8.0,
    "refuted": False,
}


def test_the_closing_line_quotes_the_view_that_the_target_was_set_on():
    assert _closing_line(SUMMARY) == "ε 8.00 on the local view, target 8; by pld, at δ 1e-5; rho 16.2"
    on_rho = _closing_line(SUMMARY | {"privacy_view": "rho", "target_epsilon": None, "budget_epsilon": [20.0]})
    assert on_rho == "ε 16.2 on the rho view, budget 20; by pld, at δ 1e-5; local 8.00"
    summed = _closing_line(SUMMARY | {"privacy_view": "aggregate", "epsilon_aggregate_max": 1.0})
    assert summed.startswith("ε 1.00 on the aggregate view, target 8")


def test_a_run_of_an_earlier_version_and_one_without_noise_have_a_line_too():
    older = {key: value for key, value in SUMMARY.items() if key != "target_epsilon"}
    assert _closing_line(older) == "ε 8.00 on the local view; by pld, at δ 1e-5; rho 16.2"
    assert _closing_line(SUMMARY | {"epsilon_local_max": None}).startswith("ε ∞ on the local view")


def test_of_several_budgets_the_smallest_is_named():
    assert limit_of(None, [4.0, 2.0]) == ("smallest budget", 2.0)
    assert limit_of(None, [4.0, 4.0]) == ("budget", 4.0)
    assert limit_of(3.0, [4.0]) == ("target", 3.0)
    assert limit_of(None, []) is None


def test_views_that_do_not_hold_are_left_out():
    epsilons = {"local": 1.0, "rho": 2.0, "aggregate": None}
    assert views_text(epsilons, "rho", ("target", 3.0)) == "2.00 of 3 rho, 1.00 local"


def test_a_target_stands_with_what_this_run_spent_and_a_budget_with_the_whole_of_a_shared_account():
    shared = SUMMARY | {"target_epsilon": 1.0, "epsilon_this_run_max": 0.996, "epsilon_before_max": 9.0}
    shared |= {"epsilon_local_max": 9.4}
    assert _closing_line(shared) == (
        "ε 0.996 of target 1 in this run, 9.00 in the account before it: 9.40 on the local view; by pld, at δ 1e-5; "
        "rho 16.2"
    )
    budgeted = _closing_line(shared | {"target_epsilon": None, "budget_epsilon": [12.0]})
    assert "0.996 in this run, 9.00 in the account before it: 9.40 on the local view, budget 12" in budgeted
    unbounded = _closing_line(shared | {"epsilon_before_max": None, "epsilon_local_max": None})
    assert "∞ in the account before it" in unbounded
    text = views_text({"local": 9.4, "rho": 16.2}, "local", ("target", 1.0), (0.996, 9.0))
    assert text == "0.996 of target 1 in this run, 9.00 in the account before it: 9.40 local, 16.2 rho"


@pytest.mark.parametrize(("refuted", "verdict"), [(False, "the claim of ε = 8.00 stands"), (True, "this refutes")])
def test_an_audit_is_a_lower_bound_rounded_down_with_what_it_means_for_the_claim(refuted, verdict):
    line = _audit_line(AUDIT | {"refuted": refuted})
    assert line.startswith(
        "ε ≥ 0.12 at δ = 1e-5, ≥ 0.25 by f-DP, with 95% confidence: 44 of 74 guesses about 150 canaries (tokens) were "
        "right; "
    )
    assert verdict in line


def test_an_audit_of_an_earlier_version_and_one_that_rejects_everything_are_told_too():
    earlier = {key: value for key, value in AUDIT.items() if key != "epsilon_lower_f_dp"}
    assert _audit_line(earlier).startswith("ε ≥ 0.12 at δ = 1e-5, with 95% confidence")
    assert audit_bound(earlier) == "ε = 0.12 at δ = 1e-5"
    assert audit_bound(AUDIT) == "ε = 0.12 at δ = 1e-5"
    assert audit_curve_bound(AUDIT) == "ε = 0.25"
    assert audit_curve_bound(AUDIT | {"epsilon_lower_f_dp": None}) == "ε = ∞"
    assert audit_curve_bound(earlier) is None

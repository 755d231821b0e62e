"""What a run has spent as one line: on the view that its target or budget was set on first, and by which accountant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedpriv.runs.show.tables import MISSING, asked_first, format_bound, format_delta


def limit_of(target: float | None, budgets: Sequence[float]) -> tuple[str, float] | None:
    """What a run may spend, by its name and size: its target, else its smallest budget; None without either."""
    if target is not None:
        return "target", target
    return ("budget" if len(set(budgets)) == 1 else "smallest budget", min(budgets)) if budgets else None


def views_text(epsilons: Mapping[str, float | None], view: str, limit: float | None = None) -> str:
    """The epsilons by view, such as `2.30 of 2.30 local, 5.09 rho`.

    Args:
        epsilons: {view: epsilon}; None where a view does not hold.
        view: that was asked for, which comes first, with the limit.
        limit: on that view, if there is one.
    """
    of = "" if limit is None else f" of {limit:.4g}"
    parts = [
        f"{format_bound(epsilon)}{of if name == view else ''} {name}"
        for name in asked_first(view)
        if (epsilon := epsilons.get(name)) is not None
    ]
    return ", ".join(parts)


def closing_line(summary: Mapping[str, Any]) -> str:
    """What the run has spent in the end, on the view that was asked for first.

    Args:
        summary: of a run, with the keys of `fedpriv.runs.reader.SUMMARY_KEYS`; the target of one of an earlier version
            is not known.
    """
    view = summary["privacy_view"]
    epsilons = {name: summary.get(f"epsilon_{name}_max") for name in asked_first(view)}
    others = ", ".join(f"{name} {format_bound(e)}" for name, e in epsilons.items() if name != view and e is not None)
    limit = limit_of(summary.get("target_epsilon"), summary["budget_epsilon"])
    of = f", {limit[0]} {limit[1]:.4g}" if limit else ""
    return (
        f"ε {format_bound(epsilons[view])} on the {view} view{of}; by {summary['accountant']}, at δ "
        f"{format_delta(summary['delta_max'])}{f'; {others}' if others else ''}"
    )


def audit_bound(audit: Mapping[str, Any] | None) -> str | None:
    """An audit's lower bound of epsilon; None without an audit."""
    if not audit:
        return None
    return f"ε = {_rounded_down(audit)} at δ = {format_delta(audit['delta'])}"


def audit_line(audit: Mapping[str, Any]) -> str:
    """What an audit found, against what the run claims.

    Args:
        audit: `audit` of a run's summary.
    """
    claim = audit["claimed_epsilon"]
    claimed = MISSING if claim is None else format_bound(claim)
    verdict = f"this refutes the claim of ε = {claimed}" if audit["refuted"] else f"the claim of ε = {claimed} stands"
    return (
        f"ε ≥ {_rounded_down(audit)} at δ = {format_delta(audit['delta'])}, with {audit['confidence']:.0%} confidence: "
        f"{audit['num_correct']} of {audit['num_guesses']} guesses about {audit['num_canaries']} canaries "
        f"({audit['kind']}) were right; {verdict}"
    )


def _rounded_down(audit: Mapping[str, Any]) -> str:
    """A lower bound is rounded down, where every other figure is rounded up."""
    return f"{math.floor(100 * audit['epsilon_lower']) / 100:.2f}"

"""Which clients' variants of the last round recur: integral privacy in a federation, beside the run's epsilons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.integral.adapters import RecurringVariants, recurring_adapters
from server.summary import Outcome


def recurring(config: RunConfig, outcome: Outcome) -> list[RecurringVariants]:
    """Clusters of the clients whose uploads count in the last round, by falling recurrence; none without a threshold.

    Uploads of one round started from one model, so they are compared by what they add to it.
    """
    if config.integral_epsilon is None:
        return []
    last = outcome.rows[-1].round
    clients = sorted(row.client for row in outcome.client_rows if row.round == last and row.status == "ok")
    uploads = outcome.strategy.uploads
    adapters: dict[str, Adapter] = {f"client-{client}": uploads[client][0] for client in clients if client in uploads}
    if not adapters:
        return []
    return recurring_adapters(
        adapters, config.integral_epsilon, clustering="complete", scale=config.alpha / config.rank
    )


def as_summary(config: RunConfig, found: Iterable[RecurringVariants], mean: str) -> dict[str, Any] | None:
    """What the run's summary and report say of it; None where nobody asked.

    Args:
        config: of the run.
        found: by `recurring`.
        mean: name of the variant that holds the mean of the first of them.
    """
    if config.integral_epsilon is None:
        return None
    clusters = [
        {
            "clients": list(each.clients),
            "recurrence": each.recurrence,
            "k": each.k,
            "largest_difference": each.largest_difference,
        }
        for each in found
    ]
    return {"epsilon": config.integral_epsilon, "mean": mean if clusters else None, "clusters": clusters}

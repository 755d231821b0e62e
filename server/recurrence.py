"""Clients' variants of the last round that recur: integral privacy in a federation, beside the run's epsilons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.integral.adapters import RecurringVariants, recurring_adapters
from server.summary import Outcome


def recurring(config: RunConfig, outcome: Outcome) -> list[RecurringVariants]:
    """Clusters of the clients whose uploads the last round used, most recurrent first; none without a threshold.

    All uploads of a round were trained from one model, so they are compared by what they add to it.
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


def as_summary(config: RunConfig, clusters: Iterable[RecurringVariants], mean: str) -> dict[str, Any] | None:
    """The entry for the run's summary; None without a threshold.

    Args:
        config: of the run.
        clusters: from `recurring`.
        mean: name of the variant that holds the mean of the first cluster.
    """
    if config.integral_epsilon is None:
        return None
    entries = [
        {
            "clients": list(cluster.clients),
            "recurrence": cluster.recurrence,
            "k": cluster.k,
            "largest_difference": cluster.largest_difference,
        }
        for cluster in clusters
    ]
    return {"epsilon": config.integral_epsilon, "mean": mean if entries else None, "clusters": entries}

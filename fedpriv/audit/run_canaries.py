"""Canaries in the clients' data of a run that its own coordinator simulates, and what its final model tells of them."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any, cast

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.audit.black_box import AuditedClient, CanaryPlan, Kind, audit_run, audited_client
from fedpriv.config import RunConfig
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training.workbench import Workbench

CONFIDENCE = 0.95


def audited(config: RunConfig, bench: Workbench, place: int) -> AuditedClient | None:
    """A client with its canaries; None in a run without an audit.

    The coins take the run's seed, since the auditor has to know them: they protect canaries alone, which nobody owns.

    Args:
        config: of the run.
        bench: that has the client's records.
        place: of the client among them.

    Raises:
        InputError: there are too few records.
    """
    if not config.audit:
        return None
    return _audited(bench, place, config.audit, config.audit_canaries, config.seed)


@lru_cache(maxsize=4096)
def _audited(bench: Workbench, place: int, kind: str, num: int, seed: int) -> AuditedClient:
    """One object for each client: what is cached of its records goes by their identity."""
    return audited_client(
        bench.client(place),
        CanaryPlan(kind=cast(Kind, kind), num=num),
        num_labels=len(bench.data.label_names),
        vocabulary=bench.base.model.config.vocab_size,
        canary_source=SeededSource(seed, place, "canaries"),
        coins=SeededSource(seed, place, "coins"),
    )


def audit_of(
    config: RunConfig, bench: Workbench, final: Adapter, *, delta: float, claimed_epsilon: float
) -> dict[str, Any] | None:
    """What the canaries say of the run's epsilon, for its summary; None in a run without an audit.

    The number of guesses, half of the canaries, is fixed before anything is seen.

    Args:
        config: of the run.
        bench: that has all clients' records; its model gets another adapter.
        final: the global adapter after the last round.
        delta: the largest of the clients.
        claimed_epsilon: the largest of the clients, on the local view; infinite without noise.
    """
    clients = [audited(config, bench, place) for place in range(len(bench.data.clients))]
    found = [client for client in clients if client is not None]
    if not found:
        return None
    bench.model.merge({})
    num_guesses = max(1, sum(len(client.canaries) for client in found) // 2)
    result = audit_run(
        bench.model, bench.initial, final, found, num_guesses=num_guesses, delta=delta, confidence=CONFIDENCE
    )
    refuted = result.epsilon_lower > claimed_epsilon
    return {"kind": config.audit, **asdict(result), "claimed_epsilon": claimed_epsilon, "refuted": refuted}

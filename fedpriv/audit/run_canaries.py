"""Audit of a simulated run: canaries in the clients' data, and a lower bound on epsilon from the final model."""

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


def audited(config: RunConfig, bench: Workbench, index: int) -> AuditedClient | None:
    """A client with its canaries; None in a run without an audit.

    The coins use the run's seed, since the auditor has to know them: they protect only canaries, which belong to
    nobody.

    Args:
        config: of the run.
        bench: with the client's records.
        index: of the client among the bench's clients.

    Raises:
        InputError: there are too few records.
    """
    if not config.audit:
        return None
    return _audited(bench, index, config.audit, config.audit_canaries, config.seed)


@lru_cache(maxsize=4096)
def _audited(bench: Workbench, index: int, kind: str, num: int, seed: int) -> AuditedClient:
    """Always the same object for a client, because caches of its records use object identity."""
    return audited_client(
        bench.client(index),
        CanaryPlan(kind=cast(Kind, kind), num=num),
        num_labels=len(bench.data.label_names),
        vocabulary=bench.base.model.config.vocab_size,
        canary_source=SeededSource(seed, index, "canaries"),
        coins=SeededSource(seed, index, "coins"),
    )


def audit_of(
    config: RunConfig, bench: Workbench, final: Adapter, *, delta: float, claimed_epsilon: float
) -> dict[str, Any] | None:
    """The audit of the run's epsilon by its canaries, for the summary; None in a run without an audit.

    The number of guesses, half of the canaries (or one less, to be even), is fixed beforehand.

    Args:
        config: of the run.
        bench: with all clients' records; the adapter of its model is changed.
        final: the global adapter after the last round.
        delta: the largest of the clients.
        claimed_epsilon: the largest of the clients, on the local view; infinite without noise.
    """
    maybe_clients = [audited(config, bench, index) for index in range(len(bench.data.clients))]
    clients = [client for client in maybe_clients if client is not None]
    if not clients:
        return None
    bench.model.merge({})
    # Even, since half of the guesses are that a canary is in.
    num_guesses = 2 * max(1, sum(len(client.canaries) for client in clients) // 4)
    result = audit_run(
        bench.model, bench.initial, final, clients, num_guesses=num_guesses, delta=delta, confidence=CONFIDENCE
    )
    refuted = result.epsilon_lower > claimed_epsilon
    return {"kind": config.audit, **asdict(result), "claimed_epsilon": claimed_epsilon, "refuted": refuted}

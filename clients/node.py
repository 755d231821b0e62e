"""What a data holder's node configuration says; no run's configuration changes it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from fedpriv.config import EMBEDDED, ON_NODES, RunConfig, Scalar, parse
from fedpriv.data.text import DataSource
from fedpriv.journal import Journal
from fedpriv.training.workbench import Workbench, workbench
from fedpriv.vault.guard import NodePolicy, RefusedError
from fedpriv.vault.policy import Limits

# A node whose operator also starts the runs, as in a simulation, may take data and rules from the run's configuration.
TRUST_KEY = "trust-run-config"
TRUST_VARIABLE = "FEDPRIV_TRUST_RUN_CONFIG"

# The keys of a node configuration.
CLIENT_KEY = "partition-id"
NAME_KEY = "name"
DATA_KEY = "data"
COLUMN_KEYS = {
    "text-column": "text_column",
    "text-pair-column": "text_pair_column",
    "label-column": "label_column",
}
LEDGER_KEY = "ledger"
BUDGET_KEY = "budget-epsilon"
DELTA_KEY = "delta"
POLICY_KEY = "policy"
IDENTITY_KEY = "identity-key"
EVENTS_KEY = "events"


@lru_cache(maxsize=4)
def _parsed(items: tuple[tuple[str, Scalar], ...]) -> RunConfig:
    """The checked configuration, cached: every message carries it, and checking takes longer than an empty round."""
    return parse(dict(items))


def configuration(context: Context) -> RunConfig:
    """The run's configuration, if this node takes part in such runs.

    Raises:
        RefusedError: the run would use records other than those that the holder named.
    """
    config = _parsed(tuple(context.run_config.items()))
    if DATA_KEY in context.node_config and config.data != ON_NODES:
        raise RefusedError(
            f"data = {config.data!r}: this node holds records of its own; the run needs data = {ON_NODES}"
        )
    if config.data == ON_NODES and DATA_KEY not in context.node_config:
        raise RefusedError(f"data = {ON_NODES}: this node's configuration names no {DATA_KEY}")
    if config.data not in (EMBEDDED, ON_NODES) and not trusts_run_config(context):
        raise RefusedError(
            f"data = {config.data!r}: this node takes no data from a run's configuration; in a simulation set "
            f"{TRUST_VARIABLE}=1"
        )
    if config.audit and config.data != EMBEDDED and not trusts_run_config(context):
        raise RefusedError(f"audit = {config.audit!r}: this node puts no canaries among its records")
    return config


def trusts_run_config(context: Context) -> bool:
    """Whether the node's holder also starts the runs."""
    return bool(context.node_config.get(TRUST_KEY)) or os.environ.get(TRUST_VARIABLE) == "1"


def bench_of(config: RunConfig, context: Context) -> Workbench:
    """Model and records of this node in the run."""
    return workbench(config, _data_source(config, context))


def _data_source(config: RunConfig, context: Context) -> DataSource | None:
    if config.data != ON_NODES:
        return None
    node = context.node_config
    columns = {field: str(node[key]) for key, field in COLUMN_KEYS.items() if key in node}
    return DataSource(data=str(node[DATA_KEY]), **columns)


def client_of(context: Context, num_clients: int) -> int:
    """The partition id.

    Raises:
        ValueError: no client of this run has it.
    """
    client = context.node_config.get(CLIENT_KEY)
    if not isinstance(client, int) or not 0 <= client < num_clients:
        raise ValueError(f"{CLIENT_KEY} = {client!r}: must lie in 0..{num_clients - 1}, the clients of this run")
    return client


def index_of(config: RunConfig, client: int) -> int:
    """The client's index among the data holders whose records this process has."""
    return 0 if config.data == ON_NODES else client


def journal_of(context: Context) -> Journal:
    """The journal of the node's events; it writes nothing unless the node names a file."""
    path = context.node_config.get(EVENTS_KEY)
    return Journal(Path(str(path)) if path else None, client=context.node_config.get(CLIENT_KEY))


def policy_of(config: RunConfig, context: Context, client: int) -> NodePolicy:
    """What the node allows: anything on the synthetic corpus, and on a holder's data only what the holder agreed to.

    Ledger, budget, delta and policy file are the holder's own. A node that trusts the run takes from it what the holder
    left open.
    """
    trusted = trusts_run_config(context)
    node = context.node_config
    ledger = Path(str(node[LEDGER_KEY])) if LEDGER_KEY in node else None
    open_ = config.data == EMBEDDED or trusted
    limits = Limits.read(Path(str(node[POLICY_KEY]))) if POLICY_KEY in node else None if open_ else Limits()
    policy = NodePolicy(
        allow_not_private=config.data == EMBEDDED or (trusted and (config.simulate or config.public_data)),
        allow_unrecorded=open_,
        limits=limits,
        ledger=ledger,
        budget_epsilon=float(node[BUDGET_KEY]) if BUDGET_KEY in node else None,
        delta=float(node[DELTA_KEY]) if DELTA_KEY in node else None,
    )
    if not trusted:
        return policy
    if ledger is None and config.ledger:
        policy = replace(policy, ledger=Path(f"{config.ledger}.nodes") / f"{client}.sqlite")
    # A node sees only its own uploads, so it enforces budgets on the `local` view, which is too strict for `aggregate`.
    budget = config.budget_of(client) if config.privacy_view != "aggregate" else None
    return replace(
        policy,
        budget_epsilon=policy.budget_epsilon if policy.budget_epsilon is not None else budget,
        delta=policy.delta if policy.delta is not None else config.delta,
    )

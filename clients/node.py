"""A simulated data holder in this process: what its node's configuration says, and its side of a round.

The vault's functions answer. The vault of a node with records of its own has its settings.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from flwr.app import Context

from fedpriv.config import EMBEDDED, RunConfig
from fedpriv.files import Journal
from fedpriv.holder.vault import NodePolicy, refused
from fedpriv.holder.vault import answer as vault
from fedpriv.holder.vault.answer import Prepared
from fedpriv.holder.vault.holder import Holder, parsed
from fedpriv.holder.vault.settings import NodeLimits, VaultSettings
from fedpriv.holder.wire.frame import Request, Response
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.ledger.reader import path_of

# A node whose operator also starts the runs, as in a simulation, may take data and rules from the run's configuration.
TRUST_KEY = "trust-run-config"
TRUST_VARIABLE = "FEDPRIV_TRUST_RUN_CONFIG"

# The keys of a node configuration.
CLIENT_KEY = "partition-id"
LEDGER_KEY = "ledger"
BUDGET_KEY = "budget-epsilon"
DELTA_KEY = "delta"
POLICY_KEY = "policy"
EVENTS_KEY = "events"
# A folder with a vault's settings, whose part this process then plays: a simulation of a deployed node.
FOLDER_KEY = "vault-folder"


def holder_of(context: Context) -> Holder:
    """The data holder of a node.

    Raises:
        InputError: the run's configuration, the policy file or the vault's settings are wrong.
    """
    node = context.node_config
    if FOLDER_KEY in node:
        return Holder.of(VaultSettings.read(Path(str(node[FOLDER_KEY]))))
    config = parsed(context.run_config)
    path, client = node.get(EVENTS_KEY), node.get(CLIENT_KEY)
    return Holder(
        client=client,
        policy=_policy(config, context),
        trusts_run=trusts_run_config(context),
        journal=Journal(Path(str(path)) if path else None, client=client),
    )


def trusts_run_config(context: Context) -> bool:
    """Whether the node's holder also starts the runs."""
    return bool(context.node_config.get(TRUST_KEY)) or os.environ.get(TRUST_VARIABLE) == "1"


def _policy(config: RunConfig, context: Context) -> NodePolicy:
    """The policy of the node: anything on the synthetic corpus, and on other data only what the holder agreed to.

    Ledger, budget, delta and policy file are the holder's own. A node that trusts the run takes from it what the holder
    left open.
    """
    trusted = trusts_run_config(context)
    node = context.node_config
    ledger = Path(str(node[LEDGER_KEY])) if LEDGER_KEY in node else None
    open_ = config.data == EMBEDDED or trusted
    limits = NodeLimits.read(Path(str(node[POLICY_KEY]))) if POLICY_KEY in node else None if open_ else NodeLimits()
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
    client = node.get(CLIENT_KEY)
    if ledger is None and config.ledger:
        policy = replace(policy, ledger=_simulated_ledger(config, client))
    if not isinstance(client, int):
        return policy
    # A node sees only its own uploads, so it enforces budgets on the `local` view, which is too strict for `aggregate`.
    budget = config.budget_of(client) if config.privacy_view != "aggregate" else None
    return replace(
        policy,
        budget_epsilon=policy.budget_epsilon if policy.budget_epsilon is not None else budget,
        delta=policy.delta if policy.delta is not None else config.delta,
        fixed_schedule=True,
    )


def _simulated_ledger(config: RunConfig, client: object) -> Path | None:
    """The ledger that a run keeps for a holder whom it simulates; None for a client that the run does not have."""
    known = workbench(config).accounts
    if not isinstance(client, int) or not 0 <= client < len(known):
        return None
    return path_of(Path(config.ledger), known[client])


def answered(request: Request, context: Context) -> Response:
    """The node's answer to a request of any kind."""
    try:
        return vault.answer(request, holder_of(context))
    except Exception as error:
        return failed(error)


def prepare(request: Request, context: Context) -> Prepared | Response:
    """The update that a request asks for, checked and charged; or the response if there is nothing to execute."""
    try:
        return vault.prepare(request, holder_of(context))
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> Response:
    """The response to a request that failed; the error's text must not leave the node."""
    return refused(error, Journal(None))

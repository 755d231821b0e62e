"""Asks the nodes how much of a run their budgets allow, before anything is charged, so that none is begun in vain."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import AFFORD, Request
from server.costs import RoundCosts
from server.exchange import Exchange, MalformedError, answer_in, message_to
from server.observer import Observer
from server.registration import NO_NODE, Nodes, label_of

log = logging.getLogger("flwr")

# How long nodes have to answer, which they do from their ledgers alone.
_SECONDS = 60.0


def check_affordable(
    grid: Grid, config: RunConfig, nodes: Nodes, costs: RoundCosts, *, after: int, observer: Observer
) -> None:
    """Refuse a run that the nodes' own budgets end before its last round; tell the observer of nodes that end sooner.

    A node that cannot answer keeps no run from beginning. A run that is resumed is told
    of short budgets and goes on: a round that was lost may be paid for, and what it has learned is kept.

    Args:
        grid: Flower's connection to the nodes.
        config: of the run, with its noise.
        nodes: that take part.
        costs: of its rounds.
        after: the round after which the run goes on, or 0.
        observer: of the run.

    Raises:
        InputError: fewer nodes than the run needs can take part in all of its rounds; says how many rounds fit.
    """
    rounds = _affordable(grid, config, nodes, costs, after)
    if not (short := {client: number for client, number in rounds.items() if number < config.rounds}):
        return
    each = ", ".join(f"{label_of(nodes, client)}: {number}" for client, number in sorted(short.items()))
    # A node that is asked in some rounds alone may do with fewer, but needs one.
    needed = 1 if 0 < config.clients_per_round < len(nodes) else config.rounds
    if after or len(nodes) - sum(number < needed for number in short.values()) >= config.min_clients:
        observer.notice(f"nodes' budgets allow fewer than the {config.rounds} rounds of this run: {each}")
        return
    most = sorted((rounds.get(client, config.rounds) for client in nodes), reverse=True)[config.min_clients - 1]
    fitting = f"no more than {most} of them fit" if most else "not one fits"
    better = "a smaller target_epsilon" if config.target_epsilon else "fewer rounds, or more noise"
    raise InputError(
        f"rounds = {config.rounds}: nodes' budgets allow fewer with this noise ({each}); {fitting}; nothing was "
        f"charged; use {better}"
    )


def _affordable(grid: Grid, config: RunConfig, nodes: Nodes, costs: RoundCosts, after: int) -> Mapping[int, int]:
    """{client: the round up to which its node's budget lasts}, of the nodes that say so."""
    asked = list[tuple[Message, int]]()
    for client, (node_id, _) in nodes.items():
        if node_id == NO_NODE:
            continue
        fields = kinds.pack_plan(costs.planned(client, after, config.rounds - after))
        asked.append((message_to(node_id, Request.of(AFFORD, fields=fields)), client))
    replies = list(Exchange().replies(grid, [message for message, _ in asked], _SECONDS))
    # Messages have ids once they are sent; an error of the link names no node.
    by_message = {message.metadata.message_id: client for message, client in asked}
    found = {}
    for reply in replies:
        client = by_message[reply.metadata.reply_to_message_id]
        try:
            answer: kinds.Affordable = answer_in(reply, AFFORD)
        except MalformedError as error:
            log.warning("node of client %s does not say what its budget allows: %s", client, error)
            continue
        rounds = max(0, answer.releases - len(costs.evaluation_releases))
        found[client] = min(after + rounds, config.rounds)
    return found

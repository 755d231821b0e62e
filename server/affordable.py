"""Asks the nodes what of a run they allow, before anything is charged, so that none is begun in vain."""

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

# How long nodes have to answer, at least.
_SECONDS = 60.0


def check_affordable(
    grid: Grid, config: RunConfig, nodes: Nodes, costs: RoundCosts, *, after: int, observer: Observer
) -> dict[int, float]:
    """Refuse a run that a node's policy, its time or the nodes' budgets do not allow; the nodes' reply times.

    The observer is told of nodes whose budgets end sooner. A node that cannot answer keeps no run from beginning. A run
    that is resumed is told of all that is short and goes on: a round that was lost may be paid for, and what it has
    learned is kept.

    Args:
        grid: Flower's connection to the nodes.
        config: of the run, with its noise.
        nodes: that take part.
        costs: of its rounds.
        after: the round after which the run goes on, or 0.
        observer: of the run.

    Returns:
        {client: T, the most seconds after which a reply leaves}, of the nodes that say so.

    Raises:
        InputError: nobody was charged, and one line says what a node does not allow: what its policy refuses, replies
            later than the end of a round, or as many rounds, so that fewer than the run needs can take part in all.
    """
    answers = _answers(grid, config, nodes, costs, after)
    seconds = {client: answer.reply_seconds for client, answer in answers.items()}
    objections = [
        *(
            f"{label_of(nodes, client)} refuses it: {each.objection}"
            for client, each in answers.items()
            if each.objection
        ),
        *(
            f"round_seconds = {config.round_seconds:g}: {label_of(nodes, client)} replies after {taken:,.0f} s"
            for client, taken in seconds.items()
            if taken > config.round_seconds
        ),
    ]
    if objections and not after:
        late = f"; {kinds.LATE_CURES}" if max(seconds.values()) > config.round_seconds else ""
        raise InputError(f"{'; '.join(objections)}; nothing was charged, at no node{late}")
    for objection in objections:
        observer.notice(objection)
    rounds = {
        client: min(after + max(0, answer.releases - len(costs.evaluation_releases)), config.rounds)
        for client, answer in answers.items()
    }
    _check_rounds(rounds, config, nodes, after=after, observer=observer)
    return seconds


def _check_rounds(
    rounds: Mapping[int, int], config: RunConfig, nodes: Nodes, *, after: int, observer: Observer
) -> None:
    """Refuse a run of which too few nodes can pay for all rounds, or tell of those that cannot.

    Args:
        rounds: {client: the round up to which its node's budget lasts}, of the nodes that say so.
        config, nodes, after, observer: as for `check_affordable`.
    """
    if not (short := {client: number for client, number in rounds.items() if number < config.rounds}):
        return
    present = [client for client, (node_id, _) in nodes.items() if node_id != NO_NODE]
    each = ", ".join(f"{label_of(nodes, client)}: {number}" for client, number in sorted(short.items()))
    # A node that is asked in some rounds alone may do with fewer, but needs one.
    needed = 1 if 0 < config.clients_per_round < len(nodes) else config.rounds
    if after or len(present) - sum(number < needed for number in short.values()) >= config.min_clients:
        observer.notice(f"nodes' budgets allow fewer than the {config.rounds} rounds of this run: {each}")
        return
    most = sorted((rounds.get(client, config.rounds) for client in present), reverse=True)[config.min_clients - 1]
    fitting = f"no more than {most} of them fit" if most else "not one fits"
    better = "a smaller target_epsilon" if config.target_epsilon else "fewer rounds, or more noise"
    raise InputError(
        f"rounds = {config.rounds}: nodes' budgets allow fewer with this noise ({each}); {fitting}; nothing was "
        f"charged; use {better}"
    )


def _answers(
    grid: Grid, config: RunConfig, nodes: Nodes, costs: RoundCosts, after: int
) -> Mapping[int, kinds.Affordable]:
    """{client: what its node allows of the run}, of the nodes that say so."""
    asked = list[tuple[Message, int]]()
    for client, (node_id, _) in nodes.items():
        if node_id == NO_NODE:
            continue
        left = after, config.rounds - after
        fields = kinds.pack_plan(costs.planned(client, *left), costs.asked(client, *left))
        asked.append((message_to(node_id, Request.of(AFFORD, fields=fields)), client))
    # As long as for a registration: a node loads the model, to find out how long its replies take.
    seconds = max(_SECONDS, config.registration_seconds)
    replies = list(Exchange().replies(grid, [message for message, _ in asked], seconds))
    # Messages have ids once they are sent; an error of the link names no node.
    by_message = {message.metadata.message_id: client for message, client in asked}
    found = {}
    for reply in replies:
        client = by_message[reply.metadata.reply_to_message_id]
        try:
            found[client] = answer_in(reply, AFFORD)
        except MalformedError as error:
            log.warning("%s does not say what it allows: %s", label_of(nodes, client), error)
    return dict(sorted(found.items()))

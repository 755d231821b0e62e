"""Clients whose nodes stopped answering: skipped, and so not charged, until their node registers again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from flwr.app import Message
from flwr.serverapp import Grid

from server.registration import NO_NODE, Inquiry, Nodes, check_same, read_registration
from server.round import Round

log = logging.getLogger("flwr")

ROUNDS_WITHOUT_ANSWER = 2
"""After so many rounds in a row in which a client was asked and its node answered nothing, it is skipped."""

OnChange = Callable[[Literal["skipped", "returned"], int, int], None]
"""(what happened, client, round)"""


class Absences:
    """Who is skipped; it depends on which answers arrived, and on nothing that they say.

    An answer is whatever the node itself sends, errors included; what the link says in its name is none.

    Args:
        nodes: {client: (node id, registration)}; one that comes back under another id gets that one here. A client
            with `NO_NODE` is skipped from the start.
        node_keys: as in `register_nodes`; without them nothing proves that another node id is the same node.
        on_change: called for each client that is skipped from now on, or asked again.
    """

    def __init__(self, nodes: Nodes, *, node_keys: Path | None = None, on_change: OnChange = lambda *_: None) -> None:
        self._nodes, self._node_keys, self._on_change = nodes, node_keys, on_change
        self._missed = {client: ROUNDS_WITHOUT_ANSWER for client, (node_id, _) in nodes.items() if node_id == NO_NODE}
        self._inquiry = Inquiry()

    @property
    def skipped(self) -> list[int]:
        """The clients that are not asked, in order."""
        return [client for client, number in sorted(self._missed.items()) if number >= ROUNDS_WITHOUT_ANSWER]

    def note(self, round_: Round) -> None:
        """Count a finished round."""
        before = self.skipped
        for client in round_.statuses:
            self._missed[client] = 0 if client in round_.heard else self._missed.get(client, 0) + 1
        for client in self.skipped:
            if client not in before:
                self._on_change("skipped", client, round_.number)

    def look_for(self, grid: Grid, round_: int) -> None:
        """Ask nodes that take no part to register, and let those back in that were asked before and have done so.

        It does not wait: who registers now is found by the next call. Nobody is charged.

        Args:
            grid: Flower's connection to the nodes.
            round_: the one that is about to begin.
        """
        if not (skipped := self.skipped):
            return
        present = {node_id for client, (node_id, _) in self._nodes.items() if client not in skipped}
        for node_id, reply in self._inquiry.answers(grid, leave_out=present):
            try:
                client = self._returned(node_id, reply)
            except ValueError as error:
                log.warning("node %s stays out: %s", node_id, error)
                continue
            self._missed[client] = 0
            self._on_change("returned", client, round_)

    def _returned(self, node_id: int, reply: Message) -> int:
        """The skipped client whose node has registered again.

        Raises:
            ValueError: it is not the node, or not the data, with which the client began.
        """
        now = read_registration(reply, self._node_keys)
        client = now.client
        if client not in self.skipped:
            raise ValueError(f"partition-id = {client}: is not one that is missing")
        known, then = self._nodes[client]
        if node_id != known and self._node_keys is None:
            raise ValueError(f"partition-id = {client}: began as node {known}, and no node_keys prove who this one is")
        check_same(then, now)
        if now.identity != then.identity:
            raise ValueError(f"partition-id = {client}: began with another key")
        self._nodes[client] = node_id, then
        return client

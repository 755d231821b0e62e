"""Registration: every node states its partition id and N_k once, before the first round."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedpriv import protocol
from fedpriv.deployment import keys
from fedpriv.errors import InputError
from fedpriv.ledger.entries import DataSet
from fedpriv.protocol import Registration
from server.replies import reason_of

log = logging.getLogger("flwr")

_POLL_SECONDS = 0.5

Nodes = dict[int, tuple[int, Registration]]
"""{partition id: (node id, registration)}"""


def register_nodes(grid: Grid, *, num_expected: int, wait: float, node_keys: Path | None = None) -> Nodes:
    """The nodes that take part, ordered by partition id.

    Weights, sampling probabilities and delta come from these numbers; no later reply changes them. Nodes that connect
    during the wait are asked as well.

    Args:
        grid: Flower's connection to the nodes.
        num_expected: how many nodes to wait for.
        wait: seconds to wait for them; after that the run starts with those that registered.
        node_keys: folder with the public key of each node, as PARTITION-ID.pub; None requires no signature.

    Raises:
        InputError: no node registered, or two nodes claim one partition id.
    """
    deadline = time.monotonic() + wait
    nodes: Nodes = {}
    waiting: dict[str, int] = {}
    answered: set[int] = set()
    while True:
        asked = {*answered, *waiting.values()}
        new = [node_id for node_id in grid.get_node_ids() if node_id not in asked]
        messages = [Message(RecordDict(), node_id, protocol.REGISTER, group_id="0") for node_id in new]
        grid.push_messages(messages)
        waiting |= {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        for reply in list(grid.pull_messages(list(waiting))) if waiting else ():
            node_id = waiting.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.metadata.src_node_id != node_id:
                # The link gave up on a node that was gone; the node is asked again if it comes back.
                log.warning("node %s: %s", node_id, reason_of(reply))
                continue
            answered.add(node_id)
            _add(reply, node_id, nodes, node_keys)
        if len(nodes) >= num_expected or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    if not nodes:
        raise InputError(
            f"{len(answered)} nodes answered within {wait:.0f} s, none of which can take part; the log says why"
        )
    if len(nodes) < num_expected:
        log.warning("%s of %s nodes registered in %.0f s; the run starts with them", len(nodes), num_expected, wait)
    return dict(sorted(nodes.items()))


def _add(reply: Message, node_id: int, nodes: Nodes, node_keys: Path | None) -> None:
    """Add the node if its registration is sound."""
    try:
        registration = read_registration(reply, node_keys)
    except ValueError as error:
        log.warning("node %s does not take part: %s", node_id, error)
        return
    if registration.client in nodes:
        raise InputError(f"partition-id = {registration.client}: two nodes claim it; give each node its own")
    nodes[registration.client] = (node_id, registration)


def read_registration(reply: Message, node_keys: Path | None) -> Registration:
    """The registration in a node's reply.

    Raises:
        ValueError: one line that says why the node cannot take part.
    """
    if reply.has_error():
        raise ValueError(reason_of(reply))
    if protocol.REGISTRATION not in reply.content.config_records:
        raise ValueError(f"{protocol.REGISTRATION}: missing")
    registration = protocol.unpack_registration(reply.content.config_records[protocol.REGISTRATION])
    if registration.software != protocol.SOFTWARE:
        raise ValueError(f"software = {registration.software!r}: the server runs {protocol.SOFTWARE}")
    if node_keys is not None:
        _check_signature(registration, node_keys / f"{registration.client}.pub")
    return registration


def _check_signature(registration: Registration, file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"partition-id = {registration.client}: no key {file.name} among node_keys")
    if not keys.verify(file.read_text(), protocol.statement_of(registration), registration.signature):
        raise ValueError(f"partition-id = {registration.client}: its registration is not signed with {file.name}")


def check_registered(known: DataSet, client: int, size: int, delta: float) -> None:
    """Refuse numbers that contradict what the ledger holds of a data set.

    Raises:
        InputError: names the number, both values and what to do.
    """
    for name, registered, claimed in (("num_records", known.num_records, size), ("delta", known.delta, delta)):
        if registered != claimed:
            raise InputError(
                f"{name} = {claimed}: client {client} registered its data set {known.id[:8]} with {registered}, which "
                "is final; register other data as a new data set"
            )

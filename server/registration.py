"""Registration: every node states its partition id and N_k once, before the first round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from fedpriv.errors import InputError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REGISTER, WAITING, Request
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.ledger import keys
from fedpriv.texts import holder_label, printable
from server.exchange import answer_in, message_to, reason_of

log = logging.getLogger("flwr")

_POLL_SECONDS = 0.5
# A node whose operator is to look at the run first is asked again after so long.
_WAITING_SECONDS = 5.0
# Nodes that are asked before their answers are read, which all at once would take more memory than the run.
_MOST_AT_ONCE = 1000

Nodes = dict[int, tuple[int, Registration]]
"""{partition id: (node id, registration)}"""


def label_of(nodes: Mapping[int, tuple[int, Registration]], client: int) -> str:
    """A holder by the name that it registered, with its partition id."""
    return holder_label(client, nodes[client][1].name if client in nodes else None)


NO_NODE = 0
"""Stands for the node of a client that took part before a run was interrupted, and has not registered since."""


class Inquiry:
    """Asks nodes to register, and remembers which have not answered yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}

    def answers(self, grid: Grid, *, leave_out: Collection[int]) -> Iterator[tuple[int, Message]]:
        """Ask the nodes that are online; (node id, answer) of those that have answered by now, without waiting.

        Args:
            grid: Flower's connection to the nodes.
            leave_out: nodes that are not asked.
        """
        asked = {*leave_out, *self._waiting.values()}
        new = [node_id for node_id in grid.get_node_ids() if node_id not in asked]
        request = Request.of(REGISTER)
        for start in range(0, max(1, len(new)), _MOST_AT_ONCE):
            messages = [message_to(node_id, request) for node_id in new[start : start + _MOST_AT_ONCE]]
            grid.push_messages(messages)
            self._waiting |= {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
            yield from self._pulled(grid)

    def _pulled(self, grid: Grid) -> Iterator[tuple[int, Message]]:
        for reply in list(grid.pull_messages(list(self._waiting))) if self._waiting else ():
            node_id = self._waiting.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.metadata.src_node_id != node_id:
                # The link gave up on a node that was gone; the node is asked again if it comes back.
                log.warning("node %s: %s", node_id, reason_of(reply))
                continue
            yield node_id, reply


def register_nodes(
    grid: Grid,
    *,
    num_expected: int,
    wait: float,
    node_keys: Path | None = None,
    may_be_missing: Collection[int] = (),
    secure_aggregation: bool = False,
    may_come: bool = True,
    goes_on: Callable[[], bool] = lambda: False,
) -> Nodes:
    """The nodes that take part, ordered by partition id.

    Weights, sampling probabilities and delta come from these numbers; no later reply changes them. Nodes that connect
    during the wait are asked as well.

    Args:
        grid: Flower's connection to the nodes.
        num_expected: how many nodes to wait for, those that may be missing among them.
        wait: seconds to wait for them; after that the run starts with those that registered.
        node_keys: folder with the public key of each node's vault, as PARTITION-ID.pub; None admits every key.
        may_be_missing: partition ids, among those expected, that are not waited for, nor are those that left.
        secure_aggregation: nodes are to sign their parts in sums, so each needs an identity, and one of its own.
        may_come: whether other nodes may come; those of every engine but Flower's are all there from the start.
        goes_on: whether nobody is to be waited for any more.

    Raises:
        InputError: no node registered, or two nodes claim one partition id.
    """
    may_be_missing = {*may_be_missing, *_left(node_keys)}
    began = time.monotonic()
    nodes: Nodes = {}
    inquiry, answered = Inquiry(), set[int]()
    waiting: dict[int, float] = {}
    while True:
        resting = {node_id for node_id, until in waiting.items() if until > time.monotonic()}
        for node_id, reply in inquiry.answers(grid, leave_out=answered | resting):
            if reply.has_error() and reply.error.code == WAITING:
                if node_id not in waiting:
                    log.warning("node %s: %s", node_id, reason_of(reply))
                waiting[node_id] = time.monotonic() + _WAITING_SECONDS
                continue
            answered.add(node_id)
            _add(reply, node_id, nodes, node_keys, secure_aggregation=secure_aggregation)
        are_all = len(nodes.keys() - set(may_be_missing)) >= num_expected - len(may_be_missing)
        nobody_left = not may_come and len(answered) >= num_expected
        if are_all or nobody_left or time.monotonic() > began + wait or goes_on():
            break
        time.sleep(_POLL_SECONDS)
    waited = time.monotonic() - began
    if not nodes:
        raise InputError(
            f"{len(answered)} nodes answered within {waited:.0f} s, none of which can take part; the log says why"
        )
    if not are_all:
        log.warning("%s of %s nodes registered in %.0f s; the run starts with them", len(nodes), num_expected, waited)
    return dict(sorted(nodes.items()))


def _left(node_keys: Path | None) -> set[int]:
    """The partition ids below the largest admitted one that have no key: of nodes that left, or were never admitted."""
    admitted = keys.files_of_nodes(node_keys) if node_keys else {}
    return set(range(max(admitted, default=0))) - admitted.keys()


def _add(reply: Message, node_id: int, nodes: Nodes, node_keys: Path | None, *, secure_aggregation: bool) -> None:
    """Add the node if its registration is sound; one that is not keeps no other node from taking part."""
    try:
        registration = read_registration(reply, node_keys)
        if secure_aggregation:
            _check_identity(registration, nodes)
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
    registration: Registration = answer_in(reply, REGISTER)
    if registration.software != kinds.SOFTWARE:
        raise ValueError(
            f"{holder_label(registration.client, registration.name)}: runs {printable(registration.software)}, the "
            f"coordinator {kinds.SOFTWARE}; install the same fedpriv at both, and restart the node"
        )
    _check_signature(registration, node_keys / f"{registration.client}.pub" if node_keys else None)
    return registration


def _check_identity(registration: Registration, nodes: Nodes) -> None:
    """Refuse a node that could not be told from another one in a sum.

    Raises:
        ValueError: it names no key, or that of a node which has registered before.
    """
    if not registration.identity:
        raise ValueError(f"partition-id = {registration.client}: names no identity, and sums are signed")
    for client, (_, other) in nodes.items():
        if client != registration.client and other.identity == registration.identity:
            raise ValueError(f"partition-id = {registration.client}: its identity is that of partition {client}")


def check_same(then: Registration, now: Registration) -> None:
    """Refuse a client that registers again in a run with something else than it began with.

    Raises:
        InputError: names the field.
    """
    # A node without a ledger does not know its earlier data sets, and names a new one every time; it is simulated, so
    # its name says whose the records are.
    for name in ("num_records", "keeps_replies", "data_set" if now.keeps_replies else "name"):
        if getattr(now, name) != getattr(then, name):
            raise InputError(
                f"{name} = {getattr(now, name)}: client {now.client} began this run with {getattr(then, name)}"
            )


def check_counted(nodes: Nodes, counted: Sequence[int], ledger: str) -> None:
    """Refuse simulated holders that do not have as many records, or persons, as their accounts were registered with.

    Args:
        nodes: that take part.
        counted: of each client, in the data.
        ledger: of the run.

    Raises:
        InputError: names the holder and both numbers.
    """
    for client, (_, registration) in nodes.items():
        if registration.num_records != counted[client]:
            raise InputError(
                f"num_records = {counted[client]}: {label_of(nodes, client)} has an account in {ledger} with "
                f"{registration.num_records}, which is final; put the data back, give other data another holder's "
                "name, or begin a new ledger"
            )


def _check_signature(registration: Registration, file: Path | None) -> None:
    """Refuse a registration that is not signed with the admitted key, or with the one that it names as its own."""
    name = f"partition-id = {registration.client}"
    if file is None and not registration.identity:
        return
    if file is None:
        if not keys.is_public_line(registration.identity):
            raise ValueError(f"{name}: its identity is no public key of a vault, `{keys.VAULT} ...`")
        admitted, named = registration.identity, "the key that it names as its identity"
    else:
        if not file.is_file():
            raise ValueError(f"{name}: no key {file.name} among node_keys; `admit` the node with its vault.key.pub")
        try:
            admitted, named = keys.read_public_line(file), file.name
        except InputError as error:
            raise ValueError(f"{name}: {error}") from None
    if not keys.verify(admitted, registration.signed, registration.signature):
        raise ValueError(f"{name}: its registration is not signed with {named}")
    if registration.identity != admitted:
        raise ValueError(f"{name}: its identity is not {named}, with which its registration is signed")

"""Nodes without a network: their messages wait in a mailbox for somebody who carries them; all others go by network.

A run with such nodes has a mailbox next to its folder. The run puts requests in and takes replies out, and the commands
`post` and `collect` of its operator exchange them for sealed files. Rounds, sums and ledgers do not know of it.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.config import RunConfig
from fedpriv.files import read_text
from fedpriv.holder.wire.frame import FAILED, OWN, Request, Response, Scalars, carried, frame_in
from fedpriv.privacy.ledger import keys
from server.exchange import Exchange, set_message_id
from server.mailbox import BY_FILE, Mailbox

# The id in whose name Flower's link says that it gave up on a node.
_LINK = 1


class MixedGrid(Grid):
    """A grid of which some nodes are reached by file.

    Args:
        network: reaches all others.
        clients: {node id: partition id} of those by file.
        run_config: of the run, as Flower gives it to nodes.
        mailbox: of the run.
    """

    def __init__(self, network: Grid, clients: Mapping[int, int], run_config: Scalars, mailbox: Mailbox) -> None:
        self._network, self._clients, self._run_config, self.mailbox = network, clients, run_config, mailbox
        self._sent: dict[str, Message] = {}
        self._leaves = False

    def goes_on(self) -> bool:
        """Whether the operator has said, since messages were sent last, not to wait for those that are missing."""
        return self._leaves

    def set_run(self, run: Any) -> None:
        """Set the run that this grid works for."""
        self._network.set_run(run)

    @property
    def run(self) -> Any:
        """The run that this grid works for."""
        return self._network.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        """A message to a node."""
        return self._network.create_message(*arguments, **options)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are online, and all by file."""
        return list(dict.fromkeys([*self._network.get_node_ids(), *self._clients]))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages by network, and put those to nodes by file into the mailbox, each with an id of its own."""
        messages = list(messages)
        here = [message for message in messages if message.metadata.dst_node_id in self._clients]
        if others := [message for message in messages if message.metadata.dst_node_id not in self._clients]:
            self._network.push_messages(others)
        for message in here:
            set_message_id(message, uuid.uuid4().hex)
        if here:
            self._leaves = False
            sent = {message.metadata.message_id: message for message in here}
            self.mailbox.ask({id_: self._packed(message) for id_, message in sent.items()})
            self._sent |= sent
        return [message.metadata.message_id for message in messages]

    def _packed(self, message: Message) -> tuple[int, bytes]:
        """The client that a message is for, and the request that its vault is to be handed."""
        own: Any = message.content.config_records.get(OWN, {})
        request = Request(frame=frame_in(message.content), run_config=self._run_config, own=dict(own))
        return self._clients[message.metadata.dst_node_id], request.packed()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there by now; each is handed out once."""
        ids = set(message_ids)
        taken = self.mailbox.take(by_file) if (by_file := ids & self._sent.keys()) else {}
        replies = [_reply(self._sent.pop(id_), answer) for id_, answer in taken.items()]
        self._leaves |= None in taken.values()
        return [*replies, *(self._network.pull_messages(others) if (others := ids - by_file) else ())]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send the messages, and return the replies that arrive within this time."""
        return list(Exchange().replies(self, list(messages), float("inf") if timeout is None else timeout))


def _reply(message: Message, answer: bytes | None) -> Message:
    """The reply to a message, or without an answer the link's word that there is none."""
    if answer is None:
        of_link = copy.deepcopy(message)
        of_link.metadata.dst_node_id = _LINK
        return Message(
            Error(FAILED, "no answer came by file, and the coordinator goes on without it"), reply_to=of_link
        )
    response = Response(answer)
    if response.code:
        return Message(Error(response.code, response.reason), reply_to=message)
    content = RecordDict({name: ConfigRecord(record) for name, record in carried(answer).items()})
    return Message(content, reply_to=message)


@contextmanager
def mixed(network: Grid, config: RunConfig, run_config: Scalars) -> Iterator[Grid]:
    """The grid of a run; the network's own if no admitted node is by file."""
    found = keys.files_of_nodes(Path(config.node_keys), BY_FILE) if config.node_keys else {}
    if not found:
        yield network
        return
    clients = {int(read_text(file)): client for client, file in found.items()}
    mailbox = Mailbox.begun(config, network.run.fab_hash)
    try:
        yield MixedGrid(network, clients, run_config, mailbox)
    finally:
        mailbox.end()

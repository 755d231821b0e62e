"""One round as the server sees it: what each client was sent, what it replied, and what of that can be used."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict

from fedpriv import protocol
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.protocol import Broadcast
from fedpriv.runs.rows import USABLE
from server.replies import MalformedError, Vector, reason_of
from server.wire import wire_bytes

log = logging.getLogger("flwr")

Read = Callable[[int, Message], tuple[Adapter | Vector | None, str]]

_STATUS_OF_ERROR = {protocol.REFUSED: "refused", protocol.RETIRED: "retired"}


@dataclass(frozen=True, eq=False)
class Request:
    """What all clients of one rank are sent in a round.

    Attributes:
        broadcast: the model as these clients read it.
        content: of the message.
        num_bytes: of the content when it is sent.
        digest: of the broadcast and the instruction; charges are keyed by it.
    """

    broadcast: Broadcast
    content: RecordDict
    num_bytes: int
    digest: str

    def with_fields(self, fields: Mapping[str, str], terms: bytes = b"") -> Request:
        """The request with the terms of a sum, and for one client with what its peers sealed for it, or its receipt.

        Args:
            fields: further ones of the instruction.
            terms: their digest: other terms make another request; empty without terms.
        """
        instruction = ConfigRecord({**self.content.config_records[protocol.INSTRUCTION], **fields})
        content = RecordDict({**self.content, protocol.INSTRUCTION: instruction})
        digest = hashlib.sha256(self.digest.encode() + terms).hexdigest() if terms else self.digest
        return replace(self, content=content, num_bytes=wire_bytes(content), digest=digest)


class Status(NamedTuple):
    """How a round ended for a client; see `ClientRow`."""

    name: str
    detail: str = ""


class Upload(NamedTuple):
    """What a client uploaded, an adapter or its part in a sum, and the digest of its reply."""

    content: Adapter | Vector
    digest: str


class Round:
    """The requests and replies of a round, by partition id.

    Args:
        number: from 1.

    Attributes:
        requests: what each client was asked.
        messages: the messages that carried the requests.
        replies: the first reply of each client that replied, with or without an error.
        statuses: of every client that was asked, `no reply` until there is one, and of those that were left out.
        uploads: of the clients whose status is `ok`.
        heard: the clients whose node has answered, if only with an error, the last thing that it was asked.
        bytes_up, bytes_down: of each client in the exchanges around this one that secure aggregation needs.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests: dict[int, Request] = {}
        self.messages: dict[int, Message] = {}
        self.replies: dict[int, Message] = {}
        self.statuses: dict[int, Status] = {}
        self.uploads: dict[int, Upload] = {}
        self.heard: set[int] = set()
        self.bytes_up: Counter[int] = Counter()
        self.bytes_down: Counter[int] = Counter()

    @property
    def num_usable(self) -> int:
        """How many replies the round can use; one from a client that stays silent is among them."""
        return sum(status.name in USABLE for status in self.statuses.values())

    def message_to(self, client: int, node_id: int, request: Request) -> Message:
        """The message that carries the request to the client, which counts as asked from now on."""
        message = Message(request.content, node_id, "train", group_id=str(self.number))
        self.requests[client], self.messages[client] = request, message
        self.statuses[client] = Status("no reply")
        self.heard.discard(client)
        return message

    def leave_out(self, client: int, reason: str) -> None:
        """Note that the client dropped out of the round's sum before it was asked, so that it is not charged."""
        self.statuses[client] = Status("left out", reason)

    def collect(self, replies: Iterable[Message], read: Read) -> dict[int, str]:
        """Judge replies; of each client only the first one counts.

        Args:
            replies: in any order, from any node.
            read: what a client's reply without an error holds; None and a digest if it stays silent.

        Returns:
            {client: reason} of those that replied that their budget is spent.
        """
        clients = {message.metadata.dst_node_id: client for client, message in self.messages.items()}
        retired = {}
        for reply in replies:
            client = self._subject_of(reply) if reply.has_error() else None
            client = clients.get(reply.metadata.src_node_id) if client is None else client
            if client is None or client in self.replies:
                log.warning("round %s: ignored an unexpected reply of node %s", self.number, reply.metadata.src_node_id)
                continue
            self.replies[client] = reply
            if reply.metadata.src_node_id == self.messages[client].metadata.dst_node_id:
                self.heard.add(client)
            status = self.statuses[client] = self._judge(client, reply, read)
            if status.name == "retired":
                retired[client] = status.detail or "its node's budget is spent"
            if status.detail:
                log.warning("round %s, client %s: %s", self.number, client, status.detail)
        return retired

    def _judge(self, client: int, reply: Message, read: Read) -> Status:
        """The status that a reply gives its client; a sound upload is kept."""
        if reply.has_error():
            return Status(_STATUS_OF_ERROR.get(reply.error.code, "failed"), reason_of(reply))
        try:
            content, digest = read(client, reply)
        except MalformedError as error:
            return Status("malformed", str(error))
        if content is None:
            return Status("silent")
        self.uploads[client] = Upload(content, digest)
        return Status("ok")

    def _subject_of(self, error: Message) -> int | None:
        """The client whose message an error answers: when the link gives up on a node, it replies in its own name."""
        message_id = error.metadata.reply_to_message_id
        # A message has no id before it is pushed, so the ids cannot be indexed beforehand.
        sent = self.messages.items()
        return next((client for client, message in sent if message.metadata.message_id == message_id), None)

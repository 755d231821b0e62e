"""One round as the server sees it: what each client was sent, what it replied, and what of that can be used.

A client whose node stopped answering is skipped, and so not charged, until its node registers again. The receipts of
charges that nodes have signed are kept over runs, and every request shows a node its newest one: so a node whose ledger
was restored from an old copy learns it from the coordinator, and refuses.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from fedpriv.config import FederationSection, RunConfig
from fedpriv.errors import InputError, LedgerError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REFUSED, RETIRED, WAITING, Request
from fedpriv.holder.wire.kinds import Broadcast
from fedpriv.learning.training.evaluation import Evaluation
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.privacy.accounting.views import rho_bar
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.receipts import ReceiptLog, from_text
from fedpriv.runs import USABLE, ClientRow, RoundRow
from server.bookkeeping import Books
from server.exchange import MalformedError, Read, content_of, message_to, reason_of, wire_bytes
from server.registration import NO_NODE, Inquiry, Nodes, check_same, label_of, read_registration

log = logging.getLogger("flwr")

_STATUS_OF_ERROR = {REFUSED: "refused", RETIRED: "retired", WAITING: "refused"}


ROUNDS_WITHOUT_ANSWER = 2
"""After so many rounds in a row in which a client was asked and its node answered nothing, it is skipped."""

OnChange = Callable[[Literal["skipped", "returned"], int, int], None]
"""(what happened, client, round)"""


@dataclass(frozen=True, eq=False)
class RoundRequest:
    """The request that all clients of one rank are sent in a round.

    Attributes:
        broadcast: the model as these clients read it.
        request: what they are asked, and what one of them alone is told.
        digest: of the request, and of the terms of a sum; charges are keyed by it.
    """

    broadcast: Broadcast
    request: Request
    digest: str

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of the request when it is sent."""
        return wire_bytes(content_of(self.request))

    def told(self, own: Mapping[str, str], terms: bytes = b"") -> RoundRequest:
        """The request with the terms of a sum, and for one client with what its peers sealed for it, or its receipt.

        Args:
            own: what the client alone is told.
            terms: their digest: other terms make another request; empty without terms.
        """
        if not own and not terms:
            return self
        digest = hashlib.sha256(self.digest.encode() + terms).hexdigest() if terms else self.digest
        return replace(self, request=replace(self.request, own={**self.request.own, **own}), digest=digest)


class _Status(NamedTuple):
    """The end of a round for a client; see `ClientRow`."""

    name: str
    detail: str = ""


class Round:
    """The requests and replies of a round, by partition id.

    Args:
        number: from 1.
        nodes: of the run, whose names logs give.

    Attributes:
        requests: what each client was asked.
        messages: the messages that carried the requests.
        replies: the first reply of each client that replied, with or without an error.
        statuses: of every client that was asked, `no reply` until there is one, and of those that were left out.
        uploads: of the clients whose status is `ok`.
        heard: the clients whose node has answered, if only with an error, the last thing that it was asked.
        bytes_up, bytes_down: of each client in the exchanges around this one that secure aggregation needs.
    """

    def __init__(self, number: int, nodes: Nodes) -> None:
        self.number = number
        self._nodes = nodes
        self.requests: dict[int, RoundRequest] = {}
        self.messages: dict[int, Message] = {}
        self.replies: dict[int, Message] = {}
        self.statuses: dict[int, _Status] = {}
        self.uploads: dict[int, Read] = {}
        self.heard: set[int] = set()
        self.bytes_up: Counter[int] = Counter()
        self.bytes_down: Counter[int] = Counter()

    @cached_property
    def client_of(self) -> dict[int, int]:
        """{node id: client} of the run, as the round found them."""
        return {node_id: client for client, (node_id, _) in self._nodes.items()}

    @property
    def num_usable(self) -> int:
        """The number of replies that the round can use; one from a client that stays silent is among them."""
        return sum(status.name in USABLE for status in self.statuses.values())

    def message_to(self, client: int, node_id: int, request: RoundRequest) -> Message:
        """The message that carries the request to the client, which counts as asked from now on."""
        message = message_to(node_id, request.request, self.number)
        self.requests[client], self.messages[client] = request, message
        self.statuses[client] = _Status("no reply")
        self.heard.discard(client)
        return message

    def leave_out(self, client: int, reason: str) -> None:
        """Note that the client dropped out of the round's sum before it was asked, so that it is not charged."""
        self.statuses[client] = _Status("left out", reason)

    def collect(self, replies: Iterable[Message], read: Callable[[int, Message], Read]) -> dict[int, str]:
        """Judge replies; of each client only the first one counts.

        Args:
            replies: in any order, from any node.
            read: what a client's reply without an error holds.

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
                log.warning("round %s, %s: %s", self.number, label_of(self._nodes, client), status.detail)
        return retired

    def release(self) -> None:
        """Let go of all that was sent, once the round is settled and its rows are made."""
        self.requests, self.messages, self.replies, self.uploads = {}, {}, {}, {}

    def _judge(self, client: int, reply: Message, read: Callable[[int, Message], Read]) -> _Status:
        """The status that a reply gives its client; a sound upload is kept."""
        if reply.has_error():
            return _Status(_STATUS_OF_ERROR.get(reply.error.code, "failed"), reason_of(reply))
        try:
            found = read(client, reply)
        except MalformedError as error:
            return _Status("malformed", str(error))
        if found.content is None:
            return _Status("silent")
        self.uploads[client] = found
        return _Status("ok")

    def _subject_of(self, error: Message) -> int | None:
        """The client whose message an error answers: when the link gives up on a node, it replies in its own name."""
        message_id = error.metadata.reply_to_message_id
        # A message has no id before it is pushed, so the ids cannot be indexed beforehand.
        sent = self.messages.items()
        return next((client for client, message in sent if message.metadata.message_id == message_id), None)


class Absences:
    """The clients that are skipped; that depends on which answers arrived, and on nothing that they say.

    An answer is whatever the node itself sends, errors included; what the link says in its name is none.

    Args:
        nodes: {client: (node id, registration)}; one that comes back under another id gets that one here. A client
            with `NO_NODE` is skipped from the start.
        node_keys: as in `register_nodes`; without them nothing proves that another node id is the same node.
        on_change: called for each client that is skipped from now on, or asked again.
    """

    def __init__(self, nodes: Nodes, *, node_keys: Path | None = None, on_change: OnChange = lambda *_: None) -> None:
        self._nodes, self._node_keys, self._on_change = nodes, node_keys, on_change
        gone = (client for client, (node_id, _) in nodes.items() if node_id == NO_NODE)
        self._missed = Counter(dict.fromkeys(gone, ROUNDS_WITHOUT_ANSWER))
        self._inquiry = Inquiry()

    @property
    def skipped(self) -> list[int]:
        """The clients that are not asked, in order."""
        return [client for client, number in sorted(self._missed.items()) if number >= ROUNDS_WITHOUT_ANSWER]

    def note(self, round_: Round) -> None:
        """Count a finished round."""
        before = self.skipped
        for client in round_.statuses:
            self._missed[client] += 1
            if client in round_.heard:
                del self._missed[client]
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
            del self._missed[client]
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


def client_rows(round_: Round, books: Books, spec: UpdateSpec, weights: Mapping[int, float]) -> list[ClientRow]:
    """A row for each client that was asked in the round, in that order, and then for those that were left out.

    Args:
        round_: of which everything was collected.
        books: in which the round is settled.
        spec: of the run.
        weights: {client: rho_k} of those whose upload is in the sum.
    """
    clients = dict.fromkeys([*round_.messages, *round_.statuses])
    bar = rho_bar(weights.values()) if weights else 0.0
    return [_client_row(client, round_, books, spec, weights.get(client, 0.0), bar) for client in clients]


def _client_row(client: int, round_: Round, books: Books, spec: UpdateSpec, weight: float, bar: float) -> ClientRow:
    event, status = books.costs.event(client, round_.number), round_.statuses[client]
    message, reply, request = round_.messages.get(client), round_.replies.get(client), round_.requests.get(client)
    return ClientRow(
        round=round_.number,
        client=client,
        num_records=books.sizes[client],
        status=status.name,
        detail=status.detail,
        sampling_probability=getattr(event, "sampling_probability", 1.0),
        noise_multiplier=spec.noise_multiplier,
        effective_noise_multiplier=event.effective_noise_multiplier,
        steps=event.count,
        weight=weight,
        rho_bar=bar,
        epsilon_local=books.epsilon_so_far(client, "local"),
        epsilon_rho=books.epsilon_so_far(client, "rho"),
        epsilon_aggregate=books.epsilon_so_far(client, "aggregate"),
        delta=books.accounts.deltas[client],
        bytes_up=round_.bytes_up[client] + (wire_bytes(reply.content) if reply and reply.has_content() else 0),
        bytes_down=round_.bytes_down[client] + (request.num_bytes if request else 0),
        seconds=reply.metadata.created_at - message.metadata.created_at if reply and message else math.nan,
    )


def round_row(
    number: int,
    clients: Sequence[ClientRow],
    books: Books,
    test: Evaluation | None,
    *,
    num_late: int,
    seconds: float,
) -> RoundRow:
    """The row of a round.

    Args:
        number: 0 for the untrained model.
        clients: the round's rows; empty for round 0.
        books: in which the round is settled.
        test: of the model after the round; None if the server has no test set.
        num_late: replies to earlier rounds that arrived in this one.
        seconds: that the round took.
    """
    return RoundRow(
        round=number,
        num_selected=len(clients),
        num_replies=sum(row.status == "ok" for row in clients),
        num_silent=sum(row.status == "silent" for row in clients),
        num_failures=sum(row.status not in USABLE for row in clients),
        num_late=num_late,
        num_retired=len(books.retired),
        test_accuracy=test.accuracy if test else None,
        test_loss=test.loss if test else None,
        test_perplexity=test.perplexity if test else None,
        epsilon_local_max=books.largest_so_far("local"),
        epsilon_rho_max=books.largest_so_far("rho"),
        epsilon_aggregate_max=books.largest_so_far("aggregate"),
        epsilon_this_run_max=books.largest_part("this run"),
        epsilon_before_max=books.largest_part("before"),
        bytes_up=sum(row.bytes_up for row in clients),
        bytes_down=sum(row.bytes_down for row in clients),
        seconds=seconds,
    )


class Receipts:
    """The newest receipt of each node's data set; only what a node's registered key has signed counts.

    Args:
        path: of the log, to which every new receipt is added.
        signers: {client: public lines of its registered key, and of those before it}; of a client without any nothing
            is kept.
        nodes: {client: (node id, registration)}.
    """

    def __init__(self, path: Path, signers: Mapping[int, Sequence[str]], nodes: Nodes) -> None:
        self._log, self._signers, self._nodes = ReceiptLog(path), signers, nodes
        kept = self._log.newest()
        # Of several with one counter the first, that of the key which is registered now.
        self._newest = {
            client: max(
                filter(None, (kept.get((line, nodes[client][1].data_set)) for line in lines)),
                key=lambda receipt: receipt.counter,
                default=None,
            )
            for client, lines in signers.items()
        }
        for client, (_, registration) in nodes.items():
            self.take(client, registration.receipt)

    @staticmethod
    def of(config: RunConfig, run_folder: Path, nodes: Nodes) -> Receipts:
        """The receipts next to the ledger of several runs; where each run has its own ledger, next to their folders."""
        path = Path(f"{config.ledger}.receipts") if config.ledger else run_folder.parent / "receipts.jsonl"
        return Receipts(path, _signers(config, nodes), nodes)

    def shown_to(self, client: int) -> dict[str, str]:
        """The receipt that the client alone is told; nothing for a node that has sent none."""
        newest = self._newest.get(client)
        return {} if newest is None else {kinds.RECEIPT: newest.text()}

    def take(self, client: int, text: str) -> None:
        """Keep the receipt in a client's sound reply, if there is one, and it is newer than the one that is known.

        Raises:
            LedgerError: it cannot be written.
        """
        if not text or client not in self._signers:
            return
        receipt, known, label = from_text(text), self._newest.get(client), label_of(self._nodes, client)
        if receipt.data_set != self._nodes[client][1].data_set or not receipt.is_of(self._signers[client][0]):
            log.warning("%s: its receipt is not of its data set and key, and is not kept", label)
            return
        if known is not None and receipt.counter <= known.counter:
            if receipt.digest != known.digest and receipt.counter == known.counter:
                log.warning("%s: signed two different charges as number %s", label, receipt.counter)
            if receipt.digest != known.digest or receipt.signer == known.signer:
                return
        self._newest[client] = receipt
        try:
            self._log.add(receipt)
        except OSError as error:
            raise LedgerError(f"{self._log.path}: {error.strerror}; the receipts of nodes cannot be kept") from None


def _signers(config: FederationSection, nodes: Nodes) -> dict[int, tuple[str, ...]]:
    """{client: the public lines of its registered key, and of those before it}; without `node_keys` nobody's."""
    if not config.node_keys:
        return {}
    signers = {}
    for client in nodes:
        try:
            file = Path(config.node_keys) / f"{client}.pub"
            signers[client] = (keys.read_public_line(file), *keys.read_lines(file.with_suffix(keys.EARLIER)))
        except InputError as error:
            log.warning("%s: its receipts are not kept: %s", label_of(nodes, client), error)
    return signers

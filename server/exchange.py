"""Messages to clients, their size, and their replies, over a link on which a reply may be late, repeated or missing.

A reply that is malformed is refused by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import OWN, TRAIN, Request, Response, carried, frame_in
from fedpriv.holder.wire.kinds import Broadcast, UploadRelease
from fedpriv.learning.adapters import Adapter, difference, norm
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.operate.flower import seconds_to_pause
from fedpriv.privacy.accounting.events import Event

log = logging.getLogger("flwr")

_SHORTEST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
# What is told takes as long as there are clients.
_SECONDS_UNTOLD = 0.1

Vector = npt.NDArray[np.unsignedinteger]


Tell = Callable[[str, Collection[int], Collection[int]], None]
"""(kind of the messages, nodes that were asked, those of them that have not answered yet)"""


class Exchange:
    """Collects each round's replies until its deadline, and remembers which messages are still unanswered after it.

    Args:
        tell: called when messages are sent, when all replies are there, and in between at least about once a second.
    """

    def __init__(self, tell: Tell = lambda kind, asked, silent: None) -> None:
        self._tell = tell
        self._overdue: set[str] = set()
        self._num_late = 0

    def replies(self, grid: Grid, messages: Sequence[Message], seconds: float) -> Iterator[Message]:
        """Send the messages and yield their replies as they arrive, until all are there or the time is up.

        A reply that arrives later is fetched by a later exchange, which counts and discards it.
        """
        started = heard = time.monotonic()
        grid.push_messages(messages)
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        unanswered = set(nodes)

        def tell() -> None:
            self._tell(messages[0].metadata.message_type, nodes.values(), {nodes[id_] for id_ in unanswered})

        while unanswered:
            tell()
            last_told = time.monotonic()
            # Before the pull, in which Flower may wait minutes for arrays that a dying node announced: one more pull
            # then fetches what the others sent in time.
            waited = time.monotonic() - started
            for reply in grid.pull_messages(unanswered | self._overdue):
                message_id, node_id = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
                if message_id in self._overdue:
                    self._overdue.discard(message_id)
                    self._num_late += 1
                    log.warning("a late reply of node %s to an earlier round is discarded", node_id)
                elif message_id not in unanswered:
                    log.warning("a repeated reply of node %s is discarded", node_id)
                else:
                    unanswered.discard(message_id)
                    heard = time.monotonic()
                    if not unanswered or time.monotonic() - last_told > _SECONDS_UNTOLD:
                        tell()
                        last_told = time.monotonic()
                    yield reply
            if not unanswered or waited >= seconds:
                break
            quiet = time.monotonic() - heard
            time.sleep(seconds_to_pause(quiet, shortest=_SHORTEST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS))
        self._overdue |= unanswered

    def pop_num_late(self) -> int:
        """The number of late replies that were discarded since the last call."""
        num_late, self._num_late = self._num_late, 0
        return num_late


def message_to(node_id: int, request: Request, round_: int = 0) -> Message:
    """The message that carries a request to a node; its type says only whether records are to be trained on."""
    return Message(content_of(request), node_id, TRAIN if request.kind == TRAIN else "query", group_id=str(round_))


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that Flower's link would give it on delivery; there is no public setter."""
    message.metadata.__dict__["_message_id"] = message_id


@lru_cache(maxsize=1)
def content_of(request: Request) -> RecordDict:
    """The frame of a request, and what the node alone is told; of the nodes that are asked the same, all get this."""
    own = {OWN: dict(request.own)} if request.own else {}
    return RecordDict({name: ConfigRecord(record) for name, record in {**carried(request.frame), **own}.items()})


def answer_in(reply: Message, kind: str) -> Any:
    """The answer in a reply to a request of this kind; see `kinds.KINDS`.

    Raises:
        MalformedError: it is an error, or malformed; one line that says why.
    """
    if reply.has_error():
        raise MalformedError(reason_of(reply))
    with _malformed_by_name():
        return kinds.answer_of(kind, _response_in(reply))


def digest_of(reply: Message) -> str:
    """The digest of a reply, as the node's ledger records it."""
    return _response_in(reply).digest


def _response_in(reply: Message) -> Response:
    return Response(frame_in(reply.content))


def wire_bytes(part: Any) -> int:
    """Bytes of all objects that Flower's link sends for records, or a part of them; equal parts are sent once."""
    return len(part.deflate()) + sum(map(wire_bytes, (part.children or {}).values()))


class MalformedError(ValueError):
    """A reply that is not aggregated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpectedReply:
    """The values that a client's reply must match, given what the client was asked.

    Attributes:
        round: that the reply must state.
        event: that the reply must state, which is what the instruction costs.
        num_records: that the reply must state, which is N_k as registered.
        spec: says how the upload is encoded.
        broadcast: has the names and shapes that the upload must have.
        initial: the tensors at the start of the run.
        max_norm: the largest L2 norm that the update may have; None for any.
    """

    round: int
    event: Event
    num_records: int
    spec: UpdateSpec
    broadcast: Broadcast
    initial: Adapter
    max_norm: float | None = None


class Read(NamedTuple):
    """The content of a client's reply.

    Attributes:
        content: the uploaded adapter, or the client's part in a sum; None from a client that stays silent.
        digest: of the reply, as the client's ledger records it.
        receipt: of the charge, as text; empty without any.
    """

    content: Adapter | Vector | None
    digest: str
    receipt: str


def read_reply(reply: Message, expected: ExpectedReply) -> Read:
    """The uploaded adapter, or None from a client that stays silent.

    Args:
        reply: one without an error.
        expected: of its client.

    Raises:
        MalformedError: one line that names what is wrong.
    """
    with _malformed_by_name():
        response = _response_in(reply)
        release = _release_of(response, expected)
        if release.silent:
            if response.arrays:
                raise MalformedError(f"silent, but sends {', '.join(response.arrays)}")
            return Read(None, response.digest, release.receipt)
        adapter = kinds.unpack_upload(response.arrays, expected.broadcast, expected.spec, expected.initial)
    for name, tensor in adapter.items():
        if not torch.isfinite(tensor).all():
            raise MalformedError(f"{name}: holds NaN or infinity")
    if expected.max_norm is not None:
        size = norm(difference(adapter, expected.broadcast.adapter))
        if size > expected.max_norm:
            raise MalformedError(f"its update has norm {size:.4g}, max_update_norm is {expected.max_norm:g}")
    return Read(adapter, response.digest, release.receipt)


def read_sum(reply: Message, expected: ExpectedReply, *, dimension: int, modulus_bits: int) -> Read:
    """A client's part in a sum, uint32 or uint64 [values].

    Args:
        reply: one without an error.
        expected: of its client.
        dimension: number of values.
        modulus_bits: 32 or 64.

    Raises:
        MalformedError: one line that names what is wrong.
    """
    with _malformed_by_name():
        response = _response_in(reply)
        release = _release_of(response, expected)
        named = response.arrays.get(kinds.ADAPTER, {})
        if list(named) != [kinds.SUM]:
            raise MalformedError(f"arrays {', '.join(named) or 'none'}: must be {kinds.SUM} alone")
        vector = named[kinds.SUM]
    if vector.dtype != np.dtype(f"int{modulus_bits}") or vector.shape != (dimension,):
        raise MalformedError(f"{kinds.SUM}: {vector.dtype} {vector.shape}, must be int{modulus_bits} ({dimension},)")
    return Read(vector.view(np.dtype(f"uint{modulus_bits}")), response.digest, release.receipt)


def reason_of(reply: Message) -> str:
    """The reason for which a node, or the link, replied with an error, in one line."""
    return " ".join((reply.error.reason or "").split())


@contextmanager
def _malformed_by_name() -> Iterator[None]:
    """Call a reply malformed whatever goes wrong while it is read."""
    try:
        yield
    except MalformedError:
        raise
    except (KeyError, ValueError, TypeError, EOFError, OSError) as error:
        raise MalformedError(f"malformed reply: {error}") from None


def _release_of(response: Response, expected: ExpectedReply) -> UploadRelease:
    """The statement of the reply, which is what was expected."""
    release: UploadRelease = kinds.answer_of(TRAIN, response)
    if release.round != expected.round:
        raise MalformedError(f"reply of round {release.round} in round {expected.round}")
    if release.event != expected.event:
        raise MalformedError(f"reply paid {release.event}, the instruction costs {expected.event}")
    if release.num_records != expected.num_records:
        raise MalformedError(f"reply claims N_k = {release.num_records}, registered is {expected.num_records}")
    if release.silent and not expected.broadcast.signs:
        raise MalformedError("silent, though it was not asked to judge its update")
    return release

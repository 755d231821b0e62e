"""Requests and answers in Flower's messages, for tests that play one side."""

import json
from collections.abc import Callable, Mapping

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from torch import Tensor

from clients.app import message_of
from fedpriv.holder.wire import frame
from fedpriv.holder.wire.frame import FRAME, OWN, Arrays, Request, Response, Scalars, frame_in
from server.exchange import message_to
from simulations.engines.flower_private import SERVER_NODE_ID


def asked(
    kind: str,
    node_id: int = 7,
    *,
    fields: Scalars | None = None,
    arrays: Arrays | None = None,
    own: Scalars | None = None,
    round_: int = 0,
) -> Message:
    """The message by which a server asks a node."""
    return message_to(node_id, Request.of(kind, fields=fields, arrays=arrays, own=own), round_)


def request_in(message: Message) -> Request:
    """The request that a message carries, without a run's configuration."""
    own = message.content.config_records
    return Request(frame=frame_in(message.content), own=dict(own[OWN]) if OWN in own else {})


def answered(
    message: Message, fields: Scalars | None = None, *, arrays: Arrays | None = None, code: int = 0, reason: str = ""
) -> Message:
    """A node's reply to a message."""
    return message_of(Response.of(fields=fields, arrays=arrays, code=code, reason=reason), message)


def given_up(message: Message, reason: str = "node unavailable") -> Message:
    """What the link answers in its own name for a node that is gone."""
    error = Message(Error(3, reason), reply_to=message)
    error.metadata.__dict__["_src_node_id"] = SERVER_NODE_ID
    return error


def records_of(frame: bytes, name: str = "frame-0") -> RecordDict:
    """The records of a message that carries these bytes, under a name of its own, as one frame."""
    return RecordDict({name: ConfigRecord({FRAME: frame})})


def response_in(reply: Message) -> Response:
    """The response that a reply without an error carries."""
    return Response(frame_in(reply.content))


def with_body(sent: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The frame with another body, which its header names."""
    end = frame.PREFIX_BYTES + int.from_bytes(sent[:4], "big")
    header, body = json.loads(sent[frame.PREFIX_BYTES : end]), sent[end:]
    changed = change(body)
    assert changed != body
    return frame._joined({name: value for name, value in header.items() if name not in ("version", "body")}, changed)


def arrays_of(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The arrays of tensors."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}

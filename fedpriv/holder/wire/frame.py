"""The frame: the one form in which a request reaches a node, and in which its answer is stored, sent and read.

A frame is two lengths, a header in JSON, and a body. The body holds named arrays as safetensors, and the header its
SHA-256, so that the digest of a request is that of its header. Neither torch nor Flower is loaded, and nothing is ever
unpickled. The server packs a request once; Flower carries the bytes; the ClientApp puts them into a frame of its own,
beside what Flower and the server tell this one node, and hands that to the vault's socket. The vault stores the frame
of its answer before it sends it, and the server reads the bytes that were stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

VERSION = 1

# What a request asks for.
REGISTER = "register"
TRAIN = "train"
EVALUATE = "evaluate"
AFFORD = "afford"
# The exchanges around a train request under secure aggregation.
ADVERTISE = "advertise"
SHARE = "share"
CHECK = "check"
CONFIRM = "confirm"
REVEAL = "reveal"

# Codes of error replies.
REFUSED = 100
FAILED = 101
RETIRED = 102
WAITING = 103

# Names in a Flower message: of the records that carry a frame, and of the one with what this node alone is told.
FRAME = "frame"
OWN = "own"

# Lengths of header and body, in bytes; both unsigned, big-endian.
_LENGTHS = struct.Struct(">II")
PREFIX_BYTES = _LENGTHS.size
MAX_HEADER_BYTES = 2**20
MAX_ARRAYS_BYTES = 2**29
# The body of a frame on the socket is a frame.
_MAX_BODY_BYTES = PREFIX_BYTES + MAX_HEADER_BYTES + MAX_ARRAYS_BYTES

# How long a ClientApp waits for a vault that is being restarted.
_RETRY_SECONDS = 60.0
_RETRY_DELAY_SECONDS = 0.2

# struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")

# The most of a frame in one record: as much as Flower sends of an array at once.
_PIECE_BYTES = 5 * 2**20

Scalar = str | int | float | bool
Scalars = Mapping[str, Scalar]
Arrays = Mapping[str, Mapping[str, np.ndarray]]
"""{record's name: {array's name: array}}"""


class FrameError(ValueError):
    """A frame that this code does not read; one line that says why, without any of its content."""


class _Frame:
    """The header and the arrays of a frame; the arrays are read when they are first asked for.

    Raises:
        FrameError: when either is read and is malformed.
    """

    frame: bytes
    _kinds: ClassVar[Mapping[str, type]]

    @cached_property
    def header(self) -> dict[str, Any]:
        """Exactly the fields of this kind of frame, each of its type."""
        header, _ = _parts(self.frame, {**self._kinds, "fields": dict, "names": list})
        _check_scalars("fields", header["fields"])
        return header

    @property
    def fields(self) -> Scalars:
        """Scalars of the message."""
        fields: Scalars = self.header["fields"]
        return fields

    @cached_property
    def arrays(self) -> Arrays:
        """Writable arrays, in the order in which they were packed."""
        names = self.header["names"]  # which also checks the body
        return unpacked_arrays(names, self.frame[_end_of_header(self.frame) :])


@dataclass(frozen=True, kw_only=True, eq=False)
class Request(_Frame):
    """A coordinator's request to a node; every part of it is the coordinator's choice.

    Attributes:
        frame: what is asked, the same for all nodes that are asked it.
        run_config: the run's configuration.
        own: what this node alone is told: its newest receipt, and the terms of a sum with its peers' shares.
    """

    frame: bytes
    run_config: Scalars = field(default_factory=dict)
    own: Scalars = field(default_factory=dict)

    _kinds: ClassVar = {"kind": str}

    @staticmethod
    def of(
        kind: str,
        run_config: Scalars | None = None,
        *,
        fields: Scalars | None = None,
        arrays: Arrays | None = None,
        own: Scalars | None = None,
    ) -> Request:
        """A new request.

        Raises:
            FrameError: a value or an array has a type that no frame holds, or the frame would be too long.
        """
        frame = _pack({"kind": kind, "fields": dict(fields or {})}, arrays or {})
        return Request(frame=frame, run_config=run_config or {}, own=own or {})

    @property
    def kind(self) -> str:
        """The kind of request, such as `train`."""
        return str(self.header["kind"])

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of the header, and so of all that is asked of every node alike."""
        return hashlib.sha256(self.frame[PREFIX_BYTES : _end_of_header(self.frame)]).hexdigest()

    def packed(self) -> bytes:
        """The frame for the vault's socket, of this one and of what the node is told beside it.

        Raises:
            FrameError: a value has a type that no frame holds, or the frame would be too long.
        """
        return _joined({"run_config": dict(self.run_config), OWN: dict(self.own)}, self.frame)

    @staticmethod
    def unpacked(frame: bytes) -> Request:
        """The request in a frame from the socket.

        Raises:
            FrameError: either frame's header is malformed or of another version.
        """
        header, body = _parts(frame, {"run_config": dict, OWN: dict})
        for name, values in header.items():
            _check_scalars(name, values)
        request = Request(frame=body, **header)
        _ = request.header
        return request


@dataclass(frozen=True, eq=False)
class Response(_Frame):
    """All that leaves a node, as it is stored, sent and read."""

    frame: bytes

    _kinds: ClassVar = {"code": int, "reason": str}

    @staticmethod
    def of(*, fields: Scalars | None = None, arrays: Arrays | None = None, code: int = 0, reason: str = "") -> Response:
        """A new response.

        Args:
            fields: scalars of the reply.
            arrays: of an upload.
            code: of an error, or 0.
            reason: of an error; one line.

        Raises:
            FrameError: see `Request.of`.
        """
        return Response(_pack({"code": code, "reason": reason, "fields": dict(fields or {})}, arrays or {}))

    @property
    def code(self) -> int:
        """The code of an error, or 0."""
        return int(self.header["code"])

    @property
    def reason(self) -> str:
        """The reason for an error, in one line."""
        return " ".join(str(self.header["reason"]).split())

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the frame: what the ledgers of node and server record of a reply."""
        return hashlib.sha256(self.frame).hexdigest()


def carried(frame: bytes) -> dict[str, dict[str, Any]]:
    """{name of a record: its one value} by which a Flower message carries a frame.

    Flower sends each record with a request of its own, and an array of a record with two more.
    """
    pieces = (frame[start : start + _PIECE_BYTES] for start in range(0, len(frame), _PIECE_BYTES))
    return {f"{FRAME}-{index}": {FRAME: piece} for index, piece in enumerate(pieces)}


def frame_in(records: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The frame in the records of a Flower message, which may also hold `OWN`.

    Raises:
        FrameError: they are not those that carry a frame.
    """
    names = [f"{FRAME}-{index}" for index in range(len(records) - (OWN in records))]
    pieces = [dict(records.get(name, {})) for name in names]
    if not pieces or any(list(piece) != [FRAME] or type(piece[FRAME]) is not bytes for piece in pieces):
        raise FrameError(f"records: must be {FRAME}-0, {FRAME}-1 and so on, each with bytes, {FRAME!r}, alone")
    return b"".join(piece[FRAME] for piece in pieces)


def frame_length(prefix: bytes) -> int:
    """The number of bytes that follow a frame's first `PREFIX_BYTES`.

    Raises:
        FrameError: more than a frame may hold.
    """
    header, body = _LENGTHS.unpack(prefix)
    if header > MAX_HEADER_BYTES or body > _MAX_BODY_BYTES:
        raise FrameError(f"frame: {header} + {body} bytes; at most {MAX_HEADER_BYTES} + {_MAX_BODY_BYTES}")
    return int(header + body)


def _end_of_header(frame: bytes) -> int:
    return PREFIX_BYTES + int(_LENGTHS.unpack(frame[:PREFIX_BYTES])[0])


def _pack(header: dict[str, Any], arrays: Arrays) -> bytes:
    names = [[record, name] for record, named in arrays.items() for name in named]
    return _joined({**header, "names": names}, packed_arrays(arrays))


def packed_arrays(arrays: Arrays) -> bytes:
    """The body that holds these arrays, by their place; empty without any.

    Raises:
        FrameError: one has a type that no frame holds.
    """
    named = [array for record in arrays.values() for array in record.values()]
    if not named:
        return b""
    try:
        return safetensors.numpy.save({str(i): np.ascontiguousarray(array) for i, array in enumerate(named)})
    except (TypeError, ValueError, KeyError, SafetensorError) as error:
        raise FrameError(f"arrays: one has a type that no frame holds ({type(error).__name__})") from None


def unpacked_arrays(names: list[Any], body: bytes) -> Arrays:
    """The arrays of a body, in the order of their names.

    Raises:
        FrameError: the body is not safetensors with one name for each array.
    """
    arrays: dict[str, dict[str, np.ndarray]] = {}
    try:
        read = safetensors.numpy.load(body) if body else {}
        if len({(record, name) for record, name in names}) != len(names) or len(names) != len(read):
            raise ValueError
        for place, (record, name) in enumerate(names):
            if type(record) is not str or type(name) is not str:
                raise TypeError
            array = read[str(place)]
            arrays.setdefault(record, {})[name] = array if array.flags.writeable else array.copy()
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError):
        raise FrameError("frame: its arrays are not safetensors with one name each") from None
    return arrays


def _joined(header: dict[str, Any], body: bytes) -> bytes:
    """The frame of a header, to which version and digest are added, and a body."""
    header = {"version": VERSION, **header, "body": hashlib.sha256(body).hexdigest()}
    try:
        head = json.dumps(header).encode()
    except (TypeError, ValueError) as error:
        raise FrameError(f"frame: holds a value of a type that no frame holds ({type(error).__name__})") from None
    prefix = _LENGTHS.pack(min(len(head), 2**32 - 1), min(len(body), 2**32 - 1))
    frame_length(prefix)
    return prefix + head + body


def _parts(frame: bytes, kinds: Mapping[str, type]) -> tuple[dict[str, Any], bytes]:
    """The header, less version and digest, and the body.

    Args:
        frame: as it came.
        kinds: exactly the fields that the header must have, with their types.
    """
    if len(frame) < PREFIX_BYTES or frame_length(frame[:PREFIX_BYTES]) != len(frame) - PREFIX_BYTES:
        raise FrameError("frame: its length differs from what it states")
    end = _end_of_header(frame)
    body = frame[end:]
    try:
        header = json.loads(frame[PREFIX_BYTES:end], object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise FrameError("frame: its header is not JSON, or names a field twice") from None
    if not isinstance(header, dict) or header.pop("version", None) != VERSION:
        raise FrameError(f"frame: must be of version {VERSION}")
    if header.pop("body", None) != hashlib.sha256(body).hexdigest():
        raise FrameError("frame: its body is not what its header states")
    if header.keys() != kinds.keys():
        raise FrameError(f"frame: must hold {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(header[name]) is not kind:
            raise FrameError(f"{name}: must be of type {kind.__name__}")
    return header, body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, no two of the same name."""
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError
    return found


def _check_scalars(name: str, values: Mapping[str, Any]) -> None:
    if not all(isinstance(value, (str, int, float, bool)) for value in values.values()):
        raise FrameError(f"{name}: must hold scalars alone")


def ask(path: Path, request: Request, *, retry_seconds: float = _RETRY_SECONDS) -> Response:
    """The vault's response to a request.

    A vault that dies meanwhile is asked again once it is back: one charge buys one release, so repeating is safe.

    Args:
        path: of the vault's socket.
        request: what to ask.
        retry_seconds: for how long to look for a vault that does not listen.

    Raises:
        FrameError: the request does not fit a frame, or what came back is longer than one.
        OSError: no vault listens.
    """
    frame = request.packed()
    deadline = time.monotonic() + retry_seconds
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                deadline = math.inf  # it listens; should it die, however late, it gets the same time to come back
                connection.sendall(frame)
                answer = receive(connection)
            if answer is not None:
                return Response(answer)
            raise ConnectionResetError("the vault ended before it answered")
        except OSError:
            if deadline == math.inf:
                deadline = time.monotonic() + retry_seconds
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_DELAY_SECONDS)


def receive(connection: socket.socket, *, seconds: float = math.inf) -> bytes | None:
    """The next frame; None if the other side has closed the connection, before or within one.

    Args:
        connection: where to read.
        seconds: within which the whole frame must arrive.

    Raises:
        FrameError: the frame is longer than a frame may be.
        OSError: the connection failed, or timed out.
    """
    deadline = time.monotonic() + seconds
    prefix = _exactly(connection, PREFIX_BYTES, deadline)
    if prefix is None:
        return None
    rest = _exactly(connection, frame_length(prefix), deadline)
    return None if rest is None else prefix + rest


def _exactly(connection: socket.socket, length: int, deadline: float) -> bytes | None:
    """So many bytes, or None if the connection ends before; memory grows with what arrives, not with the claim."""
    content = bytearray()
    while len(content) < length:
        if deadline < math.inf:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(min(length - len(content), 2**20))
        if not piece:
            return None
        content += piece
    return bytes(content)


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)

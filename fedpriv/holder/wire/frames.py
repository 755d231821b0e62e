"""Frames between a ClientApp and the vault: requests and responses, their bytes, and the socket that carries them.

A frame is a header of JSON and arrays as safetensors, each preceded by its length; nothing is ever unpickled. This
module loads neither torch nor anything that reads records, so a process that only carries frames stays small.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

VERSION = 1

# What a request asks for.
REGISTER = "register"
TRAIN = "train"
EVALUATE = "evaluate"
AFFORD = "afford"
ADVERTISE = "advertise"
SHARE = "share"
CHECK = "check"
CONFIRM = "confirm"
REVEAL = "reveal"

# Codes of error replies.
REFUSED = 100
FAILED = 101
RETIRED = 102

# Lengths of header and arrays, in bytes; both unsigned, big-endian.
_LENGTHS = struct.Struct(">II")
PREFIX_BYTES = _LENGTHS.size
MAX_HEADER_BYTES = 2**20
MAX_ARRAYS_BYTES = 2**29

Scalar = str | int | float | bool
Arrays = Mapping[str, Mapping[str, np.ndarray]]
"""{record's name: {array's name: array}}"""


# How long a ClientApp waits for a vault that is being restarted.
_RETRY_SECONDS = 60.0
_RETRY_DELAY_SECONDS = 0.2

# struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


class FrameError(ValueError):
    """A frame that this code does not read; one line that says why, without any of its content."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A coordinator's request to a node; every part of it is the coordinator's choice.

    Attributes:
        kind: `register`, `afford`, `train`, `evaluate` or, around a train request under secure aggregation,
            `advertise`, `share`, `check`, `confirm` and `reveal`.
        run_config: the run's configuration.
        fields: scalars of the message.
        arrays: {record's name: {array's name: array}}.
    """

    kind: str
    run_config: Mapping[str, Scalar]
    fields: Mapping[str, Scalar] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """All that leaves a node.

    Attributes:
        record: name of the record that holds the fields; empty for an error.
        fields: scalars of the reply.
        arrays: of the upload; empty for other replies.
        code: of an error, or 0.
        reason: of an error; one line.
    """

    record: str = ""
    fields: Mapping[str, Scalar] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    code: int = 0
    reason: str = ""


def pack_request(request: Request) -> bytes:
    """The frame of a request.

    Raises:
        FrameError: a value or an array has a type that no frame holds, or the frame would be too long.
    """
    header = {"kind": request.kind, "run_config": dict(request.run_config), "fields": dict(request.fields)}
    named = [(record, name, array) for record, arrays in request.arrays.items() for name, array in arrays.items()]
    header["records"] = list(request.arrays)
    return _pack(header, named)


def unpack_request(frame: bytes) -> Request:
    """The request in a frame.

    Raises:
        FrameError: the frame is malformed or of another version.
    """
    header, named = _unpack(frame, {"kind": str, "run_config": dict, "fields": dict, "records": list})
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for record in header["records"]:
        if type(record) is not str:
            raise FrameError("records: must be texts")
        arrays[record] = {}
    for record, name, array in named:
        if record not in arrays:
            raise FrameError("arrays: one belongs to no record")
        arrays[record][name] = array
    return Request(
        kind=header["kind"],
        run_config=_scalars(header["run_config"], "run_config"),
        fields=_scalars(header["fields"], "fields"),
        arrays=arrays,
    )


def pack_response(response: Response) -> bytes:
    """The frame of a response.

    Raises:
        FrameError: see `pack_request`.
    """
    header = {
        "record": response.record,
        "fields": dict(response.fields),
        "code": response.code,
        "reason": response.reason,
    }
    return _pack(header, [("", name, array) for name, array in response.arrays.items()])


def unpack_response(frame: bytes) -> Response:
    """The response in a frame.

    Raises:
        FrameError: the frame is malformed or of another version.
    """
    header, named = _unpack(frame, {"record": str, "fields": dict, "code": int, "reason": str})
    return Response(
        record=header["record"],
        fields=_scalars(header["fields"], "fields"),
        arrays={name: array for _, name, array in named},
        code=header["code"],
        reason=header["reason"],
    )


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The frame of arrays alone.

    Raises:
        FrameError: see `pack_request`.
    """
    return _pack({}, [("", name, array) for name, array in arrays.items()])


def unpack_arrays(frame: bytes) -> dict[str, np.ndarray]:
    """The arrays in a frame of them alone, in the order in which they were packed.

    Raises:
        FrameError: the frame is malformed or of another version.
    """
    _, named = _unpack(frame, {})
    return {name: array for _, name, array in named}


def frame_length(prefix: bytes) -> int:
    """The number of bytes that follow a frame's first `PREFIX_BYTES`.

    Raises:
        FrameError: more than a frame may hold.
    """
    header, arrays = _LENGTHS.unpack(prefix)
    if header > MAX_HEADER_BYTES or arrays > MAX_ARRAYS_BYTES:
        raise FrameError(f"frame: {header} + {arrays} bytes; at most {MAX_HEADER_BYTES} + {MAX_ARRAYS_BYTES}")
    return int(header + arrays)


def _pack(header: dict[str, Any], named: list[tuple[str, str, np.ndarray]]) -> bytes:
    header |= {"version": VERSION, "names": [[record, name] for record, name, _ in named]}
    try:
        head = json.dumps(header).encode()
        arrays = safetensors.numpy.save({str(i): np.ascontiguousarray(a) for i, (_, _, a) in enumerate(named)})
    except (TypeError, ValueError, KeyError, SafetensorError) as error:
        raise FrameError(f"frame: holds a value of a type that no frame holds ({type(error).__name__})") from None
    prefix = _LENGTHS.pack(min(len(head), 2**32 - 1), min(len(arrays), 2**32 - 1))
    frame_length(prefix)
    return prefix + head + arrays


def _unpack(frame: bytes, kinds: Mapping[str, type]) -> tuple[dict[str, Any], list[tuple[str, str, np.ndarray]]]:
    """The header, which has exactly the given fields, and the arrays as (record, name, array)."""
    if len(frame) < PREFIX_BYTES or frame_length(frame[:PREFIX_BYTES]) != len(frame) - PREFIX_BYTES:
        raise FrameError("frame: its length differs from what it states")
    end = PREFIX_BYTES + _LENGTHS.unpack(frame[:PREFIX_BYTES])[0]
    try:
        header = json.loads(frame[PREFIX_BYTES:end])
    except (ValueError, RecursionError):
        raise FrameError("frame: its header is not JSON") from None
    if not isinstance(header, dict) or header.pop("version", None) != VERSION:
        raise FrameError(f"frame: must be of version {VERSION}")
    names = header.pop("names", None)
    if header.keys() != kinds.keys():
        raise FrameError(f"frame: must hold {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(header[name]) is not kind:
            raise FrameError(f"{name}: must be of type {kind.__name__}")
    try:
        arrays = safetensors.numpy.load(frame[end:])
        if len({(record, name) for record, name in names}) != len(arrays):
            raise ValueError
        return header, [(str(record), str(name), arrays[str(i)]) for i, (record, name) in enumerate(names)]
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError):
        raise FrameError("frame: its arrays are not safetensors with one name each") from None


def _scalars(values: Mapping[str, Any], name: str) -> dict[str, Scalar]:
    """The values, which must all be scalars."""
    for value in values.values():
        if not isinstance(value, (str, int, float, bool)):
            raise FrameError(f"{name}: must hold scalars alone")
    return dict(values)


def ask(path: Path, request: Request, *, retry_seconds: float = _RETRY_SECONDS) -> Response:
    """The vault's response to a request.

    A vault that dies meanwhile is asked again once it is back: one charge buys one release, so repeating is safe.

    Args:
        path: of the vault's socket.
        request: what to ask.
        retry_seconds: for how long to look for a vault that does not listen.

    Raises:
        FrameError: the request does not fit a frame, or what came back is not a response.
        OSError: no vault listens.
    """
    frame = pack_request(request)
    deadline = time.monotonic() + retry_seconds
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                deadline = math.inf  # it listens; should it die, however late, it gets the same time to come back
                connection.sendall(frame)
                answer = receive(connection)
            if answer is not None:
                return unpack_response(answer)
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

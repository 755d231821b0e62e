"""Frames over a Unix socket: the ClientApp's side, and reading and writing for both sides."""

from __future__ import annotations

import math
import socket
import struct
import time
from pathlib import Path

from fedpriv.vault.frames import PREFIX_BYTES, Request, Response, frame_length, pack_request, unpack_response

# How long a ClientApp waits for a vault that is being restarted.
_RETRY_SECONDS = 60.0
_RETRY_DELAY_SECONDS = 0.2

# struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


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

"""The vault's child process: it alone loads the model and the records, and answers one frame after another."""

from __future__ import annotations

import logging
import signal
import struct
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from fedpriv.vault.frames import REFUSED, FrameError, Request, Response, pack_response, unpack_request
from fedpriv.vault.settings import VaultSettings

# The first byte of what the worker sends: the request is charged and records will be touched next; or the response.
CHARGED = b"c"
ANSWERED = b"a"
# After CHARGED: the seconds after which, or after a multiple of which, the response may leave; 0 for at once.
SECONDS = struct.Struct("!d")


def run_worker(connection: Connection, folder: Path) -> None:
    """Answer frames until the other end closes.

    Args:
        connection: to the service.
        folder: of the node.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when its child ends
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    # These load torch, which the service itself does without.
    import torch

    from fedpriv.vault.answer import answer
    from fedpriv.vault.holder import Holder

    # Subnormal numbers, which a broadcast may hold or lead to, take a hundred times longer: a reply's public time would
    # not suffice. Other threads inherit this from the one that starts them.
    torch.set_flush_denormal(True)

    def charged(reply_seconds: float) -> None:
        connection.send_bytes(CHARGED + SECONDS.pack(reply_seconds))

    holder = replace(Holder.of(VaultSettings.read(folder)), before_records=charged)

    def answered(request: Request | FrameError) -> Response:
        if isinstance(request, FrameError):
            return Response(code=REFUSED, reason=f"refused: {request}")
        return answer(request, holder)

    while True:
        try:
            frame = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(ANSWERED + pack_response(answered(_request(frame))))


def _request(frame: bytes) -> Request | FrameError:
    try:
        return unpack_request(frame)
    except FrameError as error:
        return error

"""The running server of `fedpriv watch`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

from fedpriv.errors import InputError
from fedpriv.live.app import MOST_STREAMS, Watch
from fedpriv.serving.http.limits import RequestLimits
from fedpriv.serving.http.server import Address, ListeningServer

# Streams stay open; next to them there is room for as many pages and reports.
LIMITS = RequestLimits(num_connections=4 * MOST_STREAMS, connections_per_address=4 * MOST_STREAMS)


class WatchServer(ListeningServer):
    """Serves until SIGTERM or SIGINT, then lets the streams end, and ends with 0.

    Args:
        watch: the pages.
        address: where to listen.
        on_ready: is told the URL once clients can connect.
        limits: of connections.
    """

    def __init__(
        self, watch: Watch, address: Address, on_ready: Callable[[str], None], limits: RequestLimits = LIMITS
    ) -> None:
        super().__init__(watch.application(address.host), limits, address, on_ready)
        self._watch = watch
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell where."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End. Unlike uvicorn's own, the signal is not raised again, so that the exit code is 0."""
        self.stop()

    def stop(self) -> None:
        """End all streams and then the server; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._watch.close)
        self.should_exit = True


def check_host(address: Address, *, insecure: bool) -> None:
    """Refuse to be read by other machines, which are not asked who they are.

    Raises:
        InputError: the address is not of this machine alone.
    """
    if not address.is_local and not insecure:
        raise InputError(
            f"host = {address.host!r}: other machines could read along, and nobody is asked who it is; keep 127.0.0.1 "
            f"and come through ssh -L {address.port}:127.0.0.1:{address.port} MACHINE, or give --insecure if something "
            "else protects the way here"
        )

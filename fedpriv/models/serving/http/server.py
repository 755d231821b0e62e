"""A running server: uvicorn on loopback or a Unix socket, how it ends, and when it reads its tokens again."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from fedpriv.errors import InputError
from fedpriv.models.serving.http.limits import RequestLimits
from fedpriv.models.serving.http.tokens import Tokens

log = logging.getLogger("fedpriv")

# Connections and requests under way beyond which a request is a 503; nginx lets through fewer.
_MOST_AT_ONCE = 512
_MOST_HEAD_BYTES = 2**14
_KEEP_ALIVE_SECONDS = 75  # longer than nginx keeps its connections to here, so that it never meets a closed one


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address at which a server listens.

    Attributes:
        host: a name or number of this machine.
        port: 0 takes any that is free.
        path: of a Unix socket, which stands for host and port; anyone on this machine who can enter its folder
            can connect.
    """

    host: str = "127.0.0.1"
    port: int = 0
    path: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.path is not None or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check(self, *, has_tokens: bool, behind_proxy: bool) -> None:
        """Refuse, with an InputError, to be reached by other machines without a proxy and tokens."""
        if not self.is_local and not (behind_proxy and has_tokens):
            raise InputError(
                f"host = {self.host!r}: other machines could ask and listen in; keep 127.0.0.1 and put the nginx of "
                "--nginx FILE in front, or give --tokens and --behind-proxy if another proxy protects the way here"
            )

    def bound(self) -> socket.socket:
        """A socket that is bound to it; InputError if it cannot be."""
        try:
            if self.path is not None:
                return _bound_to_path(self.path)
            return socket.create_server((self.host, self.port), family=self._family)
        except OSError:
            at = f"socket = {str(self.path)!r}" if self.path else f"host, port = {self.host}, {self.port}"
            raise InputError(f"{at}: cannot listen there; is it taken?") from None

    def url(self, bound: socket.socket) -> str:
        """The address as a client writes it, once it is bound."""
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{bound.getsockname()[1]}"

    @property
    def _family(self) -> socket.AddressFamily:
        return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


def _bound_to_path(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            try:
                found.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # of a server that was killed
        found.bind(str(path))
        path.chmod(0o666)  # as uvicorn's own: nginx is another user
    except OSError:
        found.close()
        raise
    return found


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then finishes what is under way for `drain_seconds`; a second one ends it.

    Args:
        on_ready: is told the URL once clients can connect.
        drain_seconds: after which requests that are still under way are answered with 503.
    """

    def __init__(
        self, app: ASGIApp, address: Address, on_ready: Callable[[str], None], drain_seconds: float = 1.0
    ) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_AT_ONCE,
            h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self._address, self._on_ready = address, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell where; InputError if the address cannot be listened on."""
        bound = self._address.bound()
        await super().startup([bound])
        self._on_ready(self._address.url(bound))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`; leaves no socket's file behind."""
        if self._address.path is not None:
            self._address.path.unlink(missing_ok=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. Unlike uvicorn's own, the signal is not raised again, so that the exit code is 0."""
        self.should_exit, self.force_exit = True, self.should_exit


def run(app: ASGIApp, tokens: Tokens, limits: RequestLimits, address: Address, on_ready: Callable[[str], None]) -> None:
    """Serve in this process's main thread until a signal ends it; SIGHUP reads the tokens again.

    Raises:
        InputError: the address cannot be listened on.
    """

    def reload(number: int, frame: FrameType | None) -> None:
        try:
            log.info("tokens read again: %s", tokens.reload())
        except InputError as error:
            log.error("the tokens stay as they were: %s", error)

    previous = signal.signal(signal.SIGHUP, reload)
    try:
        Server(app, address, on_ready, limits.drain_seconds).run()
    finally:
        signal.signal(signal.SIGHUP, previous)

"""A running server: where it may listen, how it ends, and when it reads its tokens again."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from fedpriv.errors import InputError
from fedpriv.serving.http._connections import Places, connection_class, listeners
from fedpriv.serving.http.limits import InFlight, RequestLimits, ThreadTurns
from fedpriv.serving.http.tokens import Tokens
from fedpriv.serving.requests import Serving

log = logging.getLogger("fedpriv")

# Connections that the system takes up before they get a place here, each time round the event loop. Where they find no
# room, a client's system tries again a second later, so those of one address must not fill it between two rounds.
_BACKLOG = 1024
# For a client that does not say the end of TLS.
_TLS_END_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address at which a server listens.

    Attributes:
        host: a name or number of this machine.
        port: 0 takes any that is free.
        certificate: PEM file of the certificate and those that sign it; None serves without TLS.
        key: PEM file of its key.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check(self, *, has_tokens: bool, insecure: bool) -> None:
        """Refuse to be reached from elsewhere without tokens and TLS, and a certificate that cannot be used.

        Raises:
            InputError: one of these.
        """
        if (self.certificate is None) != (self.key is None):
            raise InputError("certificate, key: give both or neither")
        missing = [name for name, given in (("--tokens", has_tokens), ("--certificate", self.certificate)) if not given]
        if missing and not self.is_local and not insecure:
            raise InputError(
                f"host = {self.host!r}: other machines could ask and listen in; give {' and '.join(missing)}, "
                "or --insecure if something else protects the way here"
            )
        if self.certificate is not None and self.key is not None:
            _check_certificate(self.certificate, self.key)


class ListeningServer(uvicorn.Server):
    """A server that says where it listens.

    Args:
        app: the ASGI application.
        limits: of connections.
        address: where to listen.
        on_ready: is told the URL once clients can connect.
        places: of its connections; by default new ones by `limits`.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: RequestLimits,
        address: Address,
        on_ready: Callable[[str], None],
        places: Places | None = None,
    ) -> None:
        super().__init__(_config(app, limits, address))
        self._limits, self._address, self._on_ready = limits, address, on_ready
        self._places = places or Places(limits.num_connections, limits.connections_per_address)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell where. uvicorn's own gives TLS a minute for its handshake.

        Raises:
            InputError: the address cannot be listened on.
        """
        loop, config = asyncio.get_running_loop(), self.config

        def connection() -> asyncio.Protocol:
            protocol: Any = config.http_protocol_class
            state = self.lifespan.state
            return protocol(config=config, server_state=self.server_state, app_state=state, _loop=loop)  # type: ignore[no-any-return]

        tls: dict[str, Any] = {}
        if config.ssl is not None:
            tls = {
                "ssl": config.ssl,
                "ssl_handshake_timeout": self._limits.handshake_seconds,
                "ssl_shutdown_timeout": _TLS_END_SECONDS,
            }
        try:
            bound = listeners(config.host, config.port, self._places)
            self.servers = [await loop.create_server(connection, sock=each, backlog=_BACKLOG, **tls) for each in bound]
        except OSError:
            host, port = config.host, config.port
            raise InputError(f"host, port = {host}, {port}: cannot listen there; is the port taken?") from None
        self.started = True
        self._on_ready(self.url)

    @property
    def url(self) -> str:
        """The address of the server, once it listens."""
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        port = self.servers[0].sockets[0].getsockname()[1]
        return f"{'https' if self._address.certificate else 'http'}://{host}:{port}"

    def serve_until_signal(self) -> None:
        """Serve in this process's main thread until a signal ends it.

        Raises:
            InputError: the address cannot be listened on.
        """
        self.run()


class Server(ListeningServer):
    """Serves until SIGTERM or SIGINT, then finishes what is under way and refuses what is new; a second one ends it.

    Args:
        app: of `fedpriv.serving.http.app.create_app`.
        serving: the engine; closed by the caller who opened it.
        tokens: read again on SIGHUP.
        limits: of connections, and of the time to finish.
        address: where to listen.
        on_ready: is told the URL once clients can connect.
    """

    def __init__(
        self,
        app: FastAPI,
        serving: Serving,
        tokens: Tokens,
        limits: RequestLimits,
        address: Address,
        on_ready: Callable[[str], None],
    ) -> None:
        super().__init__(app, limits, address, on_ready, app.state.places)
        self._serving, self._tokens = serving, tokens
        self._in_flight: InFlight = app.state.in_flight
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell where."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. Unlike uvicorn's own, the signal is not raised again, so that the exit code is 0."""
        if self._loop is None or not self.started or not self._in_flight.is_open:
            self.should_exit = self.force_exit = True
            return
        self._in_flight.is_open = False
        self._loop.call_soon_threadsafe(self.begin_to_drain)

    def begin_to_drain(self) -> None:
        """Refuse what is new, finish what is under way, and then stop. On the server's event loop."""
        self._in_flight.is_open = False
        self._drain = asyncio.get_running_loop().create_task(self._finish())

    def reload_tokens(self) -> None:
        """Read the tokens again; a file that is wrong leaves them as they were."""
        try:
            log.info("tokens read again: %s", self._tokens.reload())
        except InputError as error:
            log.error("the tokens stay as they were: %s", error)

    async def _finish(self) -> None:
        end = time.monotonic() + self._limits.drain_seconds
        log.info("stopping: %s requests under way", self._in_flight.num_requests)
        # In a thread of its own: what clients wait for could be long before it in another.
        is_done = await ThreadTurns("drain").run("", partial(self._serving.drain, self._limits.drain_seconds))
        # The engine is done; the last words are still on their way to the clients.
        is_done &= await self._in_flight.wait_until_none(max(0.5, end - time.monotonic()))
        if not is_done:
            log.warning("not all requests were answered within %g s", self._limits.drain_seconds)
        self.should_exit = True


def run(server: Server) -> None:
    """Serve in this process's main thread until a signal ends it.

    Raises:
        InputError: the address cannot be listened on.
    """
    previous = signal.signal(signal.SIGHUP, lambda number, frame: server.reload_tokens())
    try:
        server.serve_until_signal()
    finally:
        signal.signal(signal.SIGHUP, previous)


def _config(app: ASGIApp, limits: RequestLimits, address: Address) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=address.host,
        port=address.port,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.key,
        http=connection_class(limits),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.keep_alive_seconds,
        timeout_graceful_shutdown=1,
    )


def _check_certificate(certificate: Path, key: Path) -> None:
    try:
        if stat.S_IMODE(key.stat().st_mode) & stat.S_IRWXO:
            raise InputError(f"key = {str(key)!r}: anyone on this machine can open it; run chmod o= on it")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise InputError(f"certificate, key = {str(certificate)!r}, {str(key)!r}: cannot be used ({reason})") from None

"""How a server is reached: uvicorn on loopback or a Unix socket, how it ends, and an nginx for other machines."""

import ipaddress
import json
import logging
import re
import signal
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from fedpriv.errors import InputError
from fedpriv.models.serving.http.limits import RequestLimits
from fedpriv.models.serving.http.refusals import RefusalError
from fedpriv.models.serving.http.tokens import Tokens

log = logging.getLogger("fedpriv")

# Connections and requests under way beyond which a request is a 503; nginx lets through fewer.
_MOST_AT_ONCE = 512

_MOST_HEAD_BYTES = 2**14
_KEEP_ALIVE_SECONDS = 75  # longer than nginx keeps its connections to here, so that it never meets a closed one

# Of what nginx writes as it is; a path with a space, a quote or a dollar sign would mean something else there.
_PATH = re.compile(r"[A-Za-z0-9/._@+-]+")

_REFUSAL = """
    error_page {statuses} ={status} /_refused/{status};
    location = /_refused/{status} {{
        internal;
        default_type application/json;
        add_header Cache-Control no-store always;
        return {status} '{body}';
    }}
"""

# {status: (statuses of nginx that become it, code, message)}, in the shape of all other errors.
_REFUSALS = {
    400: ("400 501 505", "invalid_http", "This is not a valid HTTP request."),
    405: ("405", "wrong_method", "This address takes another method."),
    408: ("408", "slow_request", "The request did not come in time."),
    413: ("413", "body_too_large", "The body is too long."),
    414: ("414", "invalid_http", "The address is too long."),
    429: ("429", "too_many_requests", "This address asks too much at once; try again in a moment."),
    431: ("431 494", "head_too_large", "The headers are too long."),
    502: ("502 503 504", "not_there", "The server does not answer; try again later."),
}


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
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            return socket.create_server((self.host, self.port), family=found[0][0])
        except OSError:
            at = f"socket = {str(self.path)!r}" if self.path else f"host, port = {self.host}, {self.port}"
            raise InputError(f"{at}: cannot listen there; is it taken?") from None

    def check_free(self) -> None:
        """Refuse an address that cannot be listened on, before what is to be served is loaded; leaves nothing there."""
        self.bound().close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def url(self, bound: socket.socket) -> str:
        """The address as a client writes it, once it is bound."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"http://{self.host_in_url}:{bound.getsockname()[1]}"

    @property
    def host_in_url(self) -> str:
        """The host as it stands before a port: a number of IPv6 is in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


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

    InputError if the address cannot be listened on.
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


def nginx_configuration(address: Address, limits: RequestLimits, *, port: int, certificate: Path, key: Path) -> str:
    """The configuration of an nginx that listens on a port for other machines.

    Args:
        certificate: PEM file of the certificate and those that sign it.
        key: PEM file of its key.

    Raises:
        InputError: the address has no fixed port, a path cannot be written there, or the certificate not be used.
    """
    if address.path is None and not address.port:
        raise InputError("port = 0: nginx has to know it; give --port or --socket")
    _check_certificate(certificate, key)
    upstream = f"unix:{_nginx_path(address.path)}" if address.path else f"{address.host_in_url}:{address.port}"
    refusals = [
        _REFUSAL.format(
            statuses=statuses, status=status, body=json.dumps(RefusalError(status, message, code=code).as_dict())
        )
        for status, (statuses, code, message) in _REFUSALS.items()
    ]
    template = (resources.files("fedpriv.models.serving.http") / "nginx.conf").read_text(encoding="utf-8")
    return template.format(
        upstream=upstream,
        port=port,
        certificate=_nginx_path(certificate),
        key=_nginx_path(key),
        body_bytes=limits.body_bytes,
        per_address=limits.connections_per_address,
        refusals="".join(refusals),
    )


def _nginx_path(path: Path) -> str:
    found = str(path.absolute())
    if not _PATH.fullmatch(found):
        raise InputError(f"path = {found!r}: for nginx it must be of letters, digits and / . _ @ + - alone")
    return found


def _check_certificate(certificate: Path, key: Path) -> None:
    try:
        if stat.S_IMODE(key.stat().st_mode) & stat.S_IRWXO:
            raise InputError(f"key = {str(key)!r}: anyone on this machine can open it; run chmod o= on it")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise InputError(f"certificate, key = {str(certificate)!r}, {str(key)!r}: cannot be used ({reason})") from None

"""What every server here asks of a request's head, and the headers that all of its answers have."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope, Send

from fedpriv.serving.http.refusals import RefusalError

_MOST_HEAD_BYTES = 2**15
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def values_of(scope: Scope, name: bytes) -> list[bytes]:
    """The values of a header, in their order; its name in lower case."""
    return [value for key, value in scope["headers"] if key == name]


def check_head(scope: Scope) -> None:
    """Refuse versions of HTTP that this server does not speak, and long heads.

    Raises:
        RefusalError: one of these.
    """
    if scope["http_version"] not in ("1.0", "1.1"):
        raise RefusalError(400, "This server speaks HTTP/1.0 and HTTP/1.1.", code="invalid_http")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > _MOST_HEAD_BYTES:
        raise RefusalError(431, f"The headers have more than {_MOST_HEAD_BYTES} bytes.", code="head_too_large")


def named_host(scope: Scope) -> str:
    """The name or number by which a request calls this server, without the port; empty if it gives none, or two."""
    hosts = values_of(scope, b"host")
    host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def check_local_name(scope: Scope) -> None:
    """Refuse a request to a server on loopback by a name that is not its own.

    Only this machine reaches such a server, but so does a page in its browser, by a name of its own site.

    Raises:
        RefusalError: it is such a request.
    """
    address, _ = scope.get("server") or ("", None)
    if is_loopback(address) and named_host(scope) not in (*_LOCAL, address, f"[{address}]"):
        raise RefusalError(421, "This server answers only to its own address, as it has no tokens.", code="wrong_host")


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine alone; in doubt it is, so that the name is checked."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


def with_headers(send: Send, on_status: Callable[[int], None], extra: Mapping[str, str] | None = None) -> Send:
    """A `send` that tells the status, and adds the headers that every answer has, and those of `extra`."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            on_status(message["status"])
            headers = MutableHeaders(scope=message)
            for name, value in (_HEADERS | dict(extra or {})).items():
                headers.setdefault(name, value)
        await send(message)

    return sending

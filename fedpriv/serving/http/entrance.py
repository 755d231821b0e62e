"""What every request passes before the application sees it: who asks, how much at once, and how much of a body."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from contextlib import nullcontext

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpriv.serving.http.limits import InFlight, Limits, read_body, replaying
from fedpriv.serving.http.metrics import Metrics
from fedpriv.serving.http.refusals import RefusalError, stopping
from fedpriv.serving.http.tokens import ANYONE, Token, Tokens

# What a stranger may see: that a server is here and well, and an empty page that asks for a token.
OPEN = ("/", "/health")

_MOST_HEAD_BYTES = 2**15
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Entrance:
    """Middleware around the application.

    In this order, so that nobody costs much before it is known who asks: the host, the token, the number of its
    requests under way, the kind and the length of the body.

    Args:
        app: the application.
        tokens: who may ask.
        limits: of each.
        in_flight: the requests under way.
        metrics: are told of every request.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, limits: Limits, in_flight: InFlight, metrics: Metrics) -> None:
        self._app, self._tokens, self._limits = app, tokens, limits
        self._in_flight, self._metrics = in_flight, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, statuses = time.perf_counter(), list[int]()
        answer = _noting(statuses, send)
        try:
            await self._admit(scope, receive, answer)
        except RefusalError as refusal:
            scope["refused"] = refusal.code
            await refusal.response()(scope, receive, answer)
        except asyncio.CancelledError:
            # The server's time to stop is over. An answer that has begun breaks off.
            if self._in_flight.is_open:
                raise
            if not statuses:
                await stopping().response()(scope, receive, answer)
        finally:
            if "refused" in scope:
                self._metrics.refused(scope["refused"])
            endpoint = getattr(scope.get("route"), "path", "other")
            # Without a status the client has left before there was one; nginx counts that as 499, too.
            self._metrics.observe(endpoint, statuses[0] if statuses else 499, time.perf_counter() - started)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_head(scope)
        self._check_host(scope)
        is_open = scope["path"] in OPEN
        token = ANYONE if is_open else self._bearer(scope)
        scope["token"] = token
        with nullcontext() if is_open else self._in_flight.one_more(token.name) as count_inputs:
            scope["count_inputs"] = count_inputs
            if scope["method"] == "POST":
                _check_content_type(scope)
            body = await read_body(scope, receive, self._limits)
            if body is not None:
                await self._app(scope, replaying(body, receive), send)

    def _check_host(self, scope: Scope) -> None:
        """Only this machine reaches a server on loopback, but so does a page in its browser, by a name of its own site.

        Such a page has no token; where none is needed, the name gives it away.
        """
        hosts = _headers(scope, b"host")
        if self._tokens.are_required:
            return
        host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
        bare = host if host.endswith("]") else host.rpartition(":")[0] or host
        server = scope.get("server") or ("", None)
        if _is_loopback(server[0]) and bare not in (*_LOCAL, server[0], f"[{server[0]}]"):
            raise RefusalError(
                421, "This server answers only to its own address, as it has no tokens.", code="wrong_host"
            )

    def _bearer(self, scope: Scope) -> Token:
        token = self._tokens.bearer(_headers(scope, b"authorization"))
        if token is None:
            message = "Give one valid token in one header, Authorization: Bearer TOKEN."
            raise RefusalError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return token


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _check_head(scope: Scope) -> None:
    if scope["http_version"] not in ("1.0", "1.1"):
        raise RefusalError(400, "This server speaks HTTP/1.0 and HTTP/1.1.", code="invalid_http")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > _MOST_HEAD_BYTES:
        raise RefusalError(431, f"The headers have more than {_MOST_HEAD_BYTES} bytes.", code="head_too_large")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True  # In doubt the name is checked.


def _check_content_type(scope: Scope) -> None:
    """JSON alone: a web page elsewhere cannot send that without asking first, and is never allowed to."""
    kinds = _headers(scope, b"content-type")
    if len(kinds) != 1 or kinds[0].partition(b";")[0].strip().lower() != b"application/json":
        raise RefusalError(
            415, "The body must be JSON, with Content-Type: application/json.", code="wrong_content_type"
        )
    if _headers(scope, b"content-encoding"):
        raise RefusalError(415, "The body must not be compressed.", code="wrong_content_type")


def _noting(statuses: list[int], send: Send) -> Send:
    """A `send` that notes the status and adds the headers that every response has."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return noting

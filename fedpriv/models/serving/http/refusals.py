"""Refusals: one status and one line instead of an answer, in the shape that OpenAI's clients read."""

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send

from fedpriv.models.serving.requests import (
    BusyError,
    ServingError,
    TooLongError,
    UnknownVariantError,
    UnreadableVariantError,
)

_SHOWN = 100
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_LOCAL = ("localhost", "127.0.0.1", "[::1]")

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class RefusalError(Exception):
    """A request that is not answered.

    Attributes:
        message: one line; holds nothing that the client's token may not see.
        code: names the reason; one of a few, since metrics count by it.
        param: the part of the request that it is about.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """The body of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.as_dict(), self.status, self.headers)


def shown(text: str) -> str:
    """A client's own text as a message repeats it: short, printable, on one line."""
    return ascii(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def unknown_model(name: str) -> RefusalError:
    """The one answer to a variant that does not exist and to one that the token may not use."""
    message = f"The model {shown(name)} does not exist, or this token may not use it; GET /v1/models lists what it may."
    return RefusalError(404, message, code="model_not_found", param="model")


def stopping() -> RefusalError:
    """The server stops before it has answered."""
    message = "The server stops, and has not answered in time."
    return RefusalError(503, message, code="stopping", headers={"Retry-After": "5"})


def of_engine(error: ServingError, name: str) -> RefusalError:
    """The refusal that tells a client of an engine's error."""
    match error:
        case UnknownVariantError():
            return unknown_model(name)
        case UnreadableVariantError():
            message = f"The model {shown(name)} cannot be read; the server's log says why. Others are served."
            headers = {"X-Should-Retry": "false"}  # trying again changes nothing, and OpenAI's clients would
            return RefusalError(503, message, code="model_unreadable", param="model", headers=headers)
        case TooLongError():
            return RefusalError(400, str(error), code="context_length_exceeded")
        case BusyError():
            message = "The server has as many requests as it lets wait; try again in 1 s."
            return RefusalError(429, message, code="busy", headers={"Retry-After": "1"})
    return RefusalError(400, str(error), code="not_answered")


def values_of(scope: Scope, name: bytes) -> list[bytes]:
    """The values of a header, in their order; its name in lower case."""
    return [value for key, value in scope["headers"] if key == name]


def named_host(scope: Scope) -> str:
    """The name or number by which a request calls this server, without the port; empty if it gives none, or two."""
    hosts = values_of(scope, b"host")
    host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def check_local_name(scope: Scope) -> None:
    """Refuse a request to a server on loopback by a name that is not its own, with a RefusalError.

    Only this machine reaches such a server, but so does a page in its browser, by a name of its own site.
    """
    address, _ = scope.get("server") or ("", None)
    if _is_loopback(address) and named_host(scope) not in (*_LOCAL, address, f"[{address}]"):
        raise RefusalError(421, "This server answers only to its own address, as it has no tokens.", code="wrong_host")


def _is_loopback(address: str) -> bool:
    """Whether an address is of this machine alone; in doubt it is, so that the name is checked."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


def with_headers(send: Send, on_status: Callable[[int], None]) -> Send:
    """A `send` that tells the status, and adds the headers that every answer has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            on_status(message["status"])
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending

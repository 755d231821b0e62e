"""What a client is told instead of an answer: one status and one line, in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from fedpriv.serving.requests import BusyError, DamagedVariantError, ServingError, TooLongError, UnknownVariantError

_SHOWN = 100
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RefusalError(Exception):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        message: one line; holds nothing that the client's token may not see.
        code: names the reason; one of a few, since metrics count by it.
        param: the part of the request that it is about.
        headers: further ones of the response.
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


def busy(seconds: int = 1) -> RefusalError:
    """Too many requests are waiting."""
    message = f"The server has as many requests as it lets wait; try again in {seconds} s."
    return RefusalError(429, message, code="busy", headers={"Retry-After": str(seconds)})


def stopping() -> RefusalError:
    """The server is about to stop."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return RefusalError(503, "The server is about to stop and accepts nothing more.", code="stopping", headers=headers)


def of_engine(error: ServingError, name: str, *, is_open: bool) -> RefusalError:
    """What a client is told about an engine's error.

    Args:
        error: of the engine.
        name: of the variant that was asked.
        is_open: False once the server is about to stop.
    """
    match error:
        case UnknownVariantError():
            return unknown_model(name)
        case DamagedVariantError():
            message = f"The model {shown(name)} is damaged in the store and is not served; others are."
            # Trying again changes nothing, and OpenAI's clients would.
            return RefusalError(503, message, code="model_damaged", param="model", headers={"X-Should-Retry": "false"})
        case TooLongError():
            return RefusalError(400, str(error), code="context_length_exceeded")
        case BusyError():
            return busy() if is_open else stopping()
    return RefusalError(400, str(error), code="not_answered")

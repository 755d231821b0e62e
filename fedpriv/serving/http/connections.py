"""Connections that are held to deadlines, and whose bodies are read only for those that may send them.

uvicorn's own wait for a request's head and for a reader without end, and go on to parse a body that was refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedpriv.serving.http.limits import Limits
from fedpriv.serving.http.refusals import RefusalError

# What is parsed at once, and the longest head that is not complete; a longer one takes the event loop too long.
_HEAD_BYTES = 2**14
# Seconds for a client that still sends to read why it was refused; nothing of what it sends is read.
_LINGER_SECONDS = 1.0


def connection_class(limits: Limits) -> type[asyncio.Protocol]:
    """The class of a server's connections, for `uvicorn.Config(http=...)`.

    A connection is closed if a head that has begun is not complete within `header_seconds`, also one that never begins,
    and if an answer is left unread for `write_seconds`. What is not HTTP is answered in the shape of all other errors.
    A body is read only once the application asks for it; an answer before its end closes the connection.
    """

    class BoundedConnection(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None
        conn: _BodyOnDemand

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.conn = _BodyOnDemand(h11.SERVER, _HEAD_BYTES)
            self.flow = _Flow(transport, self._want_body)
            self.transport = _Lingering(transport, self._is_unread)  # type: ignore[assignment]
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            for start in range(0, len(data), _HEAD_BYTES):
                if not self.transport.is_closing():
                    super().data_received(data[start : start + _HEAD_BYTES])
            self._watch_head()

        def handle_events(self) -> None:
            super().handle_events()
            if not self.conn.gives_body:
                self.flow.pause_reading()

        def on_response_complete(self) -> None:
            if self._is_unread():
                self.transport.close()
            super().on_response_complete()

        def eof_received(self) -> None:
            if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
                self._end_with(RefusalError(400, "The body ends before its end.", code="truncated_body"))

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head()
            self._stop_reader()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_reader()

        def send_400_response(self, msg: str) -> None:
            self._end_with(RefusalError(400, "This is not a valid HTTP request.", code="invalid_http"))

        def _want_body(self) -> None:
            if not self.conn.gives_body:
                self.conn.gives_body = True
                self.handle_events()

        def _is_unread(self) -> bool:
            """Whether the client may still be sending what nobody will read."""
            return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

        def _watch_head(self) -> None:
            """Start the clock unless it runs already, and stop it once a request is under way."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_head()
            elif self._head is None and not self.transport.is_closing():
                self._head = self.loop.call_later(limits.header_seconds, self._head_is_late)

        def _stop_head(self) -> None:
            if self._head is not None:
                self._head.cancel()
            self._head = None

        def _stop_reader(self) -> None:
            if self._reader is not None:
                self._reader.cancel()
            self._reader = None

        def _head_is_late(self) -> None:
            self._head = None
            seconds = f"{limits.header_seconds:g} s"
            self._end_with(RefusalError(408, f"The request's head did not come within {seconds}.", code="slow_head"))

        def _end_with(self, refusal: RefusalError) -> None:
            """Answer, where no other answer has begun, and close."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
                body = json.dumps(refusal.as_dict()).encode()
                length = str(len(body)).encode()
                headers = [
                    (b"content-type", b"application/json"),
                    (b"content-length", length),
                    (b"connection", b"close"),
                ]
                events = (h11.Response(status_code=refusal.status, headers=headers), h11.Data(data=body))
                self.transport.write(b"".join(self.conn.send(event) or b"" for event in (*events, h11.EndOfMessage())))
            self.transport.close()

    return BoundedConnection


class _BodyOnDemand(h11.Connection):
    """Parses a request's body only when told to; its chunks could else keep the event loop before it is refused.

    Attributes:
        gives_body: whether it parses on; False behind the head of a request with a body.
    """

    gives_body = True

    def next_event(self) -> Any:
        """See `h11.Connection`."""
        if not self.gives_body:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            lengths = {
                name: value for name, value in event.headers if name in (b"content-length", b"transfer-encoding")
            }
            self.gives_body = lengths in ({}, {b"content-length": b"0"})
        return event


class _Flow(FlowControl):
    """Says when more is to be read: the application has asked for the body, or the next request may come."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def resume_reading(self) -> None:
        super().resume_reading()
        self._on_resume()


class _Lingering:
    """A transport whose `close` reads no more, and leaves a client that still sends the time to read its answer.

    If its socket were closed with unread bytes, the client's system would drop the answer.

    Args:
        transport: all else is its own.
        is_unread: whether the client may still be sending.
    """

    def __init__(self, transport: asyncio.Transport, is_unread: Callable[[], bool]) -> None:
        self._transport, self._is_unread = transport, is_unread
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether `close` was called, or the client has left."""
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """See `asyncio.Transport`."""
        if self.is_closing() or not self._is_unread():
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.pause_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._transport.abort)

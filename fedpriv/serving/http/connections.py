"""Connections that are held to deadlines: uvicorn's own wait for a request's head, and for a reader, without end."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedpriv.serving.http.limits import Limits
from fedpriv.serving.http.refusals import RefusalError


def connection_class(limits: Limits) -> type[asyncio.Protocol]:
    """The class of a server's connections, for `uvicorn.Config(http=...)`.

    A connection is closed if a head that has begun is not complete within `header_seconds`, also one that never begins,
    and if an answer is left unread for `write_seconds`. What is not HTTP is answered in the shape of all other errors.
    """

    class BoundedConnection(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

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

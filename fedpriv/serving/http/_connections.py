"""Connections: each needs a place, is held to deadlines, and its bodies are read only for those that may send them.

Whether a connection has a place is decided before anything of it is read, its TLS included. uvicorn's own would wait
for a request's head and for a reader without end, and go on to parse a body that was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedpriv.serving.http.limits import RequestLimits
from fedpriv.serving.http.refusals import RefusalError

# For which a stranger's connection counts against its address, also when it is closed already.
_SECONDS = 4.0
# An owner of IPv6 has as many addresses as it likes within one network of this length.
_IPV6_PREFIX = 64
# Connections that are refused before others of the event loop have a turn: some 10 ms.
_REFUSED_AT_ONCE = 128

Peer = tuple[str, int]


@dataclass(eq=False)
class _Place:
    """A connection.

    Attributes:
        connection: its socket, which asyncio closes.
        network: that it comes from.
        since: when it came, or its last request ended.
        is_known: whether a request with a valid token came through it.
        is_kept: whether such a request is under way.
        is_open: whether it still needs its place.
    """

    connection: socket.socket
    network: str
    since: float
    is_known: bool = False
    is_kept: bool = False
    is_open: bool = True


class Places:
    """The connections of a server. Those with an admitted request under way are kept; others make room for new ones.

    An address may have few connections that no valid token came through, those that ended a moment ago included: that
    bounds handshakes and refusals, too. When all places are taken, a stranger's connection is ended for a new one,
    before one between two requests, and first the oldest of the address that has the most.

    Args:
        most: connections.
        per_address: of strangers.
        clock: in seconds.
    """

    def __init__(self, most: int, per_address: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_address, self._clock = most, per_address, clock
        self._places: list[_Place] = []
        self._of_peer: dict[Peer, _Place] = {}

    def take(self, connection: socket.socket, peer: Peer) -> bool:
        """Whether a new connection gets a place."""
        self._forget()
        network = _network(peer[0])
        if sum(not place.is_known and place.network == network for place in self._places) >= self._per_address:
            return False
        if sum(place.is_open for place in self._places) >= self._most and not self._make_room():
            return False
        place = _Place(connection, network, self._clock())
        self._places.append(place)
        self._of_peer[peer] = place
        return True

    @contextmanager
    def kept(self, peer: Peer) -> Iterator[None]:
        """Keep the place of a connection while a request with a valid token is under way."""
        place = self._of_peer.get(peer)
        if place is None:  # a server that listens in another way
            yield
            return
        place.is_known = place.is_kept = True
        try:
            yield
        finally:
            place.is_kept, place.since = False, self._clock()

    def _forget(self) -> None:
        """Forget connections that have ended, and no longer count."""
        recent = self._clock() - _SECONDS
        for place in self._places:
            place.is_open &= place.connection.fileno() >= 0
        self._places = [p for p in self._places if p.is_open or not (p.is_known or p.since < recent)]
        self._of_peer = {peer: place for peer, place in self._of_peer.items() if place.is_open}

    def _make_room(self) -> bool:
        """Whether a connection could be ended."""
        idle = [place for place in self._places if place.is_open and not place.is_kept]
        if not idle:
            return False
        num = Counter((place.is_known, place.network) for place in idle)
        last = min(idle, key=lambda place: (place.is_known, -num[place.is_known, place.network], place.since))
        last.is_open = False
        with contextlib.suppress(OSError):
            # asyncio reads its end and closes it, in whatever state its TLS is.
            last.connection.shutdown(socket.SHUT_RDWR)
        return True


class Listener(socket.socket):
    """A listening socket that gives only connections with a place, and closes all others.

    Attributes:
        places: that there are.
    """

    places: Places

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.accept`.

        Raises:
            BlockingIOError: none is there, or many were refused.
        """
        for _ in range(_REFUSED_AT_ONCE):
            connection, address = super().accept()
            if self.places.take(connection, address[:2]):
                return connection, address
            connection.close()
        raise BlockingIOError


def listeners(host: str, port: int, places: Places) -> list[Listener]:
    """Sockets that are bound to every address of a name.

    Raises:
        OSError: one of them cannot be bound.
    """
    found: list[Listener] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = Listener(family, kind, protocol)
            found.append(listener)
            listener.places = places
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
    except OSError:
        for each in found:
            each.close()
        raise
    return found


def _network(host: str) -> str:
    """The least that an owner of addresses has: an IPv4 address, or a network of IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))


# What is parsed at once, and the longest head that is not complete; a longer one takes the event loop too long.
_HEAD_BYTES = 2**14
# Seconds for a client that still sends to read why it was refused; nothing of what it sends is read.
_LINGER_SECONDS = 1.0


def connection_class(limits: RequestLimits) -> type[asyncio.Protocol]:
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

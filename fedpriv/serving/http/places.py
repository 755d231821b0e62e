"""Who has a place for a connection, decided before anything of it is read, its TLS included."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# For which a stranger's connection counts against its address, also when it is closed already.
_SECONDS = 4.0
# An owner of IPv6 has as many addresses as it likes within one network of this length.
_IPV6_PREFIX = 64
# Connections that are refused before others of the event loop have a turn.
_REFUSED_AT_ONCE = 64

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
    """What an owner of addresses has at least: an IPv4 address, or a network of IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))

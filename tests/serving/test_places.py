"""Who may keep a connection, when there are too many."""

from __future__ import annotations

import socket

import pytest

from fedpriv.serving.http._connections import Places, listeners


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Connections:
    """Real sockets that pretend to come from anywhere."""

    def __init__(self, places: Places) -> None:
        self._places, self._port, self.other_ends = places, 0, []

    def come(self, host: str = "192.0.2.1") -> tuple[bool, socket.socket, tuple[str, int]]:
        mine, other = socket.socketpair()
        other.setblocking(False)
        self._port += 1
        self.other_ends.append(other)
        peer = host, self._port
        return self._places.take(mine, peer), mine, peer

    @property
    def num_ended(self) -> int:
        """Connections whose other end has been told that it is over."""
        return sum(has_ended(each) for each in self.other_ends)


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_an_address_has_few_connections_of_strangers_and_those_that_ended_count_for_seconds():
    clock = Clock()
    places = Places(100, 4, clock)
    connections = Connections(places)
    taken = [connections.come() for _ in range(4)]
    assert all(has_place for has_place, _, _ in taken)
    assert not connections.come()[0]
    assert connections.come("192.0.2.2")[0]
    for _, connection, _ in taken:
        connection.close()
    assert not connections.come()[0], "ten handshakes a second would do as much harm as ten at once"
    clock.now = 4.1
    assert connections.come()[0]


def test_addresses_of_one_ipv6_network_are_one():
    connections = Connections(Places(100, 2))
    assert [connections.come(f"2001:db8::{n}")[0] for n in range(1, 4)] == [True, True, False]
    assert connections.come("2001:db8:0:1::1")[0]


def test_a_connection_that_showed_a_token_counts_against_no_address():
    places = Places(100, 1)
    connections = Connections(places)
    for _ in range(10):
        has_place, _, peer = connections.come()
        assert has_place
        with places.kept(peer):
            pass


def test_when_all_places_are_taken_strangers_make_room_and_requests_under_way_never_do():
    clock = Clock()
    places = Places(6, 5, clock)
    connections = Connections(places)
    kept = [connections.come("198.51.100.1") for _ in range(2)]
    with places.kept(kept[0][2]), places.kept(kept[1][2]):
        for clock.now, host in enumerate(("192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.2"), start=1):
            assert connections.come(host)[0]
        assert connections.come("198.51.100.7")[0]
        assert [has_ended(each) for each in connections.other_ends] == [*[False] * 3, True, *[False] * 3]
        assert all(connections.come(f"203.0.113.{n}")[0] for n in range(100))
        assert not any(has_ended(end) for end in connections.other_ends[:2])
    # Between two requests they go last.
    assert connections.come("203.0.113.200")[0]
    assert not any(has_ended(end) for end in connections.other_ends[:2])


def test_when_every_place_is_kept_a_new_connection_gets_none():
    places = Places(1, 5)
    connections = Connections(places)
    with places.kept(connections.come()[2]):
        assert not connections.come()[0]
    assert connections.come()[0]


def test_a_listener_closes_what_has_no_place_before_it_is_read():
    (listener,) = listeners("127.0.0.1", 0, Places(10, 1))
    with listener:
        listener.listen()
        listener.setblocking(False)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        with listener.accept()[0], pytest.raises(BlockingIOError):
            listener.accept()
        for client in clients:
            client.settimeout(5)
            assert client.recv(1) == b""
            client.close()

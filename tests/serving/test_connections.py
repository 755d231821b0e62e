"""Slow, broken and greedy clients harm themselves alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest

from fedpriv.serving.http.limits import InFlight, RequestLimits, read_body
from fedpriv.serving.http.refusals import RefusalError
from fedpriv.serving.http.tokens import Tokens, add_new
from server.deploy.certificates import make_ca, make_server_certificate
from tests.serving.fake import FakeServing
from tests.serving.running import Running, running

GOOD = {"model": "global", "prompt": "x", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def eventually(claim: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not claim() and time.monotonic() < end:
        time.sleep(0.01)
    return claim()


def body_of(chunks: list[bytes], limits: RequestLimits, length: bytes | None = None) -> tuple[bytes | None, int]:
    """What `read_body` returns, and how many chunks it took."""
    left = list(chunks)

    async def receive() -> dict[str, object]:
        if not left:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    scope = {"headers": [] if length is None else [(b"content-length", length)]}
    try:
        return asyncio.run(read_body(scope, receive, limits)), len(chunks) - len(left)
    except RefusalError as refusal:
        return None, 1000 * refusal.status + len(chunks) - len(left)


def test_a_body_is_read_up_to_its_limit_and_refused_beyond_it_as_soon_as_that_is_known():
    limits = RequestLimits(body_bytes=10, body_seconds=0.05)
    assert body_of([b"12345", b"67890"], limits) == (b"1234567890", 2)
    assert body_of([b"12345", b"67890", b"1", b"2"], limits) == (None, 413_003)
    assert body_of([b"x"], limits, length=b"11") == (None, 413_000)
    assert body_of([b"x"], limits, length=b"9" * 5000) == (None, 413_000)
    assert body_of([b"1", *[b""] * 0], limits, length=b"10") == (b"1", 1)


def test_a_body_that_does_not_come_is_a_408():
    async def never() -> dict[str, object]:
        await asyncio.sleep(60)
        return {}

    with pytest.raises(RefusalError, match="did not come") as refused:
        asyncio.run(read_body({"headers": []}, never, RequestLimits(body_seconds=0.01)))
    assert refused.value.status == 408


def test_requests_are_counted_for_each_token_and_given_back_however_they_end():
    in_flight = InFlight(1, 10)
    with in_flight.one_more("a"), in_flight.one_more("b"):
        with pytest.raises(RefusalError, match="1 requests under way"), in_flight.one_more("a"):
            pass
        assert in_flight.num_requests == 2
    with pytest.raises(ZeroDivisionError), in_flight.one_more("a"):
        raise ZeroDivisionError
    assert in_flight.num_requests == 0


def test_the_inputs_of_a_token_s_requests_are_counted_together_but_one_request_alone_may_have_many():
    in_flight = InFlight(10, 8)
    with in_flight.one_more("a") as first, in_flight.one_more("a") as second, in_flight.one_more("b") as other:
        first(20)
        with pytest.raises(RefusalError, match="20 texts or prompts") as refused:
            second(1)
        assert refused.value.status == 429
        other(8)
    with in_flight.one_more("a") as first, in_flight.one_more("a") as second:
        first(4)
        second(4)


def test_fifty_slow_clients_do_not_stop_a_quick_one():
    limits = RequestLimits(body_seconds=1.5, header_seconds=1.5, drain_seconds=5)
    with running(FakeServing(), limits=limits) as server:
        slow = [socket.create_connection(server.address) for _ in range(50)]
        for number, each in enumerate(slow):
            each.sendall(b"GET / HT" if number % 2 else HEAD + b'Content-Length: 99\r\n\r\n{"')
        started = time.monotonic()
        assert httpx.post(f"{server.url}/v1/completions", json=GOOD).status_code == 200
        assert time.monotonic() - started < 1.0
        for each in slow:
            each.settimeout(10)
            assert each.recv(12) == b"HTTP/1.1 408"
            each.close()


def test_a_connection_that_says_nothing_is_closed_and_one_that_trickles_after_an_answer_too():
    with running(FakeServing(), limits=RequestLimits(header_seconds=0.2, drain_seconds=5)) as server:
        # Refused before its body is read, which never ends.
        for before in (b"", b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"):
            with socket.create_connection(server.address) as client:
                client.sendall(before)
                client.settimeout(0.05)
                end = time.monotonic() + 5
                closed = False
                while not closed and time.monotonic() < end:
                    try:
                        client.sendall(b"x" if before else b"")
                        closed = client.recv(4096) == b""
                    except TimeoutError:
                        continue
                    except OSError:
                        closed = True
                assert closed


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_what_it_asked(stream):
    serving = FakeServing(seconds=0.2)
    with running(serving) as server:
        body = json.dumps({**GOOD, "max_tokens": 200, "stream": stream}).encode()
        client = socket.create_connection(server.address)
        client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert eventually(lambda: len(serving.tickets) == 1)
        assert not serving.tickets[0].cancelled.is_set()
        client.close()
        assert eventually(serving.tickets[0].cancelled.is_set)


def test_an_answer_that_nobody_reads_is_given_up():
    serving = FakeServing(padding=100_000)
    limits = RequestLimits(write_seconds=0.2, drain_seconds=5)
    with running(serving, limits=limits) as server:
        body = json.dumps({**GOOD, "max_tokens": 200, "stream": True}).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert eventually(lambda: bool(serving.tickets))
        assert eventually(serving.tickets[0].cancelled.is_set)
        client.close()


@contextmanager
def two_tokens(folder: Path, serving: FakeServing, **limits: Any) -> Iterator[tuple[Running, list[dict[str, str]]]]:
    """A server, and the headers of two callers."""
    file = folder / "tokens.toml"
    headers = [{"Authorization": f"Bearer {add_new(file, name, ['*'])}"} for name in ("greedy", "modest")]
    with running(serving, tokens=Tokens(file), limits=RequestLimits(**{"drain_seconds": 5, **limits})) as server:
        yield server, headers


def test_one_caller_s_long_texts_hold_up_no_other_s_short_one_nor_the_end(tmp_path):
    go, serving = threading.Event(), FakeServing()
    with two_tokens(tmp_path, serving, drain_seconds=0.5) as (server, (greedy, modest)), ThreadPoolExecutor(16) as pool:
        encode = serving.encode
        serving.encode = lambda text: go.wait(60) and () if len(text) > 4096 else encode(text)
        address = f"{server.url}/v1/completions"
        long = {**GOOD, "prompt": "a" * 10_000}
        asked = [pool.submit(httpx.post, address, json=long, headers=greedy, timeout=60) for _ in range(16)]
        assert eventually(lambda: server.server._in_flight.num_requests == 16)
        assert httpx.post(address, json=GOOD, headers=modest, timeout=5).status_code == 200
        started = time.monotonic()
        server.loop.call_soon_threadsafe(server.server.begin_to_drain)
        assert {each.result().status_code for each in asked} == {503}
        assert time.monotonic() - started < 5
        go.set()


def test_of_a_body_that_may_not_be_sent_nothing_is_parsed_and_the_connection_ends(tmp_path, monkeypatch):
    parsed: list[h11.Event] = []
    inner = h11.Connection.next_event

    def next_event(self):
        event = inner(self)
        parsed.append(event)
        return event

    monkeypatch.setattr(h11.Connection, "next_event", next_event)
    chunks, chunked = b"1\r\nx\r\n" * 20_000, b"Transfer-Encoding: chunked\r\n\r\n"
    bearer = b""
    with two_tokens(tmp_path, FakeServing()) as (server, (greedy, _)):
        for status in (b"401", b"411"):
            with socket.create_connection(server.address) as client:
                client.sendall(HEAD + bearer + chunked + chunks)
                client.settimeout(10)
                answer = b""
                with contextlib.suppress(ConnectionError):
                    while more := client.recv(4096):
                        answer += more
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert b"connection: close" in answer.lower()
            bearer = f"Authorization: {greedy['Authorization']}\r\n".encode()
    assert not [event for event in parsed if isinstance(event, h11.Data)]


def test_a_stranger_has_one_answer_a_connection_and_a_caller_many(tmp_path):
    with two_tokens(tmp_path, FakeServing()) as (server, (greedy, _)), httpx.Client() as client:
        for path in ("/v1/models", "/health", "/nowhere"):
            assert client.get(f"{server.url}{path}").headers["connection"] == "close"
        assert "connection" not in client.get(f"{server.url}/v1/models", headers=greedy).headers


def test_silent_connections_of_one_address_leave_places_for_others(tmp_path):
    limits = {"num_connections": 40, "connections_per_address": 20}
    with two_tokens(tmp_path, FakeServing(), **limits) as (server, (_, modest)), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(server.address)) for _ in range(30)]
        for each in silent[:20]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        for each in silent[20:]:
            each.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=elsewhere, headers=modest) as client:
            assert client.post(f"{server.url}/v1/completions", json=GOOD).status_code == 200


def test_tls_that_does_not_begin_is_closed_within_seconds(tmp_path):
    make_ca(tmp_path, 10)
    make_server_certificate(tmp_path, ["localhost"], 10)
    files = {"certificate": tmp_path / "server.crt", "key": tmp_path / "server.key"}
    with running(FakeServing(), limits=RequestLimits(handshake_seconds=0.2, drain_seconds=5), **files) as server:
        for said in (b"", b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection(server.address) as client:
                client.sendall(said)
                client.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""


def test_a_long_head_of_short_headers_is_refused_before_it_is_parsed():
    with running(FakeServing()) as server, socket.create_connection(server.address) as client:
        client.settimeout(5)
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 50_000 + b"\r\n")
        assert client.recv(12) == b"HTTP/1.1 400"


def test_beyond_the_queue_and_beyond_a_token_s_share_is_a_429_that_says_when_to_try_again():
    for serving, limits, code in (
        (FakeServing(seconds=0.3, max_waiting=1), RequestLimits(drain_seconds=5), "busy"),
        (FakeServing(seconds=0.3), RequestLimits(requests_per_token=1, drain_seconds=5), "too_many_requests"),
        (FakeServing(seconds=0.3), RequestLimits(inputs_per_token=1, drain_seconds=5), "too_many_requests"),
    ):
        with running(serving, limits=limits) as server, ThreadPoolExecutor(1) as pool:
            first = pool.submit(httpx.post, f"{server.url}/v1/completions", json=GOOD, timeout=30)
            assert eventually(lambda serving=serving: len(serving.tickets) == 1)
            second = httpx.post(f"{server.url}/v1/completions", json=GOOD)
            assert (second.status_code, second.json()["error"]["code"]) == (429, code)
            assert int(second.headers["retry-after"]) >= 1
            assert first.result().status_code == 200


def test_many_clients_each_get_their_own_answer():
    with running(FakeServing(seconds=0.005)) as server, httpx.Client(timeout=30) as client:

        def one(number: int) -> bool:
            asked = {**GOOD, "model": f"client-{number % 2}", "prompt": f"prompt {number}"}
            text = client.post(f"{server.url}/v1/completions", json=asked).json()["choices"][0]["text"]
            return text.startswith(f"client-{number % 2}:") and f" {number}:" in text

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(40)))
    assert threading.active_count() < 50


def test_of_one_token_s_long_bodies_few_are_read_at_once():
    async def all_of_them() -> list[str]:
        in_flight, scope, begun = InFlight(64, 128), {"headers": [(b"content-length", b"99999")]}, list[str]()

        async def one(token: str, scope: dict[str, object]) -> None:
            async with in_flight.reading(token, scope):
                begun.append(token)
                await asyncio.sleep(60)

        short = {"headers": [(b"content-length", b"9")]}
        tasks = [asyncio.create_task(one("greedy", scope)) for _ in range(9)]
        tasks += [asyncio.create_task(one("modest", scope)), asyncio.create_task(one("greedy", short))]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return begun

    assert asyncio.run(all_of_them()) == ["greedy", "greedy", "modest", "greedy"]

"""Slow, broken and greedy clients harm themselves alone: whose turn it is, and what becomes of abandoned work."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import pytest

from fedpriv.models.serving._jobs import ServingJob, Waiting
from fedpriv.models.serving.http.limits import InFlight, RequestLimits, ThreadTurns, capped
from fedpriv.models.serving.http.refusals import RefusalError
from fedpriv.models.serving.http.tokens import Tokens, add_new
from fedpriv.models.serving.requests import BusyError, Classify
from tests.models.serving.fake import FakeServing
from tests.models.serving.running import running
from tests.served import eventually

GOOD = {"model": "global", "prompt": "x", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def read_through(chunks: list[bytes], length: bytes | None = None) -> tuple[bytes, int]:
    """The body that `capped` lets through at 10 bytes, or the status of its refusal; and how many chunks it took."""
    left = list(chunks)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": left.pop(0)}

    async def read() -> bytes:
        scope = {"headers": [] if length is None else [(b"content-length", length)]}
        try:
            messages = capped(scope, receive, 10)
            return b"".join([(await messages())["body"] for _ in chunks])
        except RefusalError as refusal:
            return str(refusal.status).encode()

    return asyncio.run(read()), len(chunks) - len(left)


def test_a_body_is_read_up_to_its_limit_and_refused_beyond_it_as_soon_as_that_is_known():
    assert read_through([b"12345", b"67890"]) == (b"1234567890", 2)
    assert read_through([b"12345", b"67890", b"1", b"2"]) == (b"413", 3)
    assert read_through([b"x"], length=b"11") == (b"413", 0)
    assert read_through([b"x"], length=b"9" * 5000) == (b"413", 0)


def test_requests_and_their_inputs_are_counted_for_each_token_and_given_back_however_they_end():
    in_flight = InFlight(1, 10)
    with in_flight.one_more("a"), in_flight.one_more("b"):
        with pytest.raises(RefusalError, match="1 requests under way"), in_flight.one_more("a"):
            pass
        assert in_flight.num_requests == 2
    with pytest.raises(ZeroDivisionError), in_flight.one_more("a"):
        raise ZeroDivisionError
    assert in_flight.num_requests == 0
    in_flight = InFlight(10, 8)  # inputs of all requests together, but one request alone may have many
    with in_flight.one_more("a") as first, in_flight.one_more("a") as second, in_flight.one_more("b") as other:
        first(20)
        with pytest.raises(RefusalError, match="20 texts or prompts") as refused:
            second(1)
        assert refused.value.status == 429
        other(8)
    with in_flight.one_more("a") as first, in_flight.one_more("a") as second:
        first(4)
        second(4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_what_it_asked(stream):
    serving = FakeServing(seconds=0.1)
    with running(serving) as server:
        body = json.dumps({**GOOD, "max_tokens": 200, "stream": stream}).encode()
        client = socket.create_connection(server.address)
        client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert eventually(lambda: len(serving.tickets) == 1)
        assert not serving.tickets[0].cancelled.is_set()
        client.close()
        assert eventually(serving.tickets[0].cancelled.is_set)


def test_one_caller_s_many_texts_hold_up_no_other_s_nor_the_end(tmp_path):
    go, serving, file = threading.Semaphore(0), FakeServing(), tmp_path / "tokens.toml"
    greedy, modest = ({"Authorization": f"Bearer {add_new(file, name, ['*'])}"} for name in ("greedy", "modest"))
    limits = RequestLimits(drain_seconds=0.5)
    with running(serving, tokens=Tokens(file), limits=limits) as server, ThreadPoolExecutor(17) as pool:
        encode = serving.encode
        serving.encode = lambda text: go.acquire(timeout=60) and () if "long" in text else encode(text)
        address = f"{server.url}/v1/completions"
        long = {**GOOD, "prompt": ["long"] * 4}
        asked = [pool.submit(httpx.post, address, json=long, headers=greedy, timeout=60) for _ in range(16)]
        assert eventually(lambda: len(server.server.server_state.tasks) == 16)
        other = pool.submit(httpx.post, address, json=GOOD, headers=modest, timeout=30)
        assert eventually(lambda: len(server.server.server_state.tasks) == 17)
        for _ in range(16):  # of 64: the other has a turn to be parsed and one to be tokenised
            go.release()
            if wait([other], timeout=0.2).done:
                break
        assert other.result(timeout=30).status_code == 200
        started = time.monotonic()
        server.server.should_exit = True
        assert {each.result().status_code for each in asked} == {503}
        assert time.monotonic() - started < 5
        go.release(64)


def test_beyond_the_queue_and_beyond_a_token_s_share_is_a_429_that_says_when_to_try_again():
    for most, limits, code in (
        (1, {}, "busy"),
        (1000, {"requests_per_token": 1}, "too_many_requests"),
        (1000, {"inputs_per_token": 1}, "too_many_requests"),
    ):
        serving = FakeServing(max_waiting=most)
        serving.go.clear()
        limits = RequestLimits(drain_seconds=5, **limits)
        with running(serving, limits=limits) as server, ThreadPoolExecutor(1) as pool:
            first = pool.submit(httpx.post, f"{server.url}/v1/completions", json=GOOD, timeout=30)
            assert eventually(lambda serving=serving: len(serving.tickets) == 1)
            second = httpx.post(f"{server.url}/v1/completions", json=GOOD)
            serving.go.set()
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
            assert all(pool.map(one, range(24)))
    assert threading.active_count() < 50


def job(client: str, variant: str) -> ServingJob:
    request = Classify(variant=variant, texts=((1,),), client=client)
    return ServingJob(request=request, texts=((1,),), on_event=lambda event: None)


def order(waiting: Waiting) -> list[tuple[str, str]]:
    found = []
    while taken := waiting.take():
        found.append((taken.request.client, taken.variant))
    return found


def test_a_client_with_many_requests_for_many_variants_is_one_client():
    waiting = Waiting(100)
    for number in range(40):
        waiting.add(job("greedy", f"client-{number % 20}"))
    for _ in range(2):
        waiting.add(job("modest", "client-0"))
    taken = order(waiting)
    assert [client for client, _ in taken[:5]] == ["greedy", "modest", "greedy", "modest", "greedy"]
    assert len(taken) == 42
    assert (len(waiting), waiting.num_new, waiting.take()) == (0, 0, None)
    # So do the variants of a client.
    for variant in ("a", "a", "a", "b", "c"):
        waiting.add(job("one", variant))
    assert "".join(variant for _, variant in order(waiting)) == "abcaa"


def test_what_is_put_back_first_comes_before_all_others_and_what_was_removed_never():
    waiting, jobs = Waiting(3), [job("one", "a"), job("one", "b"), job("two", "a")]
    for each in jobs:
        waiting.add(each)
    with pytest.raises(BusyError):
        waiting.add(job("three", "a"))
    first = waiting.take()
    assert first is jobs[0]
    waiting.put_back(first, first=True)
    waiting.remove(jobs[2])
    waiting.remove(jobs[2])
    assert (len(waiting), waiting.num_new) == (2, 2)
    assert waiting.take() is first
    assert waiting.take() is jobs[1]


def test_one_client_cannot_fill_the_room_and_what_it_leaves_is_shared_again():
    waiting = Waiting(12)

    def most(client: str) -> int:
        for number in range(13):
            try:
                waiting.add(job(client, "a"))
            except BusyError:
                return number
        return 13

    assert [most(client) for client in ("greedy", "other", "third")] == [6, 3, 2]
    assert waiting.take().request.client == "greedy"
    assert most("fourth") == 1
    assert waiting.num_new == 11


def test_clients_take_turns_what_was_cancelled_never_begins_and_an_error_is_the_caller_s():
    done: list[str] = []

    async def all_of_them() -> None:
        turns, begun, go = ThreadTurns("test"), threading.Event(), threading.Event()

        def begin() -> None:
            begun.set()
            go.wait()

        def asked(client: str, name: str) -> asyncio.Task[None]:
            return asyncio.create_task(turns.run(client, lambda: done.append(name)))

        first = asyncio.create_task(turns.run("greedy", begin))
        await asyncio.to_thread(begun.wait)  # else it still counts as waiting
        rest = [asked(client, client) for client in ["greedy"] * 32 + ["modest"] * 2 + ["other"]]
        gone = [asked("gone", "gone") for _ in range(50)]
        last = asked("gone", "last")
        await asyncio.sleep(0)
        for each in gone:
            each.cancel()
        await asyncio.sleep(0)
        assert len(turns._waiting["gone"]) == 1
        go.set()
        await asyncio.gather(first, *rest, last)
        with pytest.raises(ZeroDivisionError):
            await turns.run("one", lambda: 1 // 0)
        assert await turns.run("one", lambda: 7) == 7

    asyncio.run(all_of_them())
    assert done[:6] == ["greedy", "modest", "other", "last", "greedy", "modest"]
    assert (len(done), "gone" in done) == (36, False)

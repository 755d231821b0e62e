"""Whose turn it is, and what becomes of work that nobody waits for."""

import asyncio
import threading

import pytest

from fedpriv.models.serving._jobs import ServingJob, Waiting
from fedpriv.models.serving.http.limits import ThreadTurns
from fedpriv.models.serving.requests import BusyError, Classify


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


def test_the_variants_of_a_client_take_turns():
    waiting = Waiting(100)
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


def test_clients_take_turns_whatever_each_has_waiting():
    done: list[str] = []

    async def all_of_them() -> None:
        turns, begun, go = ThreadTurns("test"), threading.Event(), threading.Event()

        def begin() -> None:
            begun.set()
            go.wait()

        first = asyncio.create_task(turns.run("greedy", begin))
        await asyncio.to_thread(begun.wait)  # else it still counts as waiting
        asked = ["greedy"] * 32 + ["modest"] * 2 + ["other"]
        rest = [asyncio.create_task(turns.run(client, lambda client=client: done.append(client))) for client in asked]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *rest)

    asyncio.run(all_of_them())
    assert done[:5] == ["greedy", "modest", "other", "greedy", "modest"]
    assert len(done) == 35


def test_what_was_cancelled_never_begins_and_an_error_is_the_caller_s():
    done: list[str] = []

    async def all_of_them() -> None:
        turns, go = ThreadTurns("test"), threading.Event()
        first = asyncio.create_task(turns.run("one", go.wait))
        await asyncio.sleep(0.01)
        gone = [asyncio.create_task(turns.run("one", lambda: done.append("gone"))) for _ in range(50)]
        last = asyncio.create_task(turns.run("one", lambda: done.append("last")))
        await asyncio.sleep(0)
        for each in gone:
            each.cancel()
        await asyncio.sleep(0)
        assert len(turns._waiting["one"]) == 1
        go.set()
        await asyncio.gather(first, last)
        with pytest.raises(ZeroDivisionError):
            await turns.run("one", lambda: 1 // 0)
        assert await turns.run("one", lambda: 7) == 7

    asyncio.run(all_of_them())
    assert done == ["last"]

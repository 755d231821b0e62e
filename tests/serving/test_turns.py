"""Whose work is done next, and what becomes of work that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from fedpriv.serving.http.limits import InFlight, ThreadTurns


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


def test_of_one_client_s_requests_few_begin_in_a_round_of_the_event_loop_and_another_s_at_once():
    begun: list[tuple[int, str]] = []

    async def all_of_them() -> None:
        in_flight, rounds = InFlight(64, 128), 0

        async def one(token: str) -> None:
            await in_flight.begins(token)
            begun.append((rounds, token))

        tasks = [asyncio.create_task(one(token)) for token in ["greedy"] * 32 + ["modest"] + ["greedy"] * 8]
        await asyncio.sleep(0)
        for task in tasks[8:12]:
            task.cancel()  # these clients leave, and no turn is lost with them
        while not all(task.done() for task in tasks):
            rounds += 1
            await asyncio.sleep(0)

    asyncio.run(all_of_them())
    assert [number for number, token in begun if token == "modest"] == [0]
    of_a_round = Counter(number for number, token in begun if token == "greedy")
    assert max(of_a_round.values()) <= 4
    assert sum(of_a_round.values()) == 36
    assert len(of_a_round) <= 12


def test_turns_that_nobody_waits_for_keep_the_event_loop_idle():
    async def all_of_them() -> int:
        in_flight = InFlight(64, 128)
        await asyncio.gather(*(in_flight.begins("greedy") for _ in range(9)))
        for _ in range(9):
            await asyncio.sleep(0)
        return len(asyncio.get_running_loop()._ready)  # type: ignore[attr-defined]

    assert asyncio.run(all_of_them()) == 0

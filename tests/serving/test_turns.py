"""Whose work is done next, and what becomes of work that nobody waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fedpriv.serving.http.limits import ThreadTurns


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

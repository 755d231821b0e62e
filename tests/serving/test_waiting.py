"""Whose turn it is."""

from __future__ import annotations

import pytest

from fedpriv.serving._jobs import ServingJob, Waiting
from fedpriv.serving.requests import BusyError, Classify


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

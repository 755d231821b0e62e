"""A store whose writer is killed with SIGKILL at random instants holds the old or the new set of models, whole."""

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedpriv.models.variants import Store, _index
from tests.stores import add

KILLS = 60
KILLS_OF_A_STORE = 6
LONGEST_SECONDS = 0.12

State = dict[str, int]
"""{name: seed of the model that is stored under it}"""


@pytest.mark.slow
def test_sixty_kills(tmp_path):
    begun, state, dice = 0, {}, random.Random(0)
    for attempt in range(KILLS):
        path = tmp_path / str(attempt // KILLS_OF_A_STORE)
        state = {} if attempt % KILLS_OF_A_STORE == 0 else state
        lines = killed_writer(path, state, dice.randrange(2**30), dice.uniform(0, LONGEST_SECONDS))
        begun += len(lines)
        state = found_state(path, lines[-1] if lines else [state])
    assert begun > KILLS / 2, "the kills hit writers at work"


class Stop(BaseException):
    """Ends a writer as if it were killed."""


def stopped_at(call: int, patched: pytest.MonkeyPatch) -> None:
    """Let that call fail which is the given one, from 0, of those that put something on the disk."""
    calls = itertools.count()

    def counted(original: Callable) -> Callable:
        def replacement(*arguments, **options):
            if next(calls) >= call:
                raise Stop
            return original(*arguments, **options)

        return replacement

    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink"), (_index, "commit")):
        patched.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize(
    ("state", "after"),
    [({}, {"a": 1}), ({"a": 1}, {"a": 1, "b": 2}), ({"a": 1, "b": 2}, {"b": 2}), ({"b": 2}, {"b": 2}), ({"a": 1}, {})],
)
def test_stopped_between_any_two_writes(tmp_path, state, after):
    for call in itertools.count():
        path = tmp_path / str(call)
        with Store(path) as store:
            change(store, {}, {"freed": 3, **state})
            change(store, {"freed": 3, **state}, state)
        with pytest.MonkeyPatch.context() as patched, Store(path) as store:
            stopped_at(call, patched)
            try:
                change(store, state, after)
                break
            except Stop:
                pass
        found_state(path, [state, after])
    assert call >= 1, "a removal is one transaction"
    assert found_state(path, [after]) == after


def model(seed: int) -> dict[str, np.ndarray]:
    """Forty blocks, most of which all models share, and an extra."""
    weights = np.random.default_rng(0).standard_normal((40, 256)).astype("f4")
    weights[np.random.default_rng(seed).integers(40, size=8)] = seed
    return {"w": weights, "bias": np.full(3, seed, "f4")}


def next_state(state: State, dice: random.Random) -> State:
    """The state after an addition, a removal or (if it is the same) a compaction."""
    name = f"m{dice.randrange(6)}"
    if dice.random() < 0.25:
        return state
    if name in state:
        return {other: seed for other, seed in state.items() if other != name}
    return {**state, name: dice.randrange(1000)}


def work(path: Path, state: State, seed: int, wire: int) -> None:
    """Write without end, and tell before each operation which state it comes from and which it leads to."""
    dice = random.Random(seed)
    with Store(path) as store:
        while True:
            after = next_state(state, dice)
            os.write(wire, (json.dumps([state, after]) + "\n").encode())
            change(store, state, after)
            state = after


def change(store: Store, state: State, after: State) -> None:
    """From one state to another; compaction if they are the same."""
    for name in state.keys() - after.keys():
        store.remove(name)
    for name in after.keys() - state.keys():
        add(store, name, model(after[name]), 256)
    if after == state:
        store.compact()


def killed_writer(path: Path, state: State, seed: int, seconds: float) -> list[list[State]]:
    """What a writer told before it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(path, state, seed, write)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    os.close(write)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer failed before it was killed"
    with os.fdopen(read) as file:
        return [json.loads(line) for line in file.read().splitlines()]


def found_state(path: Path, allowed: list[State]) -> State:
    """The one of the allowed states that a store has, all of it verified bit for bit."""
    if (path / "index.sqlite").exists():
        with Store(path, read_only=True) as store:
            assert not (found := store.verify()), found
    with Store(path) as store:
        assert not (found := store.verify()), found
        left = {file.name for file in path.iterdir()} - {"index.sqlite-journal"}  # never used
        assert left - {each.name for each in path.glob("blocks.*.npy")} == {"index.sqlite", "lock"}
        assert len(left) <= 3, "of what was under way nothing is left"
        (state,) = [each for each in allowed if sorted(each) == store.names][:1]
        for name, seed in state.items():
            restored = store.tensors(name)
            assert all(np.array_equal(restored[key], values) for key, values in model(seed).items())
        return state

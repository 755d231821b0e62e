"""A coordinator with a clock: when a reply leaves tells nothing of the records, as far as rank statistics can see."""

import hmac
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count

import numpy as np
import pytest
from torch import Tensor

from fedpriv.config import to_flower
from fedpriv.holder.vault._service import Closing, Worker
from fedpriv.holder.vault.settings import FILE
from fedpriv.holder.wire import frame, kinds
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from tests.adversary.nodes import Question, make_node, run_config, training
from tests.tiny import LABELS, WORDS

# Every day, tests/holder/vault/test_reply_times.py shows on a clock of its own when a reply leaves.
pytestmark = pytest.mark.slow

# All are cut to one length. Jane's file is thick.
ROWS = [(" ".join(WORDS[i * j % 13] for j in range(60)), LABELS[i % 3]) for i in range(4)]
JANE = ("jane doe has a rash " * 5_000, LABELS[1])

# Of the normal deviate of the rank-sum statistic: two equal laws exceed it once in 15,000 comparisons. Two that do not
# overlap reach 4.2 with 12 replies of each, and the quick form finds no less. With 200 they reach 17, and if three
# replies in ten can be told apart, that is found nine times in ten.
MOST_DEVIATION = 4.0

Worlds = tuple[Worker, Worker]


@pytest.fixture(scope="module", params=["an evaluation of one", "a full batch"])
def attack(request) -> str:
    """What both nodes are asked."""
    return request.param


@pytest.fixture(scope="module")
def worlds(attack, approved, starts, tmp_path_factory) -> Iterator[Worlds]:
    """Two vaults' processes; the second one's records lack Jane's."""
    folder, nodes, started = tmp_path_factory.mktemp("worlds"), [], []
    for name, rows in (("with", [*ROWS, JANE]), ("without", ROWS)):
        node = make_node(
            folder / name,
            rows,
            num_registered=len(ROWS) + 1,
            models={"tiny": approved["tiny"]},
            budget_epsilon=1e6,
            settings={},
        )
        nodes.append(node)
    # The time that one of them derives on this machine, here for both.
    started.append(Worker(nodes[0].folder, Closing.of(nodes[0].settings)))
    times = [seconds(started[0], ATTACKS[attack](starts["tiny"], round_)) for round_ in (1, 2)]
    started.pop().stop()
    for node in nodes:
        with (node.folder / FILE).open("a") as file:
            file.write(f"reply_seconds = {times[-1]}\n")
        started.append(Worker(node.folder, Closing.of(node.settings)))
    yield started[0], started[1]
    for worker in started:
        worker.stop()


def everyone(adapter: Mapping[str, Tensor], round_: int) -> Question:
    """Every record in each of 20 steps, so one pass or two, with the most noise that a node allows."""
    config = run_config(rounds=1000, local_steps=20, batch_size=1, noise_multiplier=1000.0)
    return training(config, adapter, round_=round_, fields={"sampling_probability": 1.0})


def jane_alone(adapter: Mapping[str, Tensor], round_: int) -> Question:
    """An evaluation in a run whose seed would set Jane's record aside, and nobody else's, if it keyed the coins."""
    seed = seed_that_picks(1e-3)
    config = run_config(test_data="", evaluation_noise_multiplier=1000.0, test_fraction=1e-3, seed=seed, batch_size=1)
    return Question(
        kind=frame.EVALUATE,
        config=to_flower(config),
        fields=kinds.pack_instruction("run", round_, EvaluationSpec(noise_multiplier=1000.0)),
        arrays={kinds.ADAPTER: adapter},
    )


@cache
def seed_that_picks(fraction: float) -> int:
    """A seed whose coins, if they were keyed with it, set Jane's record aside and no other."""

    def is_aside(row: tuple[str, str], seed: int) -> bool:
        content = json.dumps([[row[0]], [row[1]], None]).encode()
        return int.from_bytes(hmac.digest(str(seed).encode(), content, "sha256")[:8]) < fraction * 2.0**64

    seeds = (seed for seed in count() if is_aside(JANE, seed))
    return next(seed for seed in seeds if not any(is_aside(row, seed) for row in ROWS))


ATTACKS = {"a full batch": everyone, "an evaluation of one": jane_alone}


def seconds(worker: Worker, question: Question) -> float:
    """How long the vault takes to answer."""
    begin = time.perf_counter()
    response = frame.Response(worker.answer(question.request.packed()))
    taken = time.perf_counter() - begin
    assert not response.code, response.reason
    return taken


def deviation(one: Sequence[float], other: Sequence[float]) -> float:
    """The rank-sum statistic of Mann and Whitney in standard deviations; about normal under one law."""
    n, m = len(one), len(other)
    greater = (np.asarray(one)[:, None] > np.asarray(other)[None, :]).sum()
    return float(abs(greater - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12))


def measured(worlds: Worlds, attack: str, adapter: Mapping[str, Tensor], num: int, begin: int) -> list[list[float]]:
    """The seconds of so many replies of each world, in turn, so that what else the machine does falls on both."""
    found: list[list[float]] = [[], []]
    for round_ in range(begin, begin + num + 2):
        for times, worker in zip(found, worlds, strict=True):
            times.append(seconds(worker, ATTACKS[attack](adapter, round_)))
    return [times[2:] for times in found]  # the first replies read the records and fill caches


@pytest.mark.parametrize("num", [12, 200])
def test_a_clock_does_not_tell_whether_a_record_is_there(worlds, starts, attack, num):
    with_jane, without = measured(worlds, attack, starts["tiny"], num, begin=100 if num == 12 else 200)
    found = deviation(with_jane, without)
    print(f"{attack}: {found:.2f}; ms {1e3 * np.median(with_jane):.3f}, {1e3 * np.median(without):.3f}")
    assert found <= MOST_DEVIATION, (np.median(with_jane), np.median(without))

"""A coordinator that fills a node's disk: when the node refuses, and what is on the disk by then, tell of no record.

The disk is a stand-in that counts what is in the node's folder; its records lie elsewhere.
tests/deployment/test_full_disk.py plays the same against a vault's process on a real one.
"""

import json
import logging
import multiprocessing
import os
import random
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from fedpriv import files
from fedpriv.holder.vault import _disk, _service
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.wire import frame
from fedpriv.holder.wire.frame import Request, Response
from tests.adversary.exchanges import N_K, ROWS
from tests.adversary.nodes import (
    Node,
    Question,
    Row,
    ask,
    make_node,
    num_charges,
    registering,
    restart,
    run_config,
    training,
    write_rows,
)
from tests.adversary.stand_ins import StandIns, standing_in
from tests.adversary.test_over_time import evaluating
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import UNTIMED

# For the node's requests, beyond what stays free: some ten charges fill it.
ROOM_BYTES = 2**20 + 2**18 + 100_000
BLOCK_BYTES = 4096
# A node that no request can fill is stopped here.
MOST_REQUESTS = 150

EVALUATED = {"test_data": "", "evaluation_noise_multiplier": 1.0, "test_fraction": 0.5}


@dataclass(frozen=True)
class World:
    """A table of records that may change once.

    Attributes:
        rows: at first.
        later: from the fifth update on.
        fails_on: the tokens of a record on which the model fails.
    """

    rows: Sequence[Row]
    later: Sequence[Row]
    fails_on: tuple[int, ...] = ()


@dataclass(frozen=True)
class Filled:
    """What others can see of a node whose disk they have filled: requests until it refused, sizes, what is free."""

    num_requests: int
    sizes: dict[str, int]
    num_free: int


def neighbour(number: int) -> World:
    """A world with one record more or less than `ROWS`, from the beginning or later, whatever that record is."""
    chance = random.Random(number)
    words = " ".join(chance.choices(WORDS, k=chance.choice([1, 3, 12, 40])))
    row = chance.choice([(words, chance.choice(LABELS)), (words, "no such label"), ("", LABELS[0]), (words * 50,)])
    place = chance.randrange(len(ROWS) + 1)
    with_it = [*ROWS[:place], row, *ROWS[place:]]
    without = [each for index, each in enumerate(ROWS) if index != place % len(ROWS)]
    other = chance.choice([with_it, with_it, without])
    first, later = chance.choice([(other, other), (list(ROWS), other), (other, list(ROWS))])
    return World(first, later, fails_on=chance.choice([(), (2, 5, 3)]))


def questions(starts) -> Iterator[Question]:
    """Updates, each of a run of its own, whose replies stay stored; and what costs nothing."""
    for number in count():
        # Another length makes another bench, which reads the records again and says what it finds.
        config = run_config(max_length=(16, 32)[number % 2], **EVALUATED)
        update = training(config, starts["tiny"], run=f"run {number:04}")
        yield update
        yield update
        yield registering(config)
        yield from [training(config, starts["tiny"], fields={"noise_multiplier": 0.0})] * 3
        if number % 4 == 0:
            yield evaluating(config, starts["tiny"], round_=4 + number)


@contextmanager
def vaults_child(node: Node) -> Iterator[multiprocessing.connection.Connection]:
    """A pipe to what the vault's child does, in a thread; what it says goes to node.log, as `start` has it."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    ours, theirs = multiprocessing.Pipe()
    child = threading.Thread(target=_service.run_worker, args=(theirs, node.folder))
    with pytest.MonkeyPatch.context() as patch, (node.folder / "node.log").open("a") as said:
        patch.setattr(_service, "_prepare_process", lambda _: None)
        patch.setattr(_service.signal, "signal", lambda *_: None)  # only a main thread hears signals
        root.handlers, level = [logging.StreamHandler(said)], root.level
        root.setLevel(logging.INFO)
        child.start()
        try:
            yield ours
        finally:
            with socket.socket(fileno=os.dup(ours.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # the forked process with the records has this end too
            ours.close()
            child.join()
            root.handlers, root.level = before, level


def answered(pipe, question: Question) -> Response:
    pipe.send_bytes(question.request.packed())
    while (message := pipe.recv_bytes())[:1] != _service.ANSWERED:
        pass
    return Response(message[1:])


def filled(world: World, approved, starts, worlds: Path) -> Filled:
    """What becomes of a node with these records, in a folder whose name is as long as any other's."""
    folder = Path(tempfile.mkdtemp(dir=worlds))
    records = folder / "records.csv"
    node = make_node(
        folder / "node", world.rows, num_registered=N_K, models=approved, settings=UNTIMED | {"data": str(records)}
    )
    node.records.rename(records)

    def used() -> int:
        return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes().values())

    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in sorted(node.folder.iterdir())}

    capacity = files.FLOOR_BYTES + ROOM_BYTES + used()
    logging.disable(logging.NOTSET)
    num_requests, asked, is_full = 0, questions(starts), False
    with pytest.MonkeyPatch.context() as patch, standing_in(StandIns(len(ROWS), fails_on=world.fails_on)):
        patch.setattr(files, "free_bytes", lambda _: capacity - used())
        for rows in (world.rows, world.later):
            write_rows(records, rows)
            restart()
            with vaults_child(node) as pipe:
                until = MOST_REQUESTS if rows is world.later else 24
                while num_requests < until and not is_full:
                    num_requests += 1
                    is_full = answered(pipe, next(asked)).reason.startswith("refused: disk")
    return Filled(num_requests, sizes(), capacity - used())


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def usual(approved, starts, worlds) -> Filled:
    """The node with `ROWS`."""
    return filled(World(ROWS, list(ROWS)), approved, starts, worlds)


def test_the_disk_does_fill_up(usual):
    assert 24 < usual.num_requests < MOST_REQUESTS
    assert usual.sizes["ledger.sqlite"] > 3 * 2**14


@pytest.mark.parametrize("number", [*range(2), *slow(*range(2, 200))])
def test_one_record_changes_neither_the_request_that_is_refused_nor_any_size(usual, approved, starts, worlds, number):
    assert filled(neighbour(number), approved, starts, worlds) == usual


def test_a_node_without_room_refuses_everything_in_words_and_charges_nothing(approved, starts, tmp_path, monkeypatch):
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    config = run_config(**EVALUATED)
    asked = [registering(config), training(config, starts["tiny"]), evaluating(config, starts["tiny"])]
    asked += [Question(kind=kind, config={}) for kind in (frame.AFFORD, frame.ADVERTISE, frame.REVEAL)]
    monkeypatch.setattr(files, "free_bytes", lambda _: files.FLOOR_BYTES - 1)
    for question in asked:
        assert ask(node, question).response.reason.startswith("refused: disk: this node needs 67108864 bytes of room")
    monkeypatch.setattr(files, "free_bytes", lambda _: files.FLOOR_BYTES)
    assert ask(node, asked[0]).code == 0
    assert "refused: disk: this node needs" in ask(node, asked[1]).response.reason, "none for the reply"
    assert num_charges(node) == 0


def test_what_nobody_pays_for_is_noted_within_a_quota_and_counted_beyond_it(approved, starts, tmp_path, monkeypatch):
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    monkeypatch.setattr(_disk, "_QUOTA_BYTES", 20_000)
    request = Request.of(kind="\u2603" * 1000, run_config={}, fields={"run": "\u2603" * 1000, "round": 1})
    for _ in range(5):  # processes
        holder = Holder.of(node.settings)
        for _ in range(50):
            assert answer(request, holder).code == frame.REFUSED
    holder.journal.write("charged", run="run", round=1)
    *_, last = events = [json.loads(line) for line in node.settings.events.read_text().splitlines()]
    noted = [event for event in events if event["event"] == "refused"]
    counts = [event["number"] for event in events if event["event"] == "beyond_quota"]
    assert last["event"] == "charged"
    assert len(events) == len(noted) + len(counts) + 1
    assert noted
    assert 50 / 2 < len(noted) + sum(counts) <= 250
    assert node.settings.events.stat().st_size < 20_000 + 200 * 10


def test_the_log_of_what_follows_a_charge_has_one_size_and_the_newest_lines(tmp_path, capfd):
    ring = _service.Ring(tmp_path / "vault.log")
    log, sizes = logging.getLogger("of a test"), set()
    logging.disable(logging.NOTSET)
    with _service.heard_by(ring):
        for number in range(300):
            log.warning("%s", f"record {number} " + "x" * (number * 37 % 4000))
            sizes.add((tmp_path / "vault.log").stat().st_size)
        os.write(1, b"a library prints this")
        log.error("%s", "y" * 10**6)
    ring.make()
    lines = (tmp_path / "vault.log").read_text().split("\n")
    assert sizes == {(tmp_path / "vault.log").stat().st_size} == {2**18}
    assert (tmp_path / "vault.log").stat().st_mode & 0o777 == 0o600
    assert lines[-2].endswith("yyy")
    assert "WARNING record 299 xx" in lines[-3] or "WARNING record 299 xx" in lines[-2]
    assert "library" not in "".join(capfd.readouterr())

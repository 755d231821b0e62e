"""Runs that are killed at random instants, and what their ledgers say afterwards; `test_kill.py` starts them.

This process has loaded everything and forks: every child is a process of its own on real files, killed by SIGKILL.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from flwr.app import Context, Message, RecordDict

from clients import node
from clients.app import message_of, request_of
from fedpriv.config import RunConfig, parse, to_flower
from fedpriv.holder.vault.answer import settle
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import TRAIN, Response
from fedpriv.learning.aggregation._fedavg import weights_by_size
from fedpriv.learning.training.local_update import UpdateSpec, planned_event
from fedpriv.learning.training.stacked import execute_one_by_one
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import from_json
from fedpriv.privacy.accounting.views import Release, rho_bar
from fedpriv.privacy.ledger.entries import CHARGED, RELEASED
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import path_of, reading, verify_with_head
from server.observer import LogObserver
from simulations.engines import federation
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from tests.wire import arrays_of, asked, response_in

# A child is killed at a random instant after it sent a random number of replies, at most so many: an instant counted
# from its start alone would come before its first reply on a busy machine.
MOST_REPLIES = 8


def sent(wire: int, client: int, round_: int, reply: Message) -> None:
    """Tell the parent what left the node: from here on it counts as released."""
    response = response_in(reply)
    os.write(wire, (json.dumps([client, round_, response.digest, response.fields["event"]]) + "\n").encode())


def tapped(grid: type[LocalGrid], wire: int) -> type[LocalGrid]:
    """The grid, telling the parent of every upload before the server gets it."""

    class TappedGrid(grid):
        def _answer(self, messages):
            replies = super()._answer(messages)
            for reply in replies:
                if reply.has_content() and "event" in (fields := response_in(reply).fields):
                    sent(wire, reply.metadata.src_node_id - 2, fields["round"], reply)
            return replies

    return TappedGrid


def whole_run(config: RunConfig, folder: Path, attempt: int, wire: int) -> None:
    """The in-process engine: server and nodes, each with its ledger; every attempt is another run on the same data."""
    federation.LocalGrid = tapped(LocalGrid, wire)
    values = {**vars(config), "out": str(folder / f"run-{attempt}"), "ledger": str(folder / "ledger.sqlite")}
    federation.run(parse(values), LogObserver())


def one_node(config: RunConfig, folder: Path, attempt: int, wire: int) -> None:
    """A node whose server goes on asking for the round that it has no reply for, under the same key."""
    bench, execute = workbench(config), partial(execute_one_by_one, workbench(config).model)
    (folder / "ledger.sqlite.nodes").mkdir(exist_ok=True)
    node_config = {"partition-id": 0, node.TRUST_KEY: True}
    node_config[node.LEDGER_KEY] = str(folder / "ledger.sqlite.nodes" / "0.sqlite")
    context = Context(1, 7, node_config, RecordDict(), to_flower(config))
    seen = folder / "last-round"
    with task_identity(1):
        for round_ in range(int(seen.read_text()) if seen.exists() else 1, 10**6):
            spec = replace(UpdateSpec.of(config), num_rounds=10**6)
            fields, arrays = kinds.pack_instruction("run", round_, spec), {kinds.ADAPTER: arrays_of(bench.initial)}
            message = asked(TRAIN, fields=fields, arrays=arrays)
            response = node.prepare(request_of(message, context), context)
            if not isinstance(response, Response):
                response = settle(response, execute([response.task])[0])
            assert not response.code, response.reason
            sent(wire, 0, round_, message_of(response, message))
            (folder / "next").write_text(str(round_ + 1))
            (folder / "next").replace(seen)


def forked(task: Callable[[int], None]) -> tuple[int, TextIO]:
    """A child that does this, and the lines that it tells, the error that ended it among them."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            task(write)
        except BaseException as error:
            os.write(write, (json.dumps(["error", repr(error)]) + "\n").encode())
        os._exit(0)
    os.close(write)
    return child, os.fdopen(read)


def killed_after(replies: int, seconds: float, task: Callable[[int], None]) -> list[list]:
    """What a child sent before it was killed so many seconds after that many replies."""
    child, lines = forked(task)
    with lines as file:
        told = [file.readline() for _ in range(replies)]
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        told += file.readlines()
    os.waitpid(child, 0)
    return [json.loads(line) for line in told if line]


class Checker:
    """Holds the ledgers of a folder against what was sent.

    Args:
        folder: of the ledgers.
        accounts: of the clients, by number.
    """

    def __init__(self, folder: Path, accounts: Sequence[str]) -> None:
        self.folder, self._accounts = folder, accounts
        self._own = {path_of(folder / "ledger.sqlite", name).stem: str(n) for n, name in enumerate(accounts)}
        self.sent: dict[str, list[list]] = {}
        self._before: dict[Path, list[str]] = {}

    def check(self, lines: list[list]) -> None:
        """After every kill: nothing lost, nothing uncharged, chains intact."""
        for line in lines:
            assert line[0] != "error", line[1]
            self.sent.setdefault(str(line[0]), []).append(line)
        nodes = sorted((self.folder / "ledger.sqlite.nodes").glob("*.sqlite"))
        for path in [*nodes, self.folder / "ledger.sqlite"]:
            if not path.exists():
                continue
            with Ledger(path):  # the next writer can go on, whatever was written before the kill
                pass
            with reading(path) as db:
                verify_with_head(db, path)
                written = list(db.entries())
                digests = [entry.digest for entry in written]
                assert digests[: len(self._before.get(path, []))] == self._before.get(path, []), "an entry is lost"
                self._before[path] = digests
                for client in [self._own.get(path.stem, path.stem)] if path in nodes else list(self.sent):
                    self._check_client(db, path, client, written, own=path in nodes)

    def _check_client(self, db, path, client, written, *, own: bool) -> None:
        charged = [e for e in written if e.phase == CHARGED and e.client == client]
        received = self.sent.get(client, [])
        assert len(charged) >= len({(line[1], line[2]) for line in received}), f"{path}: a release was not charged"
        assert len({(e.run, e.round, e.request) for e in charged}) == len(charged)
        if own:
            kept = {e.reply for e in written if e.phase == RELEASED}
            assert {line[2] for line in received} <= kept, f"{path}: a reply was sent before it was stored"
        (data_set,) = [each for each in db.data_sets() if each.client == self._accounts[int(client)]] or [None]
        if data_set and received:
            released = epsilon_of(
                [from_json(line[3]) for line in {tuple(line) for line in received}], data_set.delta, "rdp"
            )
            recovered = epsilon_of([r.event for r in db.releases(data_set.id)], data_set.delta, "rdp")
            assert recovered.epsilon >= released.epsilon, f"{path}: epsilon fell below what was released"


def account_once(config) -> None:
    """Put what a round costs into this process's cache, which every child then has.

    On a busy machine most children would else be killed before their first reply.
    """
    bench = workbench(config)
    sizes = {client: len(data) for client, data in enumerate(bench.data.clients)}
    bar = rho_bar(weights_by_size(sizes).values())
    for size in sizes.values():
        event = planned_event(UpdateSpec.of(config), config.batch_size / size, bench.initial)
        for seen in (event, Release(event=event, rho_bar=bar).seen_by("rho")):
            epsilon_of([seen], 1e-5, "rdp")


def killed(config: RunConfig, folder: Path, kills: int, *, seed: int) -> dict[str, int]:
    """{kind of run: replies that were sent by those that were killed}; so many kills of each kind."""
    chance, replies = random.Random(seed), {}
    workbench(config).client(0)
    account_once(config)
    for kind, longest in ((whole_run, 0.4), (one_node, 0.1)):
        place = folder / kind.__name__
        place.mkdir()
        checker = Checker(place, workbench(config).accounts)
        for attempt in range(kills):
            after, seconds = chance.randint(0, MOST_REPLIES), chance.uniform(0, longest)
            checker.check(killed_after(after, seconds, partial(kind, config, place, attempt)))
        replies[kind.__name__] = sum(map(len, checker.sent.values()))
    return replies

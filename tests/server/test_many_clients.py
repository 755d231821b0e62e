"""Many clients that answer at once, late, twice, with errors or never: every message is accounted for exactly once."""

import contextlib
import copy
import ctypes
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message

from clients.app import app as client_app
from clients.node import BUDGET_KEY, LEDGER_KEY
from fedpriv.config import RunConfig, parse
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import TRAIN, Response
from fedpriv.learning.training.local_update import ClientUpdate, UpdateTask
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.entries import CHARGED, RELEASED, Entry
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.runs._rows import ClientRow, RoundRow
from fedpriv.runs._writer import RunWriter
from server import exchange
from server.exchange import set_message_id
from server.registration import register_nodes
from simulations.engines import federation
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from simulations.tiny_bert import make_tiny_bert
from tests.server.parts import strategy_of
from tests.tiny import LABELS, WORDS, write_table
from tests.wire import records_of, request_in, response_in

# (clients, rounds) of a run: two rounds more than the budgets last show that who retired is asked no more.
SIZES = [(20, 5), pytest.param((200, 8), marks=pytest.mark.slow)]
# The first ones keep ledgers of their own, and of these the first have a budget for so many rounds.
NUM_LEDGERS, NUM_BUDGETS, ROUNDS_OF_BUDGET = 12, 4, 3
# What becomes of a message, and how often; the status that its client then has.
FATES = {"ok": 70, "twice": 9, "late": 9, "lost": 3, "failing": 5, "malformed": 4}
STATUS = {"late": "no reply", "lost": "no reply", "failing": "failed", "malformed": "malformed"}

Place = tuple[int, int]
"""(round, client)"""


class UnreliableGrid(LocalGrid):
    """The in-process grid, with nodes that answer in threads, on a link that loses, delays and repeats.

    Args:
        contexts: one for each node.
        update: trains one task of a client, or returns an exception.
        fate: what becomes of the message of a round to a client.
        pool: the nodes.
    """

    def __init__(self, contexts: Sequence[Context], update: Any, fate: Any, pool: ThreadPoolExecutor) -> None:
        nodes = {context.node_id: context for context in contexts}
        super().__init__(nodes, lambda tasks: list(map(update, tasks)), client_app)
        self.sent: dict[str, Place] = {}
        self._fate, self._pool, self._lock, self._rng = fate, pool, threading.Lock(), random.Random(0)
        self._working, self._here, self._late = 0, [], []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if messages[0].metadata.message_type != TRAIN:
            return super().push_messages(messages)
        with self._lock:  # what was late comes now
            self._here, self._late = self._here + self._late, []
            self._working += len(messages)
        for message in messages:
            set_message_id(message, f"m{len(self.sent)}")
            round_ = request_in(message).fields["round"]
            self.sent[message.metadata.message_id] = round_, message.metadata.dst_node_id - federation._FIRST_NODE_ID
            self._pool.submit(self._deliver, message)
        return [message.metadata.message_id for message in messages]

    def _deliver(self, message: Message) -> None:
        fate = self._fate(self.sent[message.metadata.message_id])
        time.sleep(0.01 * self._rng.random())
        (reply,) = self._answer([copy.deepcopy(message)])
        if fate == "malformed":
            _spoil(reply)
        with self._lock:
            if fate != "lost":
                (self._late if fate == "late" else self._here).extend([reply] * (2 if fate == "twice" else 1))
            self._working -= 1

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """What has come since, asked for or not, in random order."""
        ids = set(message_ids)
        if not ids & self.sent.keys():
            return super().pull_messages(ids)
        with self._lock:
            here, self._here = self._here, []
        self._rng.shuffle(here)
        return here

    @property
    def is_silent(self) -> bool:
        """Whether nothing more will come in this round."""
        with self._lock:
            return not (self._working or self._here)


def _spoil(reply: Message) -> None:
    response = response_in(reply)
    next(iter(response.arrays[kinds.ADAPTER].values())).fill(np.nan)
    spoilt = Response.of(fields=response.fields, arrays=response.arrays)
    reply.content = records_of(spoilt.frame)


class Clock:
    """Time for the strategy: a round is over once its grid is silent, however slow this machine is."""

    def __init__(self) -> None:
        self.grid: UnreliableGrid | None = None
        self._skipped = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped

    def sleep(self, _: float) -> None:
        if self.grid is not None and self.grid.is_silent:
            self._skipped += 10**6
        time.sleep(0.002)


def configuration(folder: Path, num_clients: int, num_rounds: int) -> RunConfig:
    """A federation of many small clients, with an adapter of more than 200 kB."""
    model = make_tiny_bert(folder / "tiny-bert", [*WORDS, *LABELS])
    values = {
        **{"model": str(model), "data": str(write_table(folder / "records.csv", 20 * num_clients))},
        **{"num_clients": num_clients, "partition": "iid", "layers": "all", "rank": 104, "max_length": 16},
        **{"rounds": num_rounds, "local_steps": 1, "batch_size": 8, "noise_multiplier": 1.0},
        **{"simulate": True, "comparison": False},
    }
    return parse(values)


def shift(client: int) -> float:
    """How far a client moves every value of the adapter: a sum of them tells who is in it."""
    return (client + 1) / 1000


def fates_of(seed: int, num_clients: int, num_rounds: int) -> dict[Place, str]:
    """What becomes of every message; whoever has a budget answers, so that its end is seen."""
    rng = random.Random(seed)
    return {
        (round_, client): "ok" if client < NUM_BUDGETS else rng.choices([*FATES], [*FATES.values()])[0]
        for round_ in range(1, num_rounds + 1)
        for client in range(num_clients)
    }


@dataclass(kw_only=True)
class Done:
    """What is left of the federation."""

    folder: Path
    num_clients: int
    num_rounds: int
    fates: dict[Place, str]
    sent: list[Place]
    resident: dict[int, int]
    moved: list[torch.Tensor]
    num_releases: int

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_csv(self.folder / "run" / name, keep_default_na=False)

    def expected_status(self, place: Place) -> str:
        """The status in the row of a message."""
        if place[1] < NUM_BUDGETS and place[0] > ROUNDS_OF_BUDGET:
            return "retired"
        return STATUS.get(self.fates[place], "ok")


@pytest.fixture(scope="module", params=SIZES, ids="{0[0]} clients".format)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """All rounds of the real strategy and books over the grid."""
    num_clients, num_rounds = request.param
    folder = tmp_path_factory.mktemp("many")
    config, clock = configuration(folder, num_clients, num_rounds), Clock()
    fates = fates_of(1, num_clients, num_rounds)
    bench = workbench(config)
    client_of = {id(bench.client(client)): client for client in range(num_clients)}

    def update(task: UpdateTask) -> ClientUpdate | Exception:
        client = client_of[id(task.data)]
        if fates[task.round, client] == "failing":
            return RuntimeError("SECRET RECORD")
        moved = {name: tensor + shift(client) for name, tensor in task.adapter.items()}
        return ClientUpdate(adapter=moved, event=task.event, num_records=task.sampler.num_registered)

    with (
        pytest.MonkeyPatch.context() as patch,
        task_identity(federation.RUN_ID),
        ThreadPoolExecutor(8) as pool,
        Ledger(folder / "ledger.sqlite") as ledger,
    ):
        contexts = list(federation.SimulatedNodes(config).values())
        for client, context in enumerate(contexts[:NUM_LEDGERS]):
            context.node_config[LEDGER_KEY] = str(folder / "nodes" / f"{client}.sqlite")
        clock.grid = grid = UnreliableGrid(contexts, update, fates.__getitem__, pool)
        nodes = register_nodes(grid, num_expected=num_clients, wait=60)
        tables, resident = RunWriter.created(folder / "run", config), {}

        def on_round(row: RoundRow, rows: list[ClientRow]) -> None:
            tables.add(row, rows)
            resident[row.round] = resident_bytes()

        strategy = strategy_of(config, nodes, ledger, initial=bench.initial, on_round=on_round)
        books = strategy.books
        for client in range(NUM_BUDGETS):
            event, delta = books.costs.event(client, 1), books.accounts.deltas[client]
            contexts[client].node_config[BUDGET_KEY] = 1.0001 * epsilon_of([event] * ROUNDS_OF_BUDGET, delta).epsilon
        patch.setattr(exchange, "time", clock)
        strategy.start(grid, ArrayRecord(bench.initial), num_rounds=num_rounds, timeout=3600)
    return Done(
        **{"folder": folder, "num_clients": num_clients, "num_rounds": num_rounds, "fates": fates},
        **{"sent": [*grid.sent.values()], "resident": resident},
        moved=[strategy.model.adapter[name] - tensor for name, tensor in bench.initial.items()],
        num_releases=sum(map(books.accounts.num_releases, range(num_clients))),
    )


def resident_bytes() -> int:
    """The resident set, without what the allocator keeps back for later."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def written(path: Path, phase: str) -> list[Entry]:
    """The entries of one kind of a ledger that opens, which checks its chain."""
    Ledger(path).close()
    with reading(path) as db:
        return [entry for entry in db.entries() if entry.phase == phase]


def test_every_message_is_one_row_with_the_status_of_what_became_of_it_until_its_client_retires(done: Done) -> None:
    rows = done.table("clients.csv")
    assert Counter(zip(rows["round"], rows["client"], strict=True)) == Counter(done.sent)
    found = {(row.round, row.client): row.status for row in rows.itertuples()}
    assert found == {place: done.expected_status(place) for place in done.sent}
    assert {*found.values()} == {"ok", "no reply", "failed", "malformed", "retired"}
    assert not rows["detail"].str.contains("SECRET").any()
    asked = Counter(client for _, client in done.sent)
    retired, others = [ROUNDS_OF_BUDGET + 1] * NUM_BUDGETS, [done.num_rounds] * (done.num_clients - NUM_BUDGETS)
    assert done.num_rounds > ROUNDS_OF_BUDGET + 1, "the test would be blind"
    assert [asked[client] for client in range(done.num_clients)] == retired + others, "who retired is asked no more"


def test_the_rounds_add_up(done: Done) -> None:
    rows, rounds = done.table("clients.csv"), done.table("rounds.csv").set_index("round")
    for round_ in range(1, done.num_rounds + 1):
        statuses, row = Counter(rows[rows["round"] == round_]["status"]), rounds.loc[round_]
        assert (row.num_replies, row.num_failures) == (statuses["ok"], statuses.total() - statuses["ok"])
        assert row.num_selected == statuses.total()
        assert row.num_late == sum(done.fates.get((round_ - 1, client)) == "late" for client in range(done.num_clients))
    assert rounds.num_late.sum() > done.num_clients / 4


def test_a_late_or_second_reply_is_in_no_sum(done: Done) -> None:
    """Every client moves the adapter by a number of its own, so the model tells who moved it, and how often."""
    rows = done.table("clients.csv")
    sound = rows[rows["status"] == "ok"]
    expected = 0.0
    for _, group in sound.groupby("round"):
        expected += np.average([shift(client) for client in group["client"]], weights=group["num_records"])
    values = torch.cat([tensor.flatten() for tensor in done.moved])
    assert len(values) * 4 > 200_000
    assert [float(values.min()), float(values.max())] == pytest.approx([expected] * 2, abs=1e-4)


def test_every_message_is_charged_once_before_it_is_sent_and_settled_once_here_and_at_its_node(done: Done) -> None:
    charged, settled = (written(done.folder / "ledger.sqlite", phase) for phase in (CHARGED, RELEASED))
    for entries in (charged, settled):
        assert Counter((e.round, int(e.client)) for e in entries) == Counter(done.sent)
    for entry in settled:
        place = (entry.round, int(entry.client))
        assert (entry.reply is not None) == (done.expected_status(place) == "ok"), place
    assert done.num_releases == len(done.sent)
    at_server = {(entry.round, int(entry.client)): entry.reply for entry in settled}
    for client in range(NUM_LEDGERS):
        path = done.folder / "nodes" / f"{client}.sqlite"
        asked = [place for place in done.sent if place[1] == client]
        computed = [place for place in asked if done.expected_status(place) != "retired"]
        assert [(e.round, int(e.client)) for e in written(path, CHARGED)] == computed
        stored = {(e.round, int(e.client)): e.reply for e in written(path, RELEASED)}
        assert stored.keys() == {place for place in computed if done.fates[place] != "failing"}
        for place, digest in stored.items():
            assert at_server[place] in (digest, None)


def test_memory_does_not_grow_with_the_rounds(done: Done) -> None:
    """Keeping the replies of one more round, 200 kB of each client, would show."""
    assert done.resident[done.num_rounds] - done.resident[2] < 0.75 * 200e3 * done.num_clients, done.resident

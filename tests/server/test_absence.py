"""A node that stopped answering is skipped, at no charge, until it registers again as the node that it was."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from flwr.app import ArrayRecord, Error, Message

from fedpriv.config import parse
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REGISTER
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._status import status_of
from server import app, registration
from server.checkpoint import Checkpoint
from server.exchange import set_message_id
from server.registration import NO_NODE
from server.round import Absences
from simulations.engines import federation
from simulations.engines.grid import LocalGrid
from tests.notes import Notes
from tests.server import parts
from tests.server.parts import ADAPTER
from tests.wire import answered, given_up, request_in

pytestmark = pytest.mark.usefixtures("as_a_task")

SIZES = {0: 600, 1: 300, 2: 100}


def signed(node_keys, client: int, **changes) -> Registration:
    """What a node registers."""
    stated = Registration(client=client, num_records=SIZES[client], name="", data_set=f"d{client}", keeps_replies=True)
    return parts.signed(stated, node_keys.parent / f"key-{client}", **changes)


def at_first(node_keys, *missing: int) -> dict[int, tuple[int, Registration]]:
    """The nodes that a run begins with; of those that are missing it knows the registration alone."""
    each = parts.nodes_of([signed(node_keys, client) for client in SIZES])
    return each | {client: (NO_NODE, each[client][1]) for client in missing}


class Link(parts.SlowGrid):
    """A link to nodes, in which `gone(client, round)` says who is dead; registrations take until the next pull.

    Attributes:
        registered: {node id: what it registers}; node 100 + k is client k.
        trained: (round, client) of each train message that a node was sent.
        questions: the nodes that were asked to register.
        told: what the run's absences said.
        round: that began last.
    """

    def __init__(self, node_keys, gone, link_answers=False) -> None:
        super().__init__(self._reply)
        self.registered = dict(at_first(node_keys).values())
        self.trained: list[tuple[int, int]] = []
        self.questions: list[int] = []
        self.told: list[tuple[str, int, int]] = []
        self.round = 0
        self.gone = lambda node_id: gone(node_id - 100, self.round)
        self._node_keys, self._ledger = node_keys, node_keys.parent / "ledger.sqlite"
        self._link_answers = link_answers

    def get_node_ids(self):
        return [node_id for node_id in self.registered if not self.gone(node_id)]

    def _reply(self, message):
        node_id = message.metadata.dst_node_id
        if request_in(message).kind == REGISTER:
            self.questions.append(node_id)
            return answered(message, kinds.pack(self.registered[node_id])), 2
        self.round = request_in(message).fields["round"]
        client = self.registered[node_id].client
        self.trained.append((self.round, client))
        if self.gone(node_id):
            return (given_up(message), 0) if self._link_answers else None
        return parts.answer(self.strategy, message, client=client), 0

    def run(self, num_rounds: int, nodes=None) -> list[int]:
        """Carry out a run over these nodes with the real strategy and a ledger, and return who is skipped."""
        config = parse({"rounds": num_rounds, "batch_size": 10, "noise_multiplier": 1.0, "min_clients": 2})
        nodes = nodes or at_first(self._node_keys)
        absences = Absences(nodes, node_keys=self._node_keys, on_change=lambda *change: self.told.append(change))
        with Ledger(self._ledger) as ledger:
            self.strategy = parts.strategy_of(config, nodes, ledger, evaluate=lambda _: None, absences=absences)
            self.strategy.start(self, ArrayRecord(ADAPTER), num_rounds=num_rounds, timeout=0)
        return absences.skipped

    def charged(self, client: int) -> list[int]:
        """The rounds that a client was charged."""
        return parts.rounds_charged(self._ledger, client)


@pytest.mark.parametrize("link_answers", [False, True], ids=["deadline", "the link gives up"])
def test_after_two_rounds_without_an_answer_a_node_is_neither_asked_nor_charged(node_keys, link_answers):
    link = Link(node_keys, lambda client, round_: client == 2 and round_ >= 2, link_answers)
    assert link.run(6) == [2]
    assert [round_ for round_, client in link.trained if client == 2] == [1, 2, 3]
    assert (link.charged(2), link.charged(0)) == ([1, 2, 3], [1, 2, 3, 4, 5, 6])
    assert link.told == [("skipped", 2, 3)]
    rows = {row.client: row for row in link.strategy._rows}
    # The weights of a round are of those who were asked.
    assert {client: row.weight for client, row in rows.items()} == pytest.approx({0: 2 / 3, 1: 1 / 3})
    assert rows[0].rho_bar == pytest.approx(math.hypot(600, 300) / 900)


@pytest.mark.parametrize(
    ("is_gone", "charged", "told"),
    [
        # It is asked to register in 6, and answers by 7.
        (lambda t: 2 <= t <= 4, [1, 2, 3, 7, 8], [("skipped", 2, 3), ("returned", 2, 7)]),
        # One round without an answer is forgiven.
        (lambda t: t in (2, 4, 6), [*range(1, 9)], []),
    ],
)
def test_a_node_that_registers_again_is_asked_from_the_next_round_on(node_keys, is_gone, charged, told):
    link = Link(node_keys, lambda client, round_: client == 2 and is_gone(round_))
    assert link.run(8) == []
    assert (link.charged(2), link.told) == (charged, told)
    assert bool(link.questions) == bool(told)


def test_an_error_of_the_node_itself_is_an_answer(node_keys):
    class Failing(Link):
        def _reply(self, message):
            if message.metadata.dst_node_id == 102:
                return Message(Error(101, "no memory"), reply_to=message), 0
            return super()._reply(message)

    link = Failing(node_keys, lambda client, round_: False)
    assert link.run(4) == []
    assert link.charged(2) == [1, 2, 3, 4]


def test_a_node_that_comes_back_under_another_id_is_found_by_its_signature(node_keys):
    link = Link(node_keys, lambda client, round_: client == 2 and round_ >= 2)
    link.registered[150] = signed(node_keys, 2)  # as a key that was registered with the link anew
    link.run(6)
    assert ("returned", 2, 5) in link.told
    assert link.charged(2) == [1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    "changes",
    [{"data_set": "other"}, {"num_records": 101}, {"identity": "ssh-ed25519 other"}, {"keeps_replies": False}, None],
)
def test_with_other_data_or_another_key_nobody_takes_a_missing_nodes_place(node_keys, changes):
    link = Link(node_keys, lambda client, round_: client == 2 and round_ >= 2)
    stated = signed(node_keys, 2, **(changes or {}))
    # Without changes, what another node's key signed.
    link.registered[150] = stated if changes else replace(stated, signature=signed(node_keys, 1).signature)
    link.registered[151] = signed(node_keys, 1)  # a twin of a node that is there
    assert link.run(6) == [2]
    assert link.charged(2) == [1, 2, 3]
    assert {100, 101}.isdisjoint(link.questions), "who takes part is not asked to register"


def test_a_resumed_run_goes_on_without_whom_it_skipped_until_that_node_is_there(node_keys):
    nodes = at_first(node_keys, 2)
    link = Link(node_keys, lambda client, round_: client == 2 and round_ < 2)
    link.run(5, nodes)
    assert link.charged(2) == [4, 5]
    assert nodes[2][0] == 102


@pytest.mark.parametrize(("retired", "found"), [({0: "its budget is spent"}, 102), ({}, NO_NODE)])
def test_a_resumed_run_waits_for_whom_it_skipped_where_it_cannot_do_without(node_keys, monkeypatch, retired, found):
    monkeypatch.setattr(registration, "_POLL_SECONDS", 0.01)

    class Slow(Link):
        """Client 2 connects after the others."""

        num_looks = 0

        def get_node_ids(self):
            self.num_looks += 1
            return [each for each in super().get_node_ids() if each != 102 or self.num_looks > 3]

    model = GlobalModel(initial=ADAPTER, adapter=ADAPTER)
    began = tuple(signed(node_keys, client) for client in SIZES)
    stated = {"run": "run", "round": 3, "digest": "", "ledger": (0, ""), "registrations": began, "skipped": (2,)}
    resumed = Checkpoint(**stated, retired=retired, model=model, uploads={})
    config = parse({"min_clients": 2, "registration_seconds": 10.0, "node_keys": str(node_keys)})
    nodes = app._nodes(Slow(node_keys, lambda *_: False), config, SimpleNamespace(num_clients=3), resumed)
    assert nodes[2][0] == found


def test_too_few_who_answer_end_the_run_before_anybody_is_charged(node_keys):
    link = Link(node_keys, lambda client, round_: client > 0)
    with pytest.raises(TooFewClientsError, match=r"round 1: 1 of 3 clients answer, min_clients = 2; skipped .*: 1, 2;"):
        link.run(2, at_first(node_keys, 1, 2))
    assert link.charged(0) == []


# A sum needs three holders, so a fourth replaces the one that is lost.
SECURE = {
    **{"client_column": "", "partition": "iid", "num_clients": 4, "min_clients": 3, "secure_aggregation": True},
    **{"local_steps": 1, "optimizer": "sgd", "noise_multiplier": 4.0, "secure_masks": True},
}
FIRST_NODE_ID = 2


def lossy(gone) -> type[LocalGrid]:
    """Links on which `gone(client, round)` says whose messages are lost."""

    class Lossy(LocalGrid):
        round = 0

        def get_node_ids(self):
            return [each for each in super().get_node_ids() if not gone(each - FIRST_NODE_ID, self.round)]

        def push_messages(self, messages):
            arriving = []
            for message in messages:
                self.round = max(self.round, int(message.metadata.group_id))
                if gone(message.metadata.dst_node_id - FIRST_NODE_ID, self.round):
                    set_message_id(message, f"lost {id(message)}")
                else:
                    arriving.append(message)
            return super().push_messages(arriving)

    return Lossy


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, SECURE], ids=["uploads", "secure aggregation"])
def test_who_is_skipped_stays_so_over_a_resume_and_pays_for_nothing(small_run, tmp_path, monkeypatch, changes):
    out, first, second = tmp_path / "run", Notes(), Notes()
    values = {**small_run, "rounds": 6, "min_clients": 2, "round_seconds": 0.1, "evaluate_every": 100, **changes}
    # Client 2 dies in round 2 and client 1 in round 4, after which only the latter comes back.
    monkeypatch.setattr(federation, "LocalGrid", lossy(lambda c, t: (c == 2 and t >= 2) or (c == 1 and t >= 4)))
    with pytest.raises(TooFewClientsError, match="round 4"):
        parts.run(values, out, first)
    name = "2" if changes else "site-2 (2)"
    assert any(f"{name} gave no answer in 2 rounds up to round 3" in text for text in first.notes)
    assert [each.client for each in status_of(RunFolder(out, now=0.0)).clients if each.skipped] == [2]
    monkeypatch.setattr(federation, "LocalGrid", lossy(lambda c, t: c == 2))
    parts.run(values, out, second, resume=str(out))
    assert name in next(text for text in second.notes if "resumes after round" in text)
    # Under secure aggregation a node that shows no keys is left out, which costs nothing either.
    ledger, charged = out / "ledger.sqlite", [1] if changes else [1, 2, 3]
    assert [parts.rounds_charged(ledger, client) for client in (2, 0)] == [charged, [1, 2, 3, 4, 5, 6]]
    assert list(pd.read_csv(out / "clients.csv").query("client == 2")["round"]) == [1, 2, 3]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(e["round"], e["client"]) for e in events if e["event"] == "skipped"] == [(3, 2)]
    assert {c["client"]: c["rounds"] for c in parts.summary(out)["clients"]}[2] == len(charged)

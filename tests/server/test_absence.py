"""A node that stopped answering is skipped, at no charge, until it registers again as the node that it was."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, Error, Message

from fedpriv.config import parse
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REGISTER
from fedpriv.holder.wire.kinds import Registration, UploadRelease
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from server import app
from server.bookkeeping import Books
from server.checkpoint import Checkpoint
from server.exchange import set_message_id
from server.registration import NO_NODE
from server.round import Absences
from server.strategy import RuleStrategy
from simulations.engines.flower_private import task_identity
from tests.wire import answered, arrays_of, request_in

SIZES = {0: 600, 1: 300, 2: 100}
ADAPTER = {"A": torch.zeros(2, 3), "B": torch.zeros(4)}
LINK = 1


@pytest.fixture(autouse=True)
def _identity():
    with task_identity(LINK):
        yield


@pytest.fixture
def secrets(tmp_path):
    """The nodes' private keys; the folder `nodes` beside them holds the public ones."""
    (tmp_path / "nodes").mkdir()
    for client in SIZES:
        keys.make_key_pair(tmp_path / f"key-{client}")
        (tmp_path / "nodes" / f"{client}.pub").write_text(keys.public_line(tmp_path / f"key-{client}"))
    return tmp_path


def signed(secrets, client: int, **changes) -> Registration:
    """What a node registers."""
    key = secrets / f"key-{client}"
    stated = {"name": "", "data_set": f"d{client}", "keeps_replies": True, "identity": keys.public_line(key)}
    registration = Registration(**{"client": client, "num_records": SIZES[client], **stated, **changes})
    return replace(registration, signature=keys.sign(key, registration.signed))


class Nodes:
    """A link to nodes, in which `gone(client, round)` says who is dead; registrations take until the next pull.

    Attributes:
        registered: {node id: what it registers}; node 100 + k is client k.
        trained: (round, client) of each train message that a node was sent.
        round: that began last.
    """

    def __init__(self, secrets, gone, link_answers=False) -> None:
        self.registered = {100 + client: signed(secrets, client) for client in SIZES}
        self.trained: list[tuple[int, int]] = []
        self.questions: list[int] = []
        self.round = 0
        self.gone = lambda node_id: gone(node_id - 100, self.round)
        self._link_answers, self._replies, self._late, self._num = link_answers, {}, {}, 0

    def get_node_ids(self):
        return [node_id for node_id in self.registered if not self.gone(node_id)]

    def push_messages(self, messages):
        for message in messages:
            self._num += 1
            set_message_id(message, f"m{self._num}")
            if request_in(message).kind == REGISTER:
                self.questions.append(message.metadata.dst_node_id)
            if (reply := self._reply(message)) is not None:
                slow = request_in(message).kind == REGISTER
                (self._late if slow else self._replies)[f"m{self._num}"] = reply
        return []

    def pull_messages(self, ids):
        here = [self._replies.pop(id_) for id_ in list(ids) if id_ in self._replies]
        self._replies, self._late = {**self._replies, **self._late}, {}
        return here

    def _reply(self, message):
        node_id = message.metadata.dst_node_id
        if request_in(message).kind == REGISTER:
            return answered(message, kinds.pack(self.registered[node_id]))
        self.round = request_in(message).fields["round"]
        client = self.registered[node_id].client
        self.trained.append((self.round, client))
        if self.gone(node_id):
            if not self._link_answers:
                return None
            error = Message(Error(3, "node unavailable"), reply_to=message)
            error.metadata.__dict__["_src_node_id"] = LINK
            return error
        honest = {"round": self.round, "event": self.strategy.event(client), "num_records": SIZES[client]}
        adapter = arrays_of({name: torch.ones_like(t) for name, t in ADAPTER.items()})
        return answered(message, kinds.pack(UploadRelease(**honest)), arrays={kinds.ADAPTER: adapter})

    def run(self, secrets, num_rounds: int, nodes=None, **changes) -> Absences:
        """Carry out a run over these nodes with the real strategy and a ledger, and return who is skipped."""
        config = parse({"rounds": num_rounds, "batch_size": 10, "noise_multiplier": 1.0, "min_clients": 2, **changes})
        nodes = nodes or {client: (100 + client, signed(secrets, client)) for client in SIZES}
        self.told: list[tuple[str, int, int]] = []
        absences = Absences(nodes, node_keys=secrets / "nodes", on_change=lambda *change: self.told.append(change))
        with Ledger(secrets / "ledger.sqlite") as ledger:
            self.strategy = RuleStrategy(
                config,
                nodes,
                books=Books(config, "run", [each for _, each in nodes.values()], initial=ADAPTER, ledger=ledger),
                run="run",
                initial=ADAPTER,
                evaluate=lambda _: None,
                on_round=lambda *_: None,
                absences=absences,
            )
            self.strategy.start(self, ArrayRecord(ADAPTER), num_rounds=num_rounds, timeout=0)
        return absences


def rounds_charged(secrets, client: int) -> list[int]:
    with reading(secrets / "ledger.sqlite") as db:
        return [entry.round for entry in db.entries() if entry.phase == "charged" and entry.client == str(client)]


@pytest.mark.parametrize("link_answers", [False, True], ids=["deadline", "the link gives up"])
def test_after_two_rounds_without_an_answer_a_node_is_neither_asked_nor_charged(secrets, link_answers):
    link = Nodes(secrets, lambda client, round_: client == 2 and round_ >= 2, link_answers)
    absences = link.run(secrets, 6)
    assert [round_ for round_, client in link.trained if client == 2] == [1, 2, 3]
    assert rounds_charged(secrets, 2) == [1, 2, 3]
    assert rounds_charged(secrets, 0) == [1, 2, 3, 4, 5, 6]
    assert absences.skipped == [2]
    assert link.told == [("skipped", 2, 3)]


def test_the_weights_of_a_round_are_of_those_who_were_asked(secrets):
    link = Nodes(secrets, lambda client, round_: client == 2)
    link.run(secrets, 3)
    rows = {row.client: row for row in link.strategy._rows}
    assert {client: row.weight for client, row in rows.items()} == pytest.approx({0: 2 / 3, 1: 1 / 3})
    assert rows[0].rho_bar == pytest.approx(math.hypot(600, 300) / 900)


def test_a_node_that_registers_again_is_asked_from_the_next_round_on(secrets):
    link = Nodes(secrets, lambda client, round_: client == 2 and 2 <= round_ <= 4)
    assert link.run(secrets, 8).skipped == []
    assert rounds_charged(secrets, 2) == [1, 2, 3, 7, 8]  # it is asked to register in 6, and answers by 7
    assert link.told == [("skipped", 2, 3), ("returned", 2, 7)]


def test_one_round_without_an_answer_is_forgiven(secrets):
    link = Nodes(secrets, lambda client, round_: client == 2 and round_ in (2, 4, 6))
    link.run(secrets, 6)
    assert rounds_charged(secrets, 2) == [*range(1, 7)]
    assert link.questions == []


def test_an_error_of_the_node_itself_is_an_answer(secrets):
    class Failing(Nodes):
        def _reply(self, message):
            if message.metadata.dst_node_id == 102:
                return Message(Error(101, "no memory"), reply_to=message)
            return super()._reply(message)

    link = Failing(secrets, lambda client, round_: False)
    assert link.run(secrets, 4).skipped == []
    assert rounds_charged(secrets, 2) == [1, 2, 3, 4]


def test_a_node_that_comes_back_under_another_id_is_found_by_its_signature(secrets):
    link = Nodes(secrets, lambda client, round_: client == 2 and round_ >= 2)
    link.registered[150] = signed(secrets, 2)  # as a key that was registered with the link anew
    link.run(secrets, 6)
    assert ("returned", 2, 5) in link.told
    assert rounds_charged(secrets, 2) == [1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    "changes",
    [{"data_set": "other"}, {"num_records": 101}, {"identity": "ssh-ed25519 other"}, {"keeps_replies": False}],
)
def test_with_other_data_or_another_key_nobody_takes_a_missing_nodes_place(secrets, changes):
    link = Nodes(secrets, lambda client, round_: client == 2 and round_ >= 2)
    link.registered[150] = signed(secrets, 2, **changes)
    assert link.run(secrets, 6).skipped == [2]
    assert rounds_charged(secrets, 2) == [1, 2, 3]


def test_a_node_that_another_key_signed_for_takes_nobodys_place(secrets):
    link = Nodes(secrets, lambda client, round_: client == 2 and round_ >= 2)
    forged = replace(signed(secrets, 2), signature=signed(secrets, 1).signature)
    link.registered[150] = forged
    link.registered[151] = replace(signed(secrets, 1))  # a twin of a node that is there
    assert link.run(secrets, 6).skipped == [2]
    assert {100, 101}.isdisjoint(link.questions), "who takes part is not asked to register"


def test_a_resumed_run_goes_on_without_whom_it_skipped_until_that_node_is_there(secrets):
    nodes = {client: (100 + client, signed(secrets, client)) for client in SIZES}
    nodes[2] = NO_NODE, nodes[2][1]
    link = Nodes(secrets, lambda client, round_: client == 2 and round_ < 2)
    link.run(secrets, 5, nodes=nodes)
    assert rounds_charged(secrets, 2) == [4, 5]
    assert nodes[2][0] == 102


@pytest.mark.parametrize(("retired", "found"), [({0: "its budget is spent"}, 102), ({}, NO_NODE)])
def test_a_resumed_run_waits_for_whom_it_skipped_where_it_cannot_do_without(secrets, retired, found):
    class Slow(Nodes):
        """Client 2 connects after the others."""

        num_looks = 0

        def get_node_ids(self):
            self.num_looks += 1
            return [each for each in super().get_node_ids() if each != 102 or self.num_looks > 3]

    model = GlobalModel(initial=ADAPTER, adapter=ADAPTER)
    began = tuple(signed(secrets, client) for client in SIZES)
    stated = {"run": "run", "round": 3, "digest": "", "ledger": (0, ""), "registrations": began, "skipped": (2,)}
    resumed = Checkpoint(**stated, retired=retired, model=model, uploads={})
    config = parse({"min_clients": 2, "registration_seconds": 10.0, "node_keys": str(secrets / "nodes")})
    nodes = app._nodes(Slow(secrets, lambda *_: False), config, SimpleNamespace(num_clients=3), resumed)
    assert nodes[2][0] == found


def test_too_few_who_answer_end_the_run_before_anybody_is_charged(secrets):
    nodes = {client: (100 + client if client == 0 else NO_NODE, signed(secrets, client)) for client in SIZES}
    link = Nodes(secrets, lambda client, round_: client > 0)
    with pytest.raises(TooFewClientsError, match=r"round 1: 1 of 3 clients answer, min_clients = 2; skipped .*: 1, 2;"):
        link.run(secrets, 2, nodes=nodes)
    assert rounds_charged(secrets, 0) == []

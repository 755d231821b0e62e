"""Who may take part: the same software, a signature by the node's own key, one node for each partition id."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message, RecordDict

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.holder.sums import Participant
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REGISTER
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.ledger import keys
from server import app
from server.registration import read_registration, register_nodes
from tests.server.parts import SlowGrid, signed
from tests.wire import answered, asked, given_up

pytestmark = pytest.mark.usefixtures("as_a_task")


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr("server.registration._POLL_SECONDS", 0.02)


def reply_with(registration: Registration, message: Message | None = None) -> Message:
    message = message or asked(REGISTER)
    return answered(message, kinds.pack(registration))


NODE = Registration(client=0, num_records=40, name="St. Anna", data_set="5eed", keeps_replies=True)


OTHERS = r"^St\. Anna \(0\): runs fedpriv 0\.0\.9, the coordinator fedpriv \S+ \(\w{12}\); install the same"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"num_records": 41}, "not signed with 0.pub"),
        ({"data_set": "other"}, "not signed with 0.pub"),
        ({"client": 1}, "not signed with 1.pub"),
        ({"client": 3}, "no key 3.pub among node_keys"),
        ({"signature": ""}, "not signed with 0.pub"),
        ({"signature": "another's"}, "not signed with 0.pub"),
        ({"software": "fedpriv 0.0.9"}, OTHERS),
        ({"software": f"{kinds.SOFTWARE[:-3]}00)"}, "install the same fedpriv at both, and restart the node"),
        ({"num_records": 0}, "num_records >= 1"),
    ],
)
def test_what_is_what_the_node_signed_is_taken_and_all_else_takes_no_part(node_keys, tmp_path, change, message):
    if change.get("signature"):
        change = vars(signed(NODE, tmp_path / "key-1"))
    registration = replace(signed(NODE, tmp_path / "key-0"), **change)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        assert read_registration(reply_with(registration), node_keys) == registration
    assert read_registration(reply_with(NODE), None) == NODE, "without keys everyone is taken"


def test_a_node_that_was_admitted_by_flowers_key_alone_is_named(node_keys, tmp_path):
    keys.make_key_pair(tmp_path / "node.key", keys.NODE)
    (node_keys / "0.pub").write_text(keys.public_line(tmp_path / "node.key"))
    named = r"partition-id = 0: public key = .*0\.pub: is a ecdsa.*; give the vault\.key\.pub"
    with pytest.raises(ValueError, match=named):
        read_registration(reply_with(signed(NODE, tmp_path / "key-0")), node_keys)


def test_an_error_or_an_empty_reply_takes_no_part():
    message = asked(REGISTER)
    with pytest.raises(ValueError, match="could not be verified"):
        read_registration(Message(Error(8, "The FAB could not\nbe verified."), reply_to=message), None)
    with pytest.raises(ValueError, match="records: must be frame-0"):
        read_registration(Message(RecordDict(), reply_to=message), None)


class Nodes(SlowGrid):
    """Nodes that answer with what they are told to, link errors first; more of them connect with every look."""

    def __init__(self, answers: list[Registration | Error], gone: set[int] = frozenset()) -> None:
        super().__init__(lambda message: (self._reply(message), 0))
        self.answers, self.gone, self.looks = answers, set(gone), 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return list(range(10, 10 + min(self.looks, len(self.answers))))

    def _reply(self, message: Message) -> Message:
        place = message.metadata.dst_node_id - 10
        if place in self.gone:
            self.gone.discard(place)
            return given_up(message, "the node\nis gone")
        answer = self.answers[place]
        return Message(answer, reply_to=message) if isinstance(answer, Error) else reply_with(answer, message)


def in_sum(nodes: Nodes, node_keys) -> dict[int, tuple[int, Registration]]:
    """Who of three takes part in sums, once all have been looked at."""
    of_sums = {"num_expected": 3, "secure_aggregation": True, "goes_on": lambda: nodes.looks > 3}
    return register_nodes(nodes, wait=600, node_keys=node_keys, **of_sums)


def of_client(client: int, tmp_path) -> Registration:
    return signed(NODE, tmp_path / f"key-{client}", client=client)


@pytest.mark.parametrize("admitted", [True, False])
@pytest.mark.parametrize("kind", ["another's", "nonsense", "none", "with a comment"])
def test_who_lies_about_its_identity_is_left_out_by_name_and_stops_nobody(node_keys, tmp_path, caplog, kind, admitted):
    """Terms with such an identity would be none, and no sum would ever begin."""
    own = keys.public_line(tmp_path / "key-1")
    lie = {"another's": keys.public_line(tmp_path / "key-0"), "with a comment": f"{own} me", "none": ""}.get(kind, kind)
    honest = [of_client(client, tmp_path) for client in range(3)]
    nodes = Nodes([honest[0], signed(honest[1], tmp_path / "key-1", identity=lie), honest[2]])
    folder = node_keys if admitted else None
    registered = in_sum(nodes, folder)
    assert list(registered) == [0, 2]
    assert "does not take part: partition-id = 1: " in caplog.text
    for client, (_, node) in registered.items():
        Participant(client=client, identity=node.identity, num_records=40, sampling_probability=1.0, scale=1.0)


def test_of_two_nodes_with_one_identity_the_second_is_left_out_by_name(node_keys, tmp_path, caplog):
    """Its own key may be admitted twice in a folder that somebody made by hand."""
    (node_keys / "1.pub").write_text(keys.public_line(tmp_path / "key-0"))
    nodes = Nodes([signed(NODE, tmp_path / "key-0", client=client) for client in (0, 1)])
    registered = in_sum(nodes, node_keys)
    assert list(registered) == [0]
    assert "partition-id = 1: its identity is that of partition 0" in caplog.text


def test_a_node_that_the_link_gave_up_on_is_asked_again_once_it_is_back(caplog):
    registered = register_nodes(Nodes([NODE, replace(NODE, client=1)], gone={1}), num_expected=2, wait=30)
    assert list(registered) == [0, 1]
    assert "node 11: the node is gone" in caplog.text


def test_late_nodes_are_asked_and_refused_ones_do_not_count():
    nodes = Nodes([Error(100, "refused"), replace(NODE, client=1), NODE])
    registered = register_nodes(nodes, num_expected=2, wait=30)
    assert [(client, node_id) for client, (node_id, _) in registered.items()] == [(0, 12), (1, 11)]


@pytest.mark.parametrize(("engine", "expected"), [("flower", [0, 1]), ("stacked", [0])])
def test_a_stranger_who_is_refused_takes_nobodys_place_where_nodes_may_still_come(small_run, engine, expected):
    nodes = Nodes([Error(100, "refused"), NODE, replace(NODE, client=1)])
    config = parse(small_run | {"engine": engine, "registration_seconds": 30})
    assert list(app._nodes(nodes, config, SimpleNamespace(num_clients=2), None)) == expected


def test_after_the_wait_or_where_none_can_come_the_run_goes_on_with_those_that_are_there(caplog):
    registered = register_nodes(Nodes([NODE]), num_expected=3, wait=0.1)
    assert list(registered) == [0]
    assert "1 of 3 nodes registered in 0 s" in caplog.text
    with pytest.raises(InputError, match="none of which can take part"):
        register_nodes(Nodes([Error(100, "refused")]), num_expected=1, wait=600, may_come=False)


def test_a_node_that_left_is_not_waited_for(node_keys, tmp_path):
    """Partition 1 has no key any more; with 60 s to wait for it the test would take as long."""
    (node_keys / "1.pub").unlink()
    stayed = [of_client(client, tmp_path) for client in (0, 2)]
    began = time.monotonic()
    assert list(register_nodes(Nodes(stayed), num_expected=3, wait=60, node_keys=node_keys)) == [0, 2]
    assert time.monotonic() - began < 30


def test_two_nodes_cannot_claim_one_partition_id():
    with pytest.raises(InputError, match="two nodes claim it"):
        register_nodes(Nodes([NODE, NODE]), num_expected=2, wait=5)

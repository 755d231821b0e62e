"""A ledger that was restored with its head is intact, and spends a second time what it lacks; the node notices."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from flwr.app import ArrayRecord, Message

from clients.app import message_of, request_of
from fedpriv.config import RunConfig, to_flower
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import FILE
from fedpriv.holder.wire import frame, kinds
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading, verify_with_head
from fedpriv.privacy.ledger.receipts import Receipt, ReceiptLog, from_text
from server.bookkeeping import Books
from server.exchange import set_message_id
from server.registration import register_nodes
from server.round import Receipts
from server.strategy import RuleStrategy
from simulations.engines.flower_private import task_identity
from tests.adversary.exchanges import N_K, ROWS
from tests.adversary.nodes import (
    Node,
    ask,
    make_node,
    num_charges,
    register_data,
    registering,
    restart,
    run_config,
    spent,
    training,
    write_rows,
)
from tests.marks import slow
from tests.tiny import LABELS

LEDGER = ("ledger.sqlite", "ledger.sqlite.head")


@pytest.fixture
def node(approved, tmp_path) -> Node:
    return set_up(make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved))


def set_up(node: Node, **settings: object) -> Node:
    """The node with further settings, started anew."""
    with (node.folder / FILE).open("a") as file:
        file.write(tomli_w.dumps(settings))
    restart()
    return node


def begun(node: Node) -> None:
    """The counter file, as the operator's command begins it."""
    ReceiptWatch.of(node.settings).begin_counter_file(node.settings.ledger)


def asked(node: Node, start, round_: int, shown: str | None = "", **fields):
    """The answer to a request for a round, in which the coordinator shows the newest receipt that it knows."""
    named = {} if shown is None else {kinds.RECEIPT: shown}
    return ask(node, training(run_config(rounds=9), start, round_=round_, fields=fields, own=named))


def receipt_in(answer) -> Receipt:
    assert answer.code == 0, answer
    return from_text(answer.response.fields[kinds.RECEIPT])


def copied(node: Node, folder: Path, names=LEDGER) -> Path:
    """A backup of these files."""
    folder.mkdir()
    for name in names:
        shutil.copy(node.folder / name, folder)
    return folder


def restored(node: Node, backup: Path, forgets: tuple[str, ...] = ()) -> None:
    """The files as they were, without those that a snapshot of the whole machine would not have."""
    for file in backup.iterdir():
        shutil.copy(file, node.folder)
    for name in forgets:
        (node.folder / name).unlink()
    with reading(node.settings.ledger) as db:
        verify_with_head(db, node.settings.ledger)


def refuses(node: Node, answer) -> bool:
    before = num_charges(node)
    refused = answer.code == frame.REFUSED and "its operator must recover it" in answer.response.reason
    return refused and num_charges(node) == before


def test_a_ledger_that_was_restored_alone_is_noticed_by_what_the_folder_keeps(node, starts, tmp_path):
    """Before, the node answered on: charged three times in truth, twice in its books."""
    asked(node, starts["tiny"], 1, None)
    backup = copied(node, tmp_path / "backup")
    asked(node, starts["tiny"], 2, None)
    truth = spent(node)
    restored(node, backup)
    assert spent(node) < truth
    assert refuses(node, asked(node, starts["tiny"], 3, None))


def test_a_coordinator_that_shows_the_newest_receipt_stops_a_snapshot(node, starts, tmp_path):
    """The whole folder is as it was: only others know better."""
    first = receipt_in(asked(node, starts["tiny"], 1))
    backup = copied(node, tmp_path / "backup")
    second = receipt_in(asked(node, starts["tiny"], 2, first.text()))
    assert (first.counter, second.counter, second.previous) == (1, 2, first.digest)
    restored(node, backup, forgets=("receipts.jsonl", "events.jsonl"))
    assert refuses(node, asked(node, starts["tiny"], 2, second.text()))
    # Once it was told, it remembers.
    assert refuses(node, asked(node, starts["tiny"], 2))


def test_a_fork_with_as_many_charges_is_noticed(node, starts, tmp_path):
    asked(node, starts["tiny"], 1)
    backup = copied(node, tmp_path / "backup")
    lost = receipt_in(asked(node, starts["tiny"], 2))
    restored(node, backup, forgets=("receipts.jsonl",))
    other = receipt_in(asked(node, starts["tiny"], 3))
    assert lost.counter == other.counter
    assert refuses(node, asked(node, starts["tiny"], 4, lost.text()))


def test_what_a_crash_left_unsent_is_no_rollback(node, starts):
    """The node is ahead of what it is shown."""
    first = receipt_in(asked(node, starts["tiny"], 1))
    asked(node, starts["tiny"], 2)
    third = receipt_in(asked(node, starts["tiny"], 3, first.text()))
    assert third.counter == 3
    again = asked(node, starts["tiny"], 3, first.text())
    assert receipt_in(again) == third, "to the byte, with the same signature"
    assert num_charges(node) == 3


def test_a_counter_file_stops_a_snapshot_that_nobody_else_knows_of(approved, starts, tmp_path):
    counter = tmp_path / "elsewhere.jsonl"
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    set_up(node, counter_file=str(counter))
    assert asked(node, starts["tiny"], 1).code == frame.REFUSED, "nobody has begun it"
    assert num_charges(node) == 0
    begun(node)
    assert asked(node, starts["tiny"], 1).code == 0
    backup = copied(node, tmp_path / "backup")
    newest = receipt_in(asked(node, starts["tiny"], 2))
    assert [each.counter for each in ReceiptLog(counter).read()] == [0, 1, 2]
    restored(node, backup, forgets=("receipts.jsonl",))
    assert refuses(node, asked(node, starts["tiny"], 2, None))
    assert newest.counter == 2


@pytest.mark.parametrize("harm", ["missing", "read-only", "of another node", "a folder"])
def test_a_counter_file_that_cannot_be_used_stops_every_charge(approved, starts, tmp_path, harm, monkeypatch):
    counter = tmp_path / "elsewhere.jsonl"
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    set_up(node, counter_file=str(counter))
    begun(node)
    if harm == "missing":
        counter.unlink()
    elif harm == "read-only":
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != counter)
    elif harm == "of another node":
        keys.make_key_pair(tmp_path / "other.key")
        (line,) = ReceiptLog(counter).read()
        counter.unlink()
        ReceiptLog(counter).add(line.signed(tmp_path / "other.key"))
    else:
        counter.unlink()
        counter.mkdir()
    answer = asked(node, starts["tiny"], 1)
    assert (answer.code, num_charges(node)) == (frame.REFUSED, 0)
    assert answer.response.reason == "refused: this node's ledger cannot be used; its log says why"


def test_no_request_makes_a_counter_file_that_is_missing(approved, starts, tmp_path):
    """A snapshot comes back before the counter's disk is mounted: only the operator's command may begin a file."""
    counter = tmp_path / "elsewhere.jsonl"
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    set_up(node, counter_file=str(counter))
    begun(node)
    asked(node, starts["tiny"], 1)
    backup = copied(node, tmp_path / "backup")
    asked(node, starts["tiny"], 2)
    restored(node, backup, forgets=("receipts.jsonl",))
    unmounted = counter.rename(tmp_path / "unmounted")
    asking = registering(run_config(rounds=9))
    assert (ask(node, asking).code, counter.exists()) == (frame.REFUSED, False)
    assert asked(node, starts["tiny"], 2).code == frame.REFUSED
    assert (num_charges(node), counter.exists()) == (1, False)
    unmounted.rename(counter)
    assert refuses(node, asked(node, starts["tiny"], 2))


def test_no_other_data_set_pays_for_the_records_that_a_running_vault_reads(node, starts):
    """Its operator names another file, registers it, and does not restart: the vault still reads the first one."""
    holder = Holder.of(node.settings)
    write_rows(node.folder / "other.csv", [(f"other {text}", label) for text, label in ROWS])
    file = node.folder / FILE
    file.write_text(file.read_text().replace("records.csv", "other.csv"))
    register_data(node, N_K, note="other people")
    refused = ask(node, training(run_config(rounds=9), starts["tiny"], round_=1), holder)
    assert (refused.code, num_charges(node)) == (frame.REFUSED, 0)
    assert "its operator must restart it" in refused.response.reason
    restart()
    assert asked(node, starts["tiny"], 1).code == 0


def test_a_ledger_that_was_made_again_has_lost_what_was_charged_to_the_data_set_before(node, starts):
    """The operator deletes it, or restores it to before a registration, and registers: a fresh id, nothing spent."""
    asked(node, starts["tiny"], 1)
    for name in LEDGER:
        (node.folder / name).unlink()
    with Ledger(node.settings.ledger) as ledger:
        ledger.register("0", N_K, 1e-5)
    assert refuses(node, asked(node, starts["tiny"], 2))


def test_a_key_that_was_exchanged_under_a_running_vault_signs_nothing(node, starts):
    holder = Holder.of(node.settings)
    asked_once = registering(run_config(rounds=9))
    assert ask(node, asked_once, holder).code == 0
    kept = node.settings.receipts.read_bytes()
    for path in (node.settings.key, keys.public_path(node.settings.key)):
        path.unlink()
    keys.make_key_pair(node.settings.key)
    refused = ask(node, training(run_config(rounds=9), starts["tiny"], round_=1), holder)
    assert (refused.code, node.settings.receipts.read_bytes()) == (frame.REFUSED, kept)
    assert num_charges(node) == 0


def unsigned(receipt: Receipt) -> str:
    return replace(receipt, counter=2**40, signature="").text()


def forged(receipt: Receipt) -> str:
    return replace(receipt, counter=2**40).text()


def by_another(receipt: Receipt, key: Path) -> str:
    keys.make_key_pair(key)
    return replace(receipt, counter=2**40).signed(key).text()


def test_nothing_but_the_nodes_own_signature_closes_it_or_charges_it(node, starts, tmp_path):
    first = receipt_in(asked(node, starts["tiny"], 1))
    second = receipt_in(asked(node, starts["tiny"], 2))
    impostor = replace(from_text(by_another(second, tmp_path / "other.key")), signer=second.signer).text()
    shown = [
        unsigned(second),
        forged(second),
        by_another(second, tmp_path / "another.key"),
        impostor,
        first.text(),
        second.text(),
        "",
    ]
    for round_, text in enumerate(shown, start=3):
        config = run_config(rounds=20)
        answer = ask(node, training(config, starts["tiny"], round_=round_, own={kinds.RECEIPT: text}))
        assert receipt_in(answer).counter == round_, text
    assert num_charges(node) == len(shown) + 2


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[" * 10**5,
        '{"counter": 1e400}',
        7,
        *slow("[]", "{}", "null", "x" * 10**5, True, "\ud800"),
    ],
)
def test_malformed_receipts_are_refused_in_one_line_and_close_nothing(node, starts, text):
    answer = asked(node, starts["tiny"], 1, text)
    assert (answer.code, num_charges(node)) == (frame.REFUSED, 0)
    assert "\n" not in answer.response.reason
    assert len(answer.response.reason) < 300
    assert asked(node, starts["tiny"], 1).code == 0


def test_neighbouring_worlds_have_the_same_links(approved, starts, tmp_path):
    """Their records differ, and one notes a change of its content that the other has not."""
    links = []
    for name, rows, later in (("one", ROWS, ROWS), ("other", [*ROWS, ("jane", LABELS[0])], ROWS[:9])):
        node = set_up(make_node(tmp_path / name, rows, num_registered=N_K, models=approved))
        answers = [asked(node, starts["tiny"], 1)]
        write_rows(node.records, later)
        restart()
        answers.append(asked(node, starts["tiny"], 2))
        links.append([replace(receipt_in(answer), signer="", signature="") for answer in answers])
    assert links[0] == links[1]
    assert [link.digest for link in links[0]] == [link.digest for link in links[1]]


class Link:
    """Flower's connection to one node, whose messages reach its vault."""

    def __init__(self, node: Node, config: RunConfig) -> None:
        self.node, self.context = node, SimpleNamespace(run_config=to_flower(config))
        self.messages: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return [7]

    def push_messages(self, messages) -> list[str]:
        for number, message in enumerate(messages, start=len(self.messages)):
            set_message_id(message, str(number))
        self.messages += messages
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids) -> list[Message]:
        asked = [message for message in self.messages if message.metadata.message_id in message_ids]
        return [message_of(self._answer(message), message) for message in asked]

    def _answer(self, message: Message) -> frame.Response:
        return answer(request_of(message, self.context), Holder.of(self.node.settings))


def statuses_of_a_run(node: Node, start, folder: Path, run: str, rounds: int) -> list[str]:
    """How each round ended for the node, under the coordinator's real registration and strategy."""
    config = run_config(rounds=rounds, node_keys=str(folder / "nodes"), ledger=str(folder / "ledger.sqlite"))
    link, statuses = Link(node, config), []
    nodes = register_nodes(link, num_expected=1, wait=30, node_keys=folder / "nodes")
    with Ledger(folder / "ledger.sqlite") as ledger:
        strategy = RuleStrategy(
            config,
            nodes,
            books=Books(config, run, [each for _, each in nodes.values()], initial=start, ledger=ledger),
            run=run,
            initial=start,
            evaluate=lambda _: None,
            on_round=lambda row, clients: statuses.extend(each.status for each in clients),
            receipts=Receipts.of(config, folder / "runs" / run, nodes),
        )
        with suppress(TooFewClientsError):
            strategy.start(link, ArrayRecord(start), num_rounds=rounds, timeout=0)
    return statuses


def test_a_coordinator_remembers_over_runs_what_a_snapshot_of_the_node_forgot(node, starts, tmp_path):
    folder = tmp_path / "federation"
    (folder / "nodes").mkdir(parents=True)
    shutil.copy(keys.public_path(node.settings.key), folder / "nodes" / "0.pub")
    with task_identity(1):
        assert statuses_of_a_run(node, starts["tiny"], folder, "first", 1) == ["ok"]
        backup = copied(node, tmp_path / "backup", names=(*LEDGER, "receipts.jsonl", "events.jsonl"))
        assert statuses_of_a_run(node, starts["tiny"], folder, "second", 2) == ["ok", "ok"]
        restored(node, backup)
        assert num_charges(node) == 1
        assert statuses_of_a_run(node, starts["tiny"], folder, "third", 2) == ["refused"]
    assert num_charges(node) == 1

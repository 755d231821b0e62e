"""An account of a Flower app whose ledger is an old copy releases nothing: what it lacks is never spent twice."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv.errors import InputError
from fedpriv.holder.flower import UpdateMod
from fedpriv.holder.wire.frame import FAILED, REFUSED, RETIRED
from fedpriv.privacy.accounting import epsilon_of
from fedpriv.privacy.ledger.receipts import ReceiptLog
from tests.cli.command_line import as_json
from tests.holder.flower.nodes import START, Node

BUDGET = 3.0
LEDGER = ("ledger.sqlite", "ledger.sqlite.head")


def make(folder: Path, **account: object) -> Node:
    folder.mkdir(exist_ok=True)

    def mods(account_of):
        return [UpdateMod(account_of, clip_norm=1.0, noise_multiplier=8.0)]

    node = Node(folder, mods, lambda received: {name: array + 1 for name, array in received.items()}, BUDGET)
    node.account = replace(node.account, **account)
    return node


def spent_until_refused(node: Node, first_round: int) -> tuple[int, int]:
    """How many releases the node makes, one after the other, and with which code it refuses the next."""
    for number in range(100):
        reply = node.ask(**{"server-round": first_round + number})
        if reply.has_error():
            return number, reply.error.code
    raise AssertionError("nothing bounds the releases")


def copied(node: Node, folder: Path, names: tuple[str, ...] = ()) -> Path:
    """A backup of files next to the ledger, or of all."""
    source = node.account.ledger.parent
    folder.mkdir()
    for file in [source / name for name in names] or source.iterdir():
        shutil.copy(file, folder)
    return folder


def restored(node: Node, backup: Path) -> None:
    for file in backup.iterdir():
        shutil.copy(file, node.account.ledger.parent)


def test_a_restored_ledger_spends_nothing_a_second_time(tmp_path):
    """Before, a budget of 3 let 13 releases pass, which cost 3.88."""
    node = make(tmp_path / "node")
    num_values = sum(array.size for array in START.values())
    event = UpdateMod(lambda context: node.account, clip_norm=1.0, noise_multiplier=8.0).event(num_values)
    assert not node.ask(**{"server-round": 1}).has_error()
    backup = copied(node, tmp_path / "backup", LEDGER)
    once, code = spent_until_refused(node, 2)
    assert (code, once > 1) == (RETIRED, True)
    restored(node, backup)
    again, code = spent_until_refused(node, 1000)
    assert (again, code) == (0, REFUSED)
    assert epsilon_of([event.with_count(1 + once + again)], 1e-5).epsilon <= BUDGET
    shown = as_json(
        *("ledger", "recover", node.account.ledger, "--from", f"{node.account.ledger}.receipts"),
        *("--key", f"{node.account.ledger}.key.pub", "--reason", "an old copy"),
    )
    assert len(shown["missing"]) == once
    assert spent_until_refused(node, 2000) == (0, RETIRED)


def test_a_ledger_that_was_made_again_has_lost_what_was_charged(tmp_path):
    node = make(tmp_path / "node")
    assert not node.ask().has_error()
    for name in LEDGER:
        (node.account.ledger.parent / name).unlink()
    assert spent_until_refused(node, 2) == (0, REFUSED)


def test_a_counter_file_stops_a_snapshot_of_the_whole_folder(tmp_path):
    node = make(tmp_path / "node", counter_file=tmp_path / "elsewhere.receipts")
    assert (node.ask().error.code, node.calls) == (FAILED, 0), "nobody has begun it"
    node.account.begin_counter_file()
    with pytest.raises(InputError, match="exists; a new one would forget"):
        node.account.begin_counter_file()
    assert not node.ask(**{"server-round": 1}).has_error()
    backup = copied(node, tmp_path / "backup")
    assert not node.ask(**{"server-round": 2}).has_error()
    assert [each.counter for each in ReceiptLog(tmp_path / "elsewhere.receipts").read()] == [0, 1, 2]
    restored(node, backup)
    assert spent_until_refused(node, 3) == (0, REFUSED)
    (tmp_path / "elsewhere.receipts").unlink()
    assert spent_until_refused(node, 3) == (0, FAILED)


def test_a_key_that_is_gone_is_not_made_again_beside_its_receipts(tmp_path):
    node = make(tmp_path / "node")
    assert not node.ask().has_error()
    Path(f"{node.account.ledger}.key").unlink()
    assert spent_until_refused(make(tmp_path / "node"), 2) == (0, FAILED)


def test_data_have_no_more_releases_than_the_operator_allows_whatever_each_costs(tmp_path):
    node = make(tmp_path / "node", budget_epsilon=None, max_releases=4)
    assert spent_until_refused(node, 1) == (4, RETIRED)

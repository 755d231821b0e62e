"""What the coordinator keeps of nodes' receipts: the newest under their registered keys, over runs, never less."""

from dataclasses import replace

import pytest

from fedpriv.config import parse
from fedpriv.errors import LedgerError
from fedpriv.holder.wire import kinds
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.receipts import Receipt, ReceiptLog, from_text
from server.round import Receipts
from tests.server.parts import nodes_of, registered

pytestmark = pytest.mark.usefixtures("as_a_task")


@pytest.fixture
def folder(node_keys):
    return node_keys.parent


def chain(folder, num: int, *, client: int = 0, run: str = "run") -> list[Receipt]:
    links = [Receipt(data_set=f"d{client}")]
    for round_ in range(1, num + 1):
        place = {"counter": round_, "previous": links[-1].digest, "run": run, "client": "0", "round": round_}
        links.append(Receipt(data_set=links[0].data_set, **place))
    return [link.signed(folder / f"key-{client}") for link in links]


def receipts(folder, *, registers: str = "", node_keys: bool = True) -> Receipts:
    config = parse({"node_keys": str(folder / "nodes") if node_keys else "", "ledger": str(folder / "ledger.sqlite")})
    one, other = registered({0: 40, 1: 40})
    nodes = nodes_of([replace(one, receipt=registers), other])
    return Receipts.of(config, folder / "runs" / "first", nodes)


def test_the_newest_is_shown_to_its_node_in_this_run_and_the_next(folder):
    first = receipts(folder)
    assert first.shown_to(0) == {}, "its node has sent none"
    links = chain(folder, 3)
    for link in (links[1], links[3], links[2]):
        first.take(0, link.text())
    assert from_text(first.shown_to(0)[kinds.RECEIPT]) == links[3]
    assert first.shown_to(1) == {}
    again = receipts(folder, registers=links[2].text())
    assert from_text(again.shown_to(0)[kinds.RECEIPT]) == links[3], "a node that was restored registers with less"
    assert list(ReceiptLog(folder / "ledger.sqlite.receipts").read()) == [links[1], links[3]]


def test_a_registration_brings_the_first(folder):
    (begin,) = chain(folder, 0)
    assert from_text(receipts(folder, registers=begin.text()).shown_to(0)[kinds.RECEIPT]) == begin


def test_what_a_key_signed_that_was_exchanged_is_shown_until_the_new_one_has_signed_as_much(folder):
    """A ledger that is restored while its key is exchanged is noticed: the new key signs its older state."""
    before = chain(folder, 3)
    receipts(folder).take(0, before[3].text())
    old = (folder / "nodes" / "0.pub").read_text()
    (folder / "key-0").rename(folder / "old"), (folder / "key-0.pub").unlink()
    keys.make_key_pair(folder / "key-0")
    (folder / "nodes" / "0.pub").write_text(keys.public_line(folder / "key-0"))
    (folder / "nodes" / "0.earlier").write_text(old)
    after = chain(folder, 4)
    restored = receipts(folder, registers=after[2].text())
    assert from_text(restored.shown_to(0)[kinds.RECEIPT]) == before[3]
    whole = receipts(folder, registers=after[3].text())
    assert from_text(whole.shown_to(0)[kinds.RECEIPT]) == after[3]
    whole.take(0, replace(after[4]).signed(folder / "old").text())
    assert from_text(whole.shown_to(0)[kinds.RECEIPT]) == after[3], "the old key signs nothing new"
    assert from_text(receipts(folder).shown_to(0)[kinds.RECEIPT]) == after[3]


def test_only_what_the_nodes_registered_key_signed_of_its_data_set_is_kept(folder, caplog):
    kept, own, other = receipts(folder), chain(folder, 2), chain(folder, 9, client=1)
    kept.take(0, own[1].text())
    foreign = replace(own[2], counter=9, data_set="d1").signed(folder / "key-0")
    for link in (
        replace(own[2], counter=9),
        replace(own[2], counter=9, signature=""),
        replace(own[2], counter=9).signed(folder / "key-1"),
        replace(replace(own[2], counter=9).signed(folder / "key-1"), signer=own[2].signer),
        other[9],
        foreign,
    ):
        kept.take(0, link.text())
        assert from_text(kept.shown_to(0)[kinds.RECEIPT]) == own[1]
    assert caplog.text.count("is not kept") == 6
    kept.take(0, "")


def test_of_two_charges_with_one_number_the_first_is_kept(folder, caplog):
    kept, one, other = receipts(folder), chain(folder, 2), chain(folder, 2, run="after the restore")
    kept.take(0, one[2].text())
    kept.take(0, other[2].text())
    assert from_text(kept.shown_to(0)[kinds.RECEIPT]) == one[2]
    assert "signed two different charges as number 2" in caplog.text


def test_without_registered_keys_nothing_is_kept_and_a_log_that_cannot_be_written_is_named(folder):
    kept = receipts(folder, node_keys=False)
    kept.take(0, chain(folder, 1)[1].text())
    assert kept.shown_to(0) == {}
    assert not (folder / "ledger.sqlite.receipts").exists()
    kept = receipts(folder)
    (folder / "ledger.sqlite.receipts").mkdir()
    with pytest.raises(LedgerError, match=r"ledger\.sqlite\.receipts: .*; the receipts of nodes cannot be kept"):
        kept.take(0, chain(folder, 1)[1].text())

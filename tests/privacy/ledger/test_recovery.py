"""A restored ledger is charged what receipts prove and others claim, never less than was spent, and once."""

import errno
import json
import math
import os
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv.errors import InputError, LedgerError
from fedpriv.files import Journal
from fedpriv.holder.vault._charging import NodePolicy, RefusedError, RetiredError, charge
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger import head_file, keys
from fedpriv.privacy.ledger.entries import Charge, Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import Receipt, ReceiptLog, chain_of, from_text
from tests.cli.command_line import as_json, fedpriv
from tests.privacy.ledger.test_head import version
from tests.privacy.ledger.test_ledger import checked, edited

DELTA = 1e-5


def event(round_: int) -> SubsampledGaussian:
    """Rounds cost different amounts, so that no count stands for them."""
    return SubsampledGaussian(noise_multiplier=4.0 + round_ / 10, sampling_probability=0.1)


def epsilon(*rounds: int) -> float:
    return epsilon_of([event(round_) for round_ in rounds], DELTA).epsilon


class Node:
    """A node's ledger, and all that keeps its receipts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "ledger.sqlite"
        self.receipts, self.events = folder / "receipts.jsonl", folder / "events.jsonl"
        if not folder.exists():
            folder.mkdir()
            keys.make_key_pair(folder / "vault.key")
        with Ledger(self.path) as ledger:
            self.data_set = ledger.data_set() or ledger.register("0", 100, DELTA)

    @property
    def watch(self) -> ReceiptWatch:
        return ReceiptWatch(self.folder / "vault.key", self.receipts, self.folder / "receipts-of-peers.jsonl")

    @property
    def policy(self) -> NodePolicy:
        return NodePolicy(ledger=self.path, budget_epsilon=100.0, watch=self.watch)

    def charge(self, *rounds: int, shown: str = "") -> Receipt:
        """Charge these rounds as the guard does; the receipt of the last one."""
        for round_ in rounds:
            key = Key(run="run", client="0", round=round_, request=f"request {round_}")
            release = Release(event=event(round_), rho_bar=1.0)
            charge(self.policy, key, release, self.data_set, noise_source="secure", shown=shown)
            newest = self.newest
            Journal(self.events, client=0).write("charged", round=round_, receipt=newest.text())
        return newest

    @property
    def newest(self) -> Receipt:
        with Ledger(self.path) as ledger:
            return self.watch.sign(ledger.chain(self.data_set.id))

    @property
    def files(self) -> list[Path]:
        return [self.path, head_file.head_path(self.path), self.receipts, self.events]

    def backup(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.files if path.exists()}

    def restore(self, backup: dict[Path, bytes], to: Path) -> None:
        """Put back the files as they were; what they were until now is moved away."""
        to.mkdir()
        for path in self.files:
            path.rename(to / path.name)
        for path, content in backup.items():
            path.write_bytes(content)

    @property
    def epsilon(self) -> float:
        with Ledger(self.path) as ledger:
            spent = [release.seen_by("local") for release in ledger.releases(self.data_set.id)]
        return epsilon_of(spent, DELTA).epsilon

    @property
    def shown_epsilon(self) -> float:
        (row,) = as_json("ledger", "show", self.path)["data_sets"]
        return float(row["epsilon_local"])

    def recover(self, *sources: Path, reason: str | None = "the disk died") -> dict:
        given = [part for source in sources for part in ("--from", source)]
        return as_json("ledger", "recover", self.path, *given, *(["--reason", reason] if reason else []))

    def refuses(self, source: Path, message: str, code: int = 2) -> None:
        """To recover from this source, in one line, and nothing is charged."""
        _, err = fedpriv("ledger", "recover", self.path, "--from", source, "--reason", "x", code=code)
        assert message in err
        assert err.count("\n") == 1
        assert self.epsilon == epsilon(1)


@pytest.fixture
def node(tmp_path) -> Node:
    return Node(tmp_path / "node")


@pytest.fixture(scope="module")
def lost(tmp_path_factory) -> tuple[Path, Receipt]:
    """A folder with a node that was restored after its third charge to the first, and `kept`, what was lost."""
    folder = tmp_path_factory.mktemp("restored")
    made = Node(folder / "node")
    made.charge(1)
    backup, newest = made.backup(), made.charge(2, 3)
    made.restore(backup, folder / "kept")
    assert made.epsilon == epsilon(1) < epsilon(1, 2, 3)
    return folder, newest


@pytest.fixture
def restored(lost, tmp_path) -> Node:
    shutil.copytree(lost[0], tmp_path, dirs_exist_ok=True)
    made = Node(tmp_path / "node")
    made.lost = lost[1]
    return made


@pytest.mark.parametrize("source", ["receipts.jsonl", "events.jsonl"])
def test_what_was_lost_is_charged_with_its_events(restored, tmp_path, source):
    with pytest.raises(RefusedError, match="its operator must recover it"):
        restored.charge(4, shown=restored.lost.text())
    found = restored.recover(tmp_path / "kept" / source)
    missing = [(each["round"], events.from_json(each["event"])) for each in found["missing"]]
    assert missing == [(2, event(2)), (3, event(3))]
    assert restored.newest.digest == restored.lost.digest, "the chain goes on where it was lost"
    restored.charge(4, shown=restored.lost.text())
    assert restored.epsilon == epsilon(1, 2, 3, 4)


def test_a_recovered_charge_of_a_sum_keeps_the_other_holders_of_a_person(node, tmp_path):
    backup = node.backup()
    of_person, others = replace(event(1), unit="person"), ((1.5, 0.1),)
    release = Release(event=of_person, rho_bar=0.5, aggregate_scale=2.0, other_holders=others)
    key = Key(run="run", client="0", round=1, request="request 1")
    charge(node.policy, key, release, node.data_set, noise_source="secure", shown="")
    Journal(node.events, client=0).write("charged", round=1, receipt=node.newest.text())
    node.restore(backup, tmp_path / "kept")
    node.recover(tmp_path / "kept" / "receipts.jsonl")
    with Ledger(node.path) as ledger:
        (found,) = ledger.releases_in_order(node.data_set.id)
    assert found.seen_by("aggregate") == release.seen_by("aggregate")


def test_a_receipt_without_other_holders_is_what_it_was_and_a_malformed_one_is_refused(node):
    receipt = node.charge(1)
    assert b"other_holders" not in receipt.statement
    assert "other_holders" not in receipt.text()
    bad = {**json.loads(receipt.text()), "other_holders": [[1.5, 2.0]]}
    with pytest.raises(ValueError, match="other_holders: must be at most 7 pairs"):
        from_text(json.dumps(bad))


def test_looking_charges_nothing_and_recovering_twice_charges_once(restored, tmp_path):
    kept = tmp_path / "kept" / "receipts.jsonl"
    before = restored.path.read_bytes()
    looked = restored.recover(kept, reason=None)
    assert (len(looked["missing"]), looked["charged"], restored.path.read_bytes()) == (2, False, before)
    restored.recover(kept)
    last = checked(restored.path)
    again = restored.recover(kept, tmp_path / "kept" / "events.jsonl", tmp_path / "kept" / "ledger.sqlite")
    assert again["missing"] == again["retired"] == []
    assert checked(restored.path) == last


def test_both_branches_of_a_fork_are_paid_for(restored, tmp_path):
    """The node went on before anybody told it, in one round with the same request."""
    restored.charge(3, 5)
    with pytest.raises(RefusedError, match="its operator must recover it"):
        restored.charge(6, shown=restored.lost.text())
    restored.recover(tmp_path / "kept" / "receipts.jsonl")
    assert restored.epsilon == epsilon(1, 2, 3, 3, 5)
    newest = restored.charge(6, shown=restored.lost.text())
    assert newest.counter == 6 > restored.lost.counter


def coordinator(path: Path, data_set: str, *charges: tuple[int, SubsampledGaussian]) -> Path:
    """The ledger of a coordinator, whose requests have other digests, and other weights."""
    with Ledger(path) as ledger:
        ledger.register("0", 100, DELTA, data_set=data_set)
        for number, (round_, paid) in enumerate(charges):
            key = Key(run="run", client="0", round=round_, request=f"seen from here {number}")
            release = Release(event=paid, rho_bar=0.5)
            ledger.charge([Charge(key=key, data_set=data_set, release=release, noise_source="secure")])
    return path


# Nobody has signed a copy of the ledger, so by itself it proves nothing. But its links are those that a signature is
# about, so it fills the gap that a receipt proves. `newest` is all that a coordinator has, `claims` is its ledger.
@pytest.mark.parametrize(
    ("sources", "known"),
    [
        (["kept/ledger.sqlite"], [(2, "claim"), (3, "claim")]),
        (["newest", "kept/ledger.sqlite"], [(2, "receipt"), (3, "receipt")]),
        (["kept/receipts.jsonl", "claims"], [(2, "receipt"), (3, "receipt"), (4, "claim")]),
    ],
    ids=str,
)
def test_what_each_source_proves_or_claims_is_charged_once(restored, tmp_path, sources, known):
    ReceiptLog(tmp_path / "newest").add(restored.lost)
    coordinator(tmp_path / "claims", restored.data_set.id, *[(round_, event(round_)) for round_ in (1, 2, 3, 4)])
    found = restored.recover(*(tmp_path / source for source in sources))
    assert [(each["round"], each["known_by"]) for each in found["missing"]] == known
    assert found["retired"] == []
    assert restored.epsilon == epsilon(1, *(round_ for round_, _ in known))
    assert restored.recover(tmp_path / sources[-1])["missing"] == []
    restored.charge(5)


@pytest.mark.parametrize("claims", [False, True])
def test_more_than_anyone_knows_retires_the_data_set(restored, tmp_path, claims):
    """The newest receipt proves that there was one before, for which no claim of next to no cost stands."""
    ReceiptLog(tmp_path / "newest").add(restored.lost)
    cheap = SubsampledGaussian(noise_multiplier=1e6, sampling_probability=0.1)
    ledger = coordinator(tmp_path / "claims", restored.data_set.id, (2, cheap), (3, cheap))
    found = restored.recover(tmp_path / "newest", *[ledger] * claims)
    assert found["retired"] == [restored.data_set.id]
    assert restored.shown_epsilon == math.inf
    with pytest.raises(RetiredError, match="not known in full"):
        restored.charge(4, shown=restored.lost.text())
    assert restored.recover(tmp_path / "newest")["missing"] == []
    text = " ".join(fedpriv("ledger", "statement", restored.path, "--client", 0)[0].split())
    assert "epsilon inf" in text
    assert "NOT KNOWN IN FULL" in text


def test_receipts_that_the_node_has_not_signed_change_nothing(restored, tmp_path):
    keys.make_key_pair(tmp_path / "other.key")
    lost, log = restored.lost, ReceiptLog(tmp_path / "forged")
    signed = replace(lost, counter=99).signed(tmp_path / "other.key")
    for forged in (replace(lost, counter=99), replace(lost, signature=""), signed, replace(signed, signer=lost.signer)):
        log.add(forged)
    assert restored.recover(log.path)["missing"] == []
    assert restored.epsilon == epsilon(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "holds no receipt, and is no ledger"),
        (b"\xff\x00nothing", "holds no receipt, and is no ledger"),
        (b"SQLite format 3\0 but broken", "damaged"),
    ],
)
def test_a_source_that_is_none_is_named_in_one_line(restored, tmp_path, content, message):
    source = tmp_path / "source"
    if content is not None:
        source.write_bytes(content)
    restored.refuses(source, message, code=1 if message == "damaged" else 2)


def test_a_claim_of_another_unit_is_refused_before_anything_is_charged(restored, tmp_path):
    other = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=1.0, unit="client")
    restored.refuses(coordinator(tmp_path / "coordinator.sqlite", restored.data_set.id, (2, other)), "do not compose")


def test_without_the_nodes_public_key_nothing_can_be_proven(restored, tmp_path):
    (restored.folder / "vault.key.pub").unlink()
    restored.refuses(tmp_path / "kept" / "receipts.jsonl", "vault.key.pub")


def test_a_recovered_ledger_says_so_and_older_readers_refuse_it(restored, tmp_path):
    with sqlite3.connect(restored.path) as db:
        db.execute("PRAGMA user_version = 1")
    restored.recover(tmp_path / "kept" / "receipts.jsonl", reason="snapshot of 3 May")
    assert version(restored.path) == 3
    for command in ("show", "verify"):
        said = " ".join(fedpriv("ledger", command, restored.path)[0].split())
        assert "2 releases that a restored copy of this ledger lacked were charged again: snapshot of 3 May" in said
    text = fedpriv("ledger", "statement", restored.path, "--client", 0)[0]
    assert "RECOVERED on" in text
    assert "2 releases that a restored copy" in " ".join(text.split())
    # An adoption later on does not let older readers in again.
    head_file.head_path(restored.path).unlink()
    Ledger(restored.path, adopting="new disk").close()
    assert version(restored.path) == 3
    checked(restored.path)
    edited(restored.path, "UPDATE entries SET event = NULL WHERE phase = 'recovered'")
    assert "was changed after it was written" in fedpriv("ledger", "verify", restored.path, code=1)[1]


def test_a_ledger_of_an_earlier_version_opens_and_begins_its_chain_with_what_it_has(node):
    """It has charges without receipts; the next one's receipt vouches for all of them."""
    node.charge(1, 2)
    node.receipts.unlink()
    assert node.charge(3).counter == 3


def test_a_receipt_is_written_whole_or_the_charge_releases_nothing(node, monkeypatch):
    """A disk that is nearly full takes a part of a line, and only then says that it is full."""
    room, write = 100, os.write
    with reading(node.path) as db:
        chain = chain_of(db, node.data_set.id)

    def nearly_full(file: int, content: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= (written := write(file, content[:room]))
        return written

    with monkeypatch.context() as patched:
        patched.setattr("fedpriv.privacy.ledger.receipts.os.write", nearly_full)
        with pytest.raises(LedgerError, match="nothing is released without its receipt"):
            node.watch.sign(chain)
    assert list(ReceiptLog(node.receipts).read()) == []
    receipt = node.watch.sign(chain)
    assert list(ReceiptLog(node.receipts).read()) == [receipt], "with room again, the same charge gets its receipt"


def test_the_folder_of_a_new_log_is_on_disk_too(node, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr("os.fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    for _ in range(2):
        ReceiptLog(node.folder / "new").add(Receipt(data_set="0"))
    folder, file = node.folder.stat().st_ino, (node.folder / "new").stat().st_ino
    # Threads of other tests may write files of their own meanwhile.
    assert [inode for inode in synced if inode in (folder, file)] == [file, folder, file]


def test_a_crash_while_the_counter_file_begins_leaves_none(node, monkeypatch):
    watch = replace(node.watch, counter_file=node.folder / "counter")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            watch.begin_counter_file(node.path)
    assert not watch.counter_file.exists()
    watch.begin_counter_file(node.path)
    assert [each.counter for each in ReceiptLog(watch.counter_file).read()] == [0]
    with pytest.raises(InputError, match="a new one would forget what it has counted"):
        watch.begin_counter_file(node.path)


@pytest.mark.parametrize("detailed", [True, False])
def test_charges_of_a_data_set_that_the_ledger_lost_go_to_the_one_that_is_registered_now(node, tmp_path, detailed):
    """Their records may be the same; a receipt without the detail of those before it retires it."""
    last = node.charge(1, 2)
    if not detailed:
        node.receipts.unlink()
        ReceiptLog(node.receipts).add(last)
    for path in (node.path, head_file.head_path(node.path)):
        path.unlink()
    Ledger(node.path).close()
    assert "register the records first" in fedpriv("ledger", "recover", node.path, "--from", node.receipts, code=2)[1]
    with Ledger(node.path) as ledger:
        node.data_set = ledger.register("0", 100, DELTA)
    with pytest.raises(RefusedError, match="its operator must recover it"):
        node.charge(3)
    found = node.recover(node.receipts)
    assert found["retired"] == ([] if detailed else [node.data_set.id])
    assert node.shown_epsilon == (epsilon(1, 2) if detailed else math.inf)
    assert node.recover(node.receipts)["missing"] == []
    if detailed:
        node.charge(3)
        assert node.epsilon == epsilon(1, 2, 3)

"""A ledger keeps every charge, gives each upload once, and refuses to go on when anything is wrong with its file."""

import json
import math
import os
import resource
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedpriv.errors import LedgerError
from fedpriv.holder.vault import settings
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger import head_file, reader
from fedpriv.privacy.ledger.entries import Charge, DataSet, Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import names_in, reading, verify_with_head
from fedpriv.runs import files
from fedpriv.texts import holder_label
from tests.cli.command_line import as_json, fedpriv

EVENT = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.1, count=3)
SETS = [DataSet(id=f"d{k}", client=str(k), num_records=9, delta=1e-5) for k in range(2)]


def charge_for(data_set: str, round_: int = 1, *, run: str = "r", client: str = "0", rho_bar: float = 0.5) -> Charge:
    key = Key(run=run, client=client, round=round_, request="abc")
    return Charge(key=key, data_set=data_set, release=Release(event=EVENT, rho_bar=rho_bar), noise_source="secure")


def in_another_process(act: Callable[[], object]) -> str:
    """What an act returns, or the error that it raises, in a process that ends at once, as if it were killed."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            told = str(act())
        except BaseException as error:
            told = repr(error)
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    os.waitpid(child, 0)
    return told


def as_nobody(act: Callable[[], object], folder: Path) -> str:
    """The same without root's rights, with which any file can be written; the folder is made readable."""
    for each in [folder, *folder.parents][:4]:
        each.chmod(each.stat().st_mode | 0o055)

    def drop_and_act() -> object:
        os.setgid(65534)
        os.setuid(65534)
        return act()

    return in_another_process(drop_and_act)


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give up root's rights")


def checked(path: Path) -> tuple[int, str]:
    """Number and digest of the last entry, by one who reads the ledger and its head."""
    with reading(path) as db:
        found = verify_with_head(db, path)
    return found.number, found.digest


def assert_refused(path: Path, message: str) -> None:
    """To the next writer, and to a reader."""
    for read in (Ledger, checked):
        with pytest.raises(LedgerError, match=message):
            read(path)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def filled(path) -> Path:
    """A ledger with a data set and five rounds, each charged and released."""
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5)
        for round_ in range(1, 6):
            charge = charge_for(data_set.id, round_)
            ledger.charge([charge])
            ledger.store(charge.key, f"reply {round_}".encode())
    return path


def test_spending_accumulates_over_runs_and_openings(path):
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5)
        ledger.charge([charge_for(data_set.id, run="first")])
    with Ledger(path) as ledger:
        assert ledger.data_set() == data_set
        ledger.charge([charge_for(data_set.id, run="second")])
        assert [release.event for release in ledger.releases(data_set.id)] == [EVENT.with_count(6)]
        assert [(run.run, run.rounds) for run in ledger.runs(data_set.id)] == [("first", 1), ("second", 1)]
        ledger.charge([charge_for(data_set.id, 2, run="")])
        assert [release.event for release in ledger.releases(data_set.id)] == [EVENT.with_count(9)]
        assert [each.event for each in ledger.releases(data_set.id, excluding_run="first")] == [EVENT.with_count(6)]


def test_a_charge_counts_as_charged_until_its_round_ended_and_then_as_it_happened(path):
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5).id
        charges = [charge_for(data_set, round_, rho_bar=0.3) for round_ in (1, 2)]
        ledger.charge(charges)
        happened = replace(charges[0], release=Release(event=EVENT, rho_bar=0.8))
        ledger.release([(happened, "digest")])
        assert sorted(release.rho_bar for release in ledger.releases(data_set)) == [0.3, 0.8]


def test_the_first_stored_reply_is_the_only_one(filled):
    with Ledger(filled) as ledger:
        key = charge_for("", 5).key
        assert ledger.store(key, b"computed again") == b"reply 5"
        assert ledger.stored(key) == b"reply 5"
        assert ledger.stored(charge_for("", 4).key) is None, "replies of earlier rounds are dropped"
        assert ledger.phase(charge_for("", 4).key) == "released"


def test_only_what_is_registered_is_charged_and_it_is_registered_once(path):
    with Ledger(path) as ledger:
        ledger.register_all(SETS)
        entries, new = list(ledger.entries()), replace(SETS[0], id="d7")
        with pytest.raises(LedgerError, match="data set nobody's is not registered here; register it before"):
            ledger.charge([charge_for("d0", 7), charge_for("nobody's")])
        with pytest.raises(LedgerError, match="never charged"):
            ledger.store(charge_for("d0").key, b"reply")
        for begin in (lambda: ledger.register("0", 9, 1e-5, data_set="d0"), lambda: ledger.register_all([new, new])):
            with pytest.raises(LedgerError, match=r"data set \w+ is registered already, and keeps what it has spent"):
                begin()
        assert list(ledger.entries()) == entries


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_a_new_ledger_is_for_its_owner_alone_whatever_the_umask(path, umask):
    before = os.umask(umask)
    try:
        with Ledger(path) as ledger:
            ledger.register_all(SETS)
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert len(modes) > 2
    assert set(modes.values()) == {0o600}


def test_one_key_is_charged_once_and_a_failed_batch_charges_nobody(path):
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5).id
        ledger.charge([charge_for(data_set, 1)])
        with pytest.raises(LedgerError, match="before"):
            ledger.charge([charge_for(data_set, 2), charge_for(data_set, 1)])
        assert ledger.phase(charge_for(data_set, 2).key) is None
        ledger.charge([charge_for(data_set, 2)])
    assert checked(path)[0] == 3


def key_with(**changed: object) -> Key:
    return replace(charge_for("").key, **{"round": 6, **changed})


@pytest.mark.parametrize(
    ("changed", "stored"),
    [
        ({"run": 7}, ("7", "0", 6)),  # Flower's run_id
        ({"client": 0}, ("r", "0", 6)),  # its partition-id
        ({"round": 6.0}, ("r", "0", 6)),
        ({"round": np.int64(6), "client": np.str_("0")}, ("r", "0", 6)),
        ({"run": "a\0b"}, ("a\0b", "0", 6)),
    ],
)
def test_what_sqlite_would_change_is_changed_before_it_is_hashed(filled, changed, stored):
    key = key_with(**changed)
    with Ledger(filled) as ledger:
        ledger.charge([replace(charge_for(ledger.data_set().id), key=key)])
        assert ledger.phase(key) == "charged"
        ledger.store(key, b"reply")
    with Ledger(filled) as ledger:
        assert ledger.stored(key) == b"reply"
        entry = list(ledger.entries())[-1]
        assert (entry.run, entry.client, entry.round) == stored
        assert ledger.register(1, 80.0, np.float64(1e-5)) == ledger.data_set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("client", value) for value in (True, 1.5, b"0", "\ud800")],
        *[("round", value) for value in (True, 6.5, -1, 10**15, "6")],
        *[("num_records", value) for value in (0, -5, 80.5, True, math.nan)],
        *[("delta", value) for value in (0, 1, math.nan, "1e-5", True)],
    ],
)
def test_what_a_column_cannot_hold_is_refused_by_name_and_value(filled, name, value):
    with Ledger(filled) as ledger:
        before = ledger.last
        charge = replace(charge_for("d"), key=key_with(**{name: value} if name == "round" else {}))
        fields = {"client": "1", "num_records": 80, "delta": 1e-5} | ({name: value} if name != "round" else {})
        act = partial(ledger.charge, [charge]) if name == "round" else partial(ledger.register, **fields)
        with pytest.raises(LedgerError, match=f"^{name} = .*: must be .*; nothing is written$"):
            act()
        assert ledger.last == before
    assert checked(filled) == before


def test_an_entry_that_is_stored_otherwise_than_hashed_is_never_committed(filled, monkeypatch):
    """A type that nobody thought of must not end a ledger that has a history."""
    monkeypatch.setattr("fedpriv.privacy.ledger.ledger.as_stored", lambda line: line)
    with Ledger(filled) as ledger, pytest.raises(LedgerError, match="another entry than was hashed"):
        ledger.register("1", "80", 1e-5)
    assert checked(filled)[0] == 11


def test_entries_cannot_be_changed_through_sql(filled):
    db = sqlite3.connect(filled)
    for statement in ("UPDATE entries SET rho_bar = 1", "DELETE FROM entries"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute(statement)
    db.close()


def edited(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for statement in ("DROP TRIGGER no_update", "DROP TRIGGER no_delete", *statements):
        db.execute(statement)
    db.commit()
    db.close()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE entries SET event = replace(event, '1.5', '9.5') WHERE number = 4", "entry 4 was changed"),
        ("UPDATE entries SET time = 'yesterday' WHERE number = 1", "entry 1 was changed"),
        ("UPDATE entries SET digest = '00' WHERE number = 11", "entry 11 was changed"),
        ("DELETE FROM entries WHERE number = 6", "entry 6 is missing"),
        ("DELETE FROM entries WHERE number > 8", "ends at entry 8"),
        ("DELETE FROM entries", "ends at entry 0"),
        ("UPDATE entries SET number = 99 WHERE number = 11", "entry 11 is missing"),
        ("PRAGMA user_version = 7", "version 7"),  # as another fedpriv writes it
    ],
)
def test_an_entry_edited_by_hand_is_named_and_nothing_is_charged_on_top(filled, statement, message):
    edited(filled, statement)
    assert_refused(filled, message)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95, None])
def test_a_truncated_file_and_what_is_no_ledger_is_refused(filled, share):
    if share is None:
        filled.write_bytes(b"not a database, but long enough to look at" * 100)
    else:
        os.truncate(filled, int(filled.stat().st_size * share))
    with pytest.raises(LedgerError, match=r"damaged|broken chain"):
        Ledger(filled)


def killed_writer(path: Path) -> None:
    """A ledger of two entries that are in its log alone, since its process was killed."""
    in_another_process(lambda: charge_and_die(path))


def charge_and_die(path: Path) -> None:
    ledger = Ledger(path)
    ledger.charge([charge_for(ledger.register("0", 100, 1e-5).id)])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_truncated_log_is_refused(path):
    """Entries that are still in the write-ahead log are lost with it, and the head has seen them."""
    killed_writer(path)
    log = path.with_name(path.name + "-wal")
    os.truncate(log, log.stat().st_size * 2 // 3)
    with pytest.raises(LedgerError, match="has seen entry 2"):
        Ledger(path)


@pytest.mark.parametrize("of", ["another process", "another thread"])
def test_a_second_writer_is_told_that_there_is_one(filled, monkeypatch, of):
    monkeypatch.setattr(head_file, "_LOCK_SECONDS", 0.1)

    def in_a_thread(act: Callable[[], object]) -> str:
        with ThreadPoolExecutor() as pool:
            return repr(pool.submit(act).exception())

    run = in_another_process if of == "another process" else in_a_thread
    with Ledger(filled):
        assert "another process is writing it" in run(lambda: Ledger(filled))
    Ledger(filled).close()


def test_reading_goes_on_beside_the_writer(filled):
    with Ledger(filled) as ledger, reading(filled) as db:
        ledger.charge([charge_for(ledger.data_set().id, 6)])
        assert verify_with_head(db, filled).number == 12
    with pytest.raises(LedgerError, match="no such ledger"), reading(filled.with_name("none.sqlite")):
        pass
    assert not filled.with_name("none.sqlite").exists(), "a missing ledger is no empty one"


def test_a_writer_that_ends_is_waited_for(filled):
    """Or a vault refused a round, perhaps after its charge, whenever its operator's command wrote at that moment."""
    opened = threading.Event()

    def write() -> None:
        with Ledger(filled):
            opened.set()
            time.sleep(0.3)

    thread = threading.Thread(target=write)
    thread.start()
    assert opened.wait(10)
    with Ledger(filled) as second:
        second.charge([charge_for(second.data_set().id, 6)])
    thread.join()


@NEEDS_ROOT
def test_a_read_only_file_is_refused_when_it_is_opened(filled):
    for file in (filled, filled.with_name(filled.name + ".head")):
        file.chmod(0o444)
    assert "cannot be written (read-only?)" in as_nobody(lambda: Ledger(filled), filled.parent)


def test_a_full_disk_charges_nobody_and_the_ledger_goes_on_when_there_is_room(filled):
    """The limit on a file's size stands for the disk's: the same write fails in the same place."""

    def fill() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Ledger(filled) as ledger:
            data_set, done = ledger.data_set().id, 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            try:
                for round_ in range(6, 100):
                    ledger.charge([charge_for(data_set, round_)])
                    done = round_
            except LedgerError as error:
                return f"{done} {error}"
        return "0 no disk is ever full"

    done, _, message = in_another_process(fill).partition(" ")
    assert "the disk is full or fails" in message
    with Ledger(filled) as ledger:
        assert ledger.phase(charge_for("", int(done)).key) == "charged"
        assert ledger.phase(charge_for("", int(done) + 1).key) is None
        ledger.charge([charge_for(ledger.data_set().id, int(done) + 1)])


def test_a_changed_content_is_logged_and_resets_nothing(filled):
    with Ledger(filled) as ledger:
        data_set = ledger.data_set()
        before = ledger.releases(data_set.id)
        assert not ledger.log_content(data_set, b"records"), "the first content is no change"
        assert not ledger.log_content(data_set, b"records")
        assert ledger.log_content(data_set, b"records less one")
        assert ledger.releases(data_set.id) == before
        assert ledger.data_set() == data_set


def test_content_hashes_of_two_ledgers_tell_nobody_that_the_records_are_equal(tmp_path):
    notes = []
    for name in ("a", "b"):
        with Ledger(tmp_path / name) as ledger:
            ledger.log_content(ledger.register("0", 100, 1e-5, data_set="same"), b"records")
        with reading(tmp_path / name) as db:
            notes.append(db.execute("SELECT note FROM entries WHERE phase = 'changed'").fetchone()[0])
    assert notes[0] != notes[1]


def test_a_copy_without_the_log_is_named_and_a_backup_beside_the_writer_is_whole(path, tmp_path):
    killed_writer(path)
    (tmp_path / "two").mkdir()
    for name in (path.name, f"{path.name}.head"):
        shutil.copy(path.with_name(name), tmp_path / "two")
    copied = tmp_path / "two" / path.name
    assert_refused(copied, r"has seen entry 2.*ledger\.sqlite-wal.*`fedpriv ledger backup`")
    with Ledger(path) as ledger:  # which is open, as in a run
        ledger.charge([charge_for(ledger.data_set().id, 2)])
        values = as_json("ledger", "backup", path, "--out", tmp_path / "backup.sqlite")
        assert (values["entries"], values["head"]) == ledger.last
        assert as_json("ledger", "verify", tmp_path / "backup.sqlite")["head"] == ledger.head
        assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("backup.sqlite", "backup.sqlite.head")} == {0o600}
        assert "name a new file" in fedpriv("ledger", "backup", path, "--out", path, code=2)[1]
        # After a round the file has all by itself.
        ledger.release([(charge_for(ledger.data_set().id, 2), None)])
        for name in (path.name, f"{path.name}.head"):
            shutil.copy(path.with_name(name), tmp_path / "two")
        assert checked(copied) == ledger.last


@NEEDS_ROOT
def test_a_whole_ledger_on_a_read_only_medium_is_read_with_its_log(path):
    killed_writer(path)
    path.with_name(f"{path.name}-shm").unlink()
    for file in path.parent.iterdir():
        file.chmod(0o444)
    assert as_nobody(lambda: checked(path)[0], path.parent) == "2"


def registered(folder, **names: object) -> None:
    content = {str(k): {"client": k, "data_set": id_, "name": name} for k, (id_, name) in enumerate(names.items())}
    (folder / "registrations.json").write_text(json.dumps(content))


def test_a_run_names_its_data_sets_and_a_node_itself_alone(tmp_path):
    (tmp_path / "vault.toml").write_text('partition_id = 1\nname = "Northgate"\n')
    assert names_in(tmp_path, SETS) == {"d1": "Northgate"}
    registered(tmp_path, d1="Northgate", d0="St. Anna", other="Mallory")
    assert names_in(tmp_path, SETS) == {"d0": "St. Anna", "d1": "Northgate"}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"0": 3}', '{"0": {"data_set": ["d0"]}}', "[" * 100_000])
def test_a_file_that_is_damaged_names_nobody_and_hides_no_spending(tmp_path, content):
    (tmp_path / "registrations.json").write_text(content)
    (tmp_path / "vault.toml").write_bytes(b"\xff")
    assert names_in(tmp_path, SETS) == {}


def test_a_name_is_bounded_and_controls_no_terminal(tmp_path):
    registered(tmp_path, d0="x" * 10_000, d1=7)
    assert names_in(tmp_path, SETS) == {"d0": "x" * 100}
    assert holder_label("0", "St.\x1b[2J\nAnna") == "St.\ufffd[2J\ufffdAnna (0)"
    assert {holder_label(3, name) for name in (None, "", "client 3", "client-3")} == {"client 3"}


def test_the_files_are_those_that_runs_and_nodes_write():
    assert (reader.REGISTRATIONS, reader.NODE) == (files.REGISTRATIONS, settings.FILE)

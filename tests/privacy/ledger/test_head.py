"""The head of a ledger: a loss at the end of the chain is noticed, and a crash at any instant locks nobody out."""

import json
import multiprocessing
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from clients.deploy.doctor import check_ledger
from fedpriv.errors import LedgerError
from fedpriv.privacy.ledger.head_file import EMPTY_CHAIN, head_path
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading, verify_with_head
from tests.marks import slow
from tests.privacy.ledger.test_ledger import assert_refused, charge_for, checked, edited


@pytest.fixture
def filled(tmp_path) -> Path:
    """A ledger with a registration and three charges."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5)
        ledger.charge([charge_for(data_set.id, round_) for round_ in (1, 2, 3)])
    return path


@pytest.mark.parametrize("remaining", [4, 2, 0])
@pytest.mark.parametrize("content", [None, b"", b"\0" * 86, b"garbled", b"3 abc", b"-1 " + b"0" * 64])
def test_entries_without_a_head_are_vouched_for_by_nobody(filled, content, remaining):
    edited(filled, f"DELETE FROM entries WHERE number > {remaining}")
    head_path(filled).unlink()
    if content is not None:
        head_path(filled).write_bytes(content)
    assert_refused(filled, r"ledger\.sqlite\.head is missing or unreadable.*fedpriv ledger adopt-head")
    assert_refused(filled, "adopt-head")  # having been refused once changes nothing
    by_doctor = check_ledger(filled)
    assert "adopt-head" in by_doctor.detail
    assert not by_doctor.ok


def test_a_lost_database_is_no_new_ledger_while_its_head_is_there(filled):
    filled.unlink()
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"damaged: it is empty, but ledger\.sqlite\.head has seen entry 4"):
            Ledger(filled)


def test_a_new_ledger_has_a_head_before_its_first_entry(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(LedgerError, match="nothing to adopt"):
        Ledger(path, adopting="new disk")
    Ledger(path).close()
    assert head_path(path).read_text().split() == ["0", EMPTY_CHAIN]
    with reading(path) as db:
        assert verify_with_head(db, path) is None


def test_opening_brings_a_head_that_lags_up_to_date(filled):
    """After a crash between a commit and its head, losing that commit's entries is noticed from the next opening on."""
    head_path(filled).write_text(f"0 {EMPTY_CHAIN}\n")
    Ledger(filled).close()
    edited(filled, "DELETE FROM entries WHERE number > 2")
    assert_refused(filled, "ends at entry 2, but ledger.sqlite.head has seen entry 4")


def test_a_copy_has_a_head_of_its_own(filled, tmp_path):
    copy = tmp_path / "copy.sqlite"
    with Ledger(filled) as ledger:
        ledger.copy(copy)
        ledger.charge([charge_for(ledger.data_set().id, 4)])
        ledger.copy(copy)
        assert checked(copy) == ledger.last
        assert head_path(copy).read_text() == head_path(filled).read_text()
    edited(copy, "DELETE FROM entries WHERE number > 4")
    assert_refused(copy, "has seen entry 5")


CRASHES = """
import json, os, signal, sys
from pathlib import Path
from fedpriv.privacy.ledger.ledger import Ledger
from tests.privacy.ledger.test_ledger import charge_for, checked

def die_at(instant):
    calls = 0
    def count(frame, event, argument):
        nonlocal calls
        if event in ("c_call", "c_return") and "/fedpriv/privacy/ledger/" in frame.f_code.co_filename:
            calls += 1
            if calls == instant:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)

def life(path, told, instant):
    die_at(instant)
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5)
        os.write(told, b"r")
        ledger.charge([charge_for(data_set.id, 1), charge_for(data_set.id, 2)])
        os.write(told, b"c")
        ledger.copy(path.with_name("copy"))
    os.write(told, b"e")
    os._exit(0)

results, instant, step = [], 0, int(sys.argv[2])
while not results or results[-1][0] != "rce":
    instant += step
    path = Path(sys.argv[1], str(instant), "ledger.sqlite")
    read, told = os.pipe()
    if not os.fork():
        os.close(read)
        life(path, told, instant)
    os.close(told)
    with os.fdopen(read) as file:
        done = file.read()
    os.wait()
    with Ledger(path) as ledger:
        number = ledger.last[0]
        if ledger.data_set() is None:
            ledger.register("0", 100, 1e-5)
        ledger.charge([charge_for(ledger.data_set().id, 7)])
    checked(path)
    copy = path.with_name("copy")
    if copy.exists():
        Ledger(copy).close()
    results.append((done, number))
print(json.dumps(results))
"""


@pytest.mark.parametrize("step", [25, *slow(1)])
def test_a_crash_at_any_instant_locks_nobody_out_and_loses_nothing(tmp_path, step):
    """A child dies at every so manieth call of a ledger's life, from its creation on; the next writer goes on."""
    done = subprocess.run([sys.executable, "-c", CRASHES, tmp_path, str(step)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {told for told, _ in results} == {"", "r", "rc", "rce"}, "deaths in every phase"
    for told, number in results:
        assert number >= {"": 0, "r": 1, "rc": 3, "rce": 3}[told], "what had returned is on disk"


def test_readers_see_a_chain_that_agrees_with_its_head_at_any_time(filled):
    """The head is read after the entries, and written after them: it never names one that a reader lacks."""

    def write() -> None:
        with Ledger(filled) as ledger:
            for round_ in range(10, 160):
                ledger.charge([charge_for(ledger.data_set().id, round_)])

    writer, seen = multiprocessing.get_context("fork").Process(target=write), set()
    writer.start()
    while writer.is_alive():
        seen.add(checked(filled))
    assert writer.exitcode == 0
    assert seen


def test_a_charge_names_the_data_set_that_paid_for_it(filled):
    with Ledger(filled) as ledger:
        first = ledger.data_set().id
        second = ledger.register("0", 100, 1e-5, note="cases of 2027").id
        ledger.charge([charge_for(second, 4)])
        assert ledger.charged_data_set(charge_for("", 3).key) == first
        assert ledger.charged_data_set(charge_for("", 4).key) == second
        assert ledger.charged_data_set(charge_for("", 5).key) is None


def version(path: Path) -> int:
    db = sqlite3.connect(path)
    (found,) = db.execute("PRAGMA user_version").fetchone()
    db.close()
    return found


def test_an_adopted_ledger_goes_on_and_older_readers_refuse_it(filled):
    with Ledger(filled) as ledger:
        data_set, spent = ledger.data_set(), ledger.releases(ledger.data_set().id)
    assert version(filled) == 1, "older readers go on with a ledger that always had its head"
    head_path(filled).write_bytes(b"garbled" * 100)
    with Ledger(filled, adopting="new disk") as ledger:
        assert ledger.last[0] == 5
    with Ledger(filled) as ledger:
        assert (ledger.data_set(), ledger.releases(data_set.id)) == (data_set, spent)
        ledger.charge([charge_for(data_set.id, 4)])
        assert ledger.last[0] == 6
    assert version(filled) == 2
    edited(filled, "UPDATE entries SET note = 'nothing to see' WHERE phase = 'adopted'")
    assert_refused(filled, "entry 5 was changed")


def test_an_edited_ledger_cannot_be_adopted(filled):
    edited(filled, "DELETE FROM entries WHERE number = 2")
    head_path(filled).unlink()
    with pytest.raises(LedgerError, match="entry 2 is missing"):
        Ledger(filled, adopting="new disk")
    assert version(filled) == 1

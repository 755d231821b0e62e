"""Accounts belong to a named holder or a part of a partition; data that changed since a run before are told."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from fedpriv.config import parse, read
from fedpriv.errors import InputError
from fedpriv.learning.training import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.reader import path_of, reading
from fedpriv.privacy.ledger.statement import statement
from server.observer import LogObserver
from simulations.engines import federation
from simulations.sweeps import plan
from simulations.sweeps.command import sweep
from tests.marks import slow
from tests.notes import Notes
from tests.server import parts
from tests.server.parts import StopsAfter
from tests.tiny import LABELS, write_rows


@pytest.fixture(autouse=True)
def _fresh_benches():
    yield
    workbench.forget()


@pytest.fixture
def run(small_run, tmp_path):
    """Runs a federation of {holder: number of records} on the ledger; {holder: its figures}, and what it says."""

    def go(name: str, sizes: dict[str, int], **changes: object) -> tuple[dict[str, dict], list[str]]:
        observer = Notes()
        rows = [(f"{c} has pain {i}", LABELS[i % 3], c) for c, size in sizes.items() for i in range(size)]
        table = write_rows(tmp_path / "records.csv", [("text", "label", "site"), *rows])
        values = small_run | {"data": str(table), "simulate": False, "ledger": str(tmp_path / "ledger.sqlite")}
        values |= {"out": str(tmp_path / name), "local_steps": 1, "rounds": 1}
        federation.run(parse(values | changes), observer)
        clients = json.loads((tmp_path / name / "summary.json").read_text())["clients"]
        return {client["name"]: client for client in clients}, observer.notes

    return go


def stated(ledger: Path, client: str) -> list[dict]:
    with reading(ledger) as db:
        return statement(db, ledger, client)


def test_a_holder_keeps_its_account_when_another_joins_whose_name_sorts_first(run, tmp_path):
    """Before, south began at zero and what it had spent was carried on by nobody, or by north."""
    one, _ = run("one", {"north": 24, "south": 30})
    two, _ = run("two", {"alpha": 27, "north": 24, "south": 30})
    assert [(c["name"], c["client"], c["earlier_runs"]) for c in two.values()] == [
        ("alpha", 0, 0),
        ("north", 1, 1),
        ("south", 2, 1),
    ]
    assert two["alpha"]["epsilon_local"] == two["alpha"]["epsilon_local_this_run"]
    ledger = tmp_path / "ledger.sqlite"
    with reading(ledger) as db:
        known = {each.client: each for each in db.data_sets()}
        for name in ("north", "south"):
            releases = [each.event for each in db.releases(known[name].id)]
            (once,) = {each.with_count(1) for each in releases}
            assert sum(each.count for each in releases) == 2 == 2 * one[name]["rounds"]
            assert once.sampling_probability == 8 / one[name]["num_records"]
            assert two[name]["epsilon_local"] == pytest.approx(epsilon_of(releases, known[name].delta).epsilon)
            (page,) = stated(ledger, name)
            assert (page["num_records"], page["runs"]) == (one[name]["num_records"], 2)
            with reading(path_of(ledger, name)) as own:
                (kept,) = own.data_sets()
                assert (kept.id, kept.client) == (known[name].id, name)
                assert own.releases(kept.id) == [each for each in db.releases(kept.id) if each.rho_bar == 1] or releases
    (page,) = stated(ledger, "2")
    assert page["client"] == "south", "one holder alone ever had this number"
    with pytest.raises(InputError, match="knows 2 of this number, north, alpha; give the name"):
        stated(ledger, "0")


def test_the_budget_that_is_enforced_is_the_holders_own_and_its_number_of_records_stays(run, tmp_path):
    size = {"north": 24, "south": 24}
    spent = run("one", size)[0]["south"]["epsilon_local"]
    two, _ = run("two", {"alpha": 24, **size}, budget_epsilon=spent * 1.01)
    assert two["alpha"]["rounds"] > 0
    assert two["north"]["rounds"] == two["south"]["rounds"] == 0
    with pytest.raises(InputError, match=r"^num_records = 20: north \(0\) has an account in .*ledger\.sqlite with 24,"):
        run("three", {"north": 20, "south": 24})
    assert not (tmp_path / "three").exists()


def test_every_way_of_dealing_out_records_has_its_own_accounts(run, tmp_path):
    dealt = {"client_column": "", "partition": "iid", "num_clients": 2}
    first, notes = run("one", {"north": 24, "south": 30}, **dealt)
    assert not any("dealing out" in note for note in notes)
    again, _ = run("two", {"north": 24, "south": 30}, **dealt, learning_rate=0.1)
    assert [client["earlier_runs"] for client in again.values()] == [1, 1]
    other, notes = run("three", {"north": 24, "south": 30}, **dealt, seed=1)
    assert [client["earlier_runs"] for client in other.values()] == [0, 0]
    assert [client["epsilon_local"] for client in other.values()] == [c["epsilon_local"] for c in first.values()]
    (note,) = [note for note in notes if "dealing out" in note]
    assert "ledger.sqlite also has accounts of records.csv, partition " in note
    with reading(tmp_path / "ledger.sqlite") as db:
        assert len(db.data_sets()) == 4


def by_number(tmp_path: Path) -> list[Path]:
    """Name the holders' ledgers as earlier versions did."""
    nodes = Path(f"{tmp_path / 'ledger.sqlite'}.nodes")
    for number, name in enumerate(("north", "south")):
        for end in ("", ".head"):
            old = path_of(tmp_path / "ledger.sqlite", name)
            old.with_name(old.name + end).rename(nodes / f"{number}.sqlite{end}")
    return sorted(nodes.iterdir())


def test_accounts_by_number_are_carried_on_where_it_is_known_whose_they_are(run, tmp_path):
    size = {"north": 24, "south": 30}
    run("one", size)
    before = by_number(tmp_path)
    with pytest.raises(InputError, match=r"no registrations\.json beside ledger\.sqlite names its holder; copy that"):
        run("two", {"alpha": 27, **size})
    assert sorted(before[0].parent.iterdir()) == before
    shutil.copy(tmp_path / "one" / "registrations.json", tmp_path)
    two, _ = run("two", {"alpha": 27, **size})
    assert {name: client["earlier_runs"] for name, client in two.items()} == {"alpha": 0, "north": 1, "south": 1}
    # An account by number whose records changed is nobody's.
    run("changed", size, text_column="site")
    by_number(tmp_path)
    with pytest.raises(InputError, match="its records changed, so more than one holder may have had this number"):
        run("three", size)


@pytest.fixture
def own_table(table, tmp_path):
    """A copy of the table, to be changed."""
    path = tmp_path / "own.csv"
    path.write_bytes(table.read_bytes())
    return path


def corrected(rows):
    for row in rows[2:30]:
        row[0] += " corrected" if row[2] == "site-2" else ""


def renamed(rows):
    for row in rows:
        row[2] = {"site-0": "zulu"}.get(row[2], row[2])


def shorter(rows):
    del rows[-9:]


CHANGES = {
    corrected: "the records of 'site-2' are others",
    renamed: "'site-0' held records and holds none now, 'zulu' is a new holder",
    shorter: r"'site-0' had \d+ records and has \d+, .*; put the data back as they were",
}


def change(path: Path, how) -> None:
    header, *rows = csv.reader(path.open(newline=""))
    how(rows)
    write_rows(path, [header, *rows])


@pytest.mark.parametrize("ledger", [False, *slow(True)], ids=["no ledger", "ledger"])
def test_a_run_is_not_resumed_on_other_records(small_run, own_table, tmp_path, ledger):
    """Before, it went on, with client 0 another holder."""
    out = tmp_path / "run"
    values = small_run | {"data": str(own_table), "out": str(out)}
    values |= {"ledger": str(tmp_path / "ledger.sqlite")} if ledger else {}
    with pytest.raises(KeyboardInterrupt):
        federation.run(parse(values), StopsAfter(1))
    resumed = parse(read(out / "config.toml") | {"resume": str(out)})
    before, content = (out / "rounds.csv").read_bytes(), own_table.read_bytes()
    for how, why in CHANGES.items():
        change(own_table, how)
        with pytest.raises(InputError, match=f"resume = .*: data = .*own.csv': {why}"):
            federation.run(resumed, LogObserver())
        assert (out / "rounds.csv").read_bytes() == before
        own_table.write_bytes(content)
    federation.run(resumed, LogObserver())
    assert json.loads((out / "summary.json").read_text())["num_rounds"] == 2


def test_a_sweep_does_not_go_on_with_another_table(small_run, own_table, tmp_path):
    """Also where no run of before read the table with the same keys; the test above has all changes."""
    out = tmp_path / "out"
    values = small_run | {"data": str(own_table), "title": "two", "rounds": 1}
    del values["rank"]

    def go(ranks: list[int]):
        planned = plan.expand({**values, "grid": {"rank": ranks, "seed": [0]}}, source="two", title="two")
        return sweep(planned, out, max_parallel=1, console=Console(quiet=True))

    assert not go([2]).errors
    (first,) = [path.parent.name for path in out.glob("*/summary.json")]
    (out / "sweep.csv").unlink()
    change(own_table, corrected)
    (error,) = go([2, 3]).errors.values()
    assert re.search(rf"^data = .*: since run {first} of this sweep: .*{CHANGES[corrected]}", error)


def test_a_process_that_runs_twice_reads_a_corrected_table_again(small_run, own_table, tmp_path):
    """Before, the second run in a notebook trained on the records of the first."""
    digests = []
    for name in ("one", "two"):
        parts.run(small_run, tmp_path / name, data=str(own_table), rounds=1)
        file = tmp_path / name / "data.json"
        assert file.stat().st_mode & 0o77 == 0, "digests tell of records"
        digests.append(json.loads(file.read_text())["holders"])
        change(own_table, corrected)
    changed = [holder for holder in digests[0] if digests[0][holder] != digests[1][holder]]
    assert changed == ["site-2"]

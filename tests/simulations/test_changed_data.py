"""A simulation whose data change between two starts of it, or of its sweep, says what differs and goes no further."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedpriv.config import parse, read
from fedpriv.errors import InputError
from fedpriv.learning.training import workbench
from server.observer import LogObserver
from simulations.engines import federation
from simulations.sweeps import plan
from simulations.sweeps.command import sweep


@pytest.fixture(autouse=True)
def _fresh_benches():
    yield
    workbench.forget()


class Interrupted(LogObserver):
    """Stops the run after its first round."""

    def round_done(self, row):
        if row.round == 1:
            raise KeyboardInterrupt


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
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no ledger"])
def test_a_run_is_not_resumed_on_other_records(small_run, own_table, tmp_path, how, ledger):
    """Before, it went on, with client 0 another holder."""
    out = tmp_path / "run"
    values = small_run | {"data": str(own_table), "out": str(out)}
    values |= {"ledger": str(tmp_path / "ledger.sqlite")} if ledger else {}
    with pytest.raises(KeyboardInterrupt):
        federation.run(parse(values), Interrupted())
    before, content = (out / "rounds.csv").read_bytes(), own_table.read_bytes()
    change(own_table, how)
    resumed = parse(read(out / "config.toml") | {"resume": str(out)})
    with pytest.raises(InputError, match=f"resume = .*: data = .*own.csv': {CHANGES[how]}"):
        federation.run(resumed, LogObserver())
    assert (out / "rounds.csv").read_bytes() == before
    own_table.write_bytes(content)
    federation.run(resumed, LogObserver())
    assert json.loads((out / "summary.json").read_text())["num_rounds"] == 2


@pytest.mark.parametrize("how", CHANGES)
def test_a_sweep_does_not_go_on_with_another_table(small_run, own_table, tmp_path, how):
    """Also where no run of before read the table with the same keys."""
    out, said = tmp_path / "out", io.StringIO()
    values = small_run | {"data": str(own_table), "title": "two"}

    def go(ranks: list[int]):
        planned = plan.expand({**values, "grid": {"rank": ranks, "seed": [0]}}, source="two", title="two")
        return sweep(planned, out, max_parallel=1, console=Console(file=said, width=300))

    del values["rank"]
    assert not go([2]).errors
    (out / "sweep.csv").unlink()
    change(own_table, how)
    (error,) = go([2, 3]).errors.values()
    (first,) = [path.parent.name for path in out.glob("*/summary.json")]
    assert re.search(rf"^data = .*: since run {first} of this sweep: .*{CHANGES[how]}", error)


def test_a_process_that_runs_twice_reads_a_corrected_table_again(small_run, own_table, tmp_path):
    """Before, the second run in a notebook trained on the records of the first."""
    digests = []
    for name in ("one", "two"):
        federation.run(parse(small_run | {"data": str(own_table), "out": str(tmp_path / name)}), LogObserver())
        file = tmp_path / name / "data.json"
        assert file.stat().st_mode & 0o77 == 0, "digests tell of records"
        digests.append(json.loads(file.read_text())["holders"])
        change(own_table, corrected)
    changed = [holder for holder in digests[0] if digests[0][holder] != digests[1][holder]]
    assert changed == ["site-2"]

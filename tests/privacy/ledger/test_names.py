"""Names of a ledger's holders: from the files of its folder, by data set, and never trusted."""

from __future__ import annotations

import json

import pytest

from fedpriv.holder.vault import settings
from fedpriv.privacy.ledger import reader
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.reader import names_in
from fedpriv.runs import files
from fedpriv.texts import holder_label

SETS = [DataSet(id=f"d{k}", client=str(k), num_records=9, delta=1e-5) for k in range(2)]


def registered(folder, **names: object) -> None:
    content = {str(k): {"client": k, "data_set": id_, "name": name} for k, (id_, name) in enumerate(names.items())}
    (folder / "registrations.json").write_text(json.dumps(content))


def test_a_run_names_data_sets_and_nobody_else_s(tmp_path):
    registered(tmp_path, d1="Northgate", d0="St. Anna", other="Mallory")
    assert names_in(tmp_path, SETS) == {"d0": "St. Anna", "d1": "Northgate"}


def test_a_node_names_itself_alone(tmp_path):
    (tmp_path / "vault.toml").write_text('partition_id = 1\nname = "Northgate"\n')
    assert names_in(tmp_path, SETS) == {"d1": "Northgate"}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"0": 3}', '{"0": {"data_set": ["d0"]}}', "[" * 100_000])
def test_a_file_that_is_damaged_names_nobody_and_hides_no_spending(tmp_path, content):
    (tmp_path / "registrations.json").write_text(content)
    (tmp_path / "vault.toml").write_bytes(b"\xff")
    assert names_in(tmp_path, SETS) == {}


def test_a_name_is_bounded_and_controls_no_terminal(tmp_path):
    registered(tmp_path, d0="x" * 10_000, d1=7)
    assert names_in(tmp_path, SETS) == {"d0": "x" * 100}
    assert holder_label("0", "St.\x1b[2J\nAnna") == "St.\ufffd[2J\ufffdAnna (0)"


@pytest.mark.parametrize("name", [None, "", "client 3", "client-3"])
def test_a_holder_without_a_name_of_its_own_is_called_by_its_number(name):
    assert holder_label(3, name) == "client 3"


def test_the_files_are_those_that_runs_and_nodes_write():
    assert (reader.REGISTRATIONS, reader.NODE) == (files.REGISTRATIONS, settings.FILE)

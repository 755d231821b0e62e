"""`fedpriv ledger`: what a privacy officer asks of a ledger, and what a user's mistake looks like."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.accounting.accountants import spent
from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.accounting.views import Release
from fedpriv.ledger.entries import Charge, Key
from fedpriv.ledger.ledger import Ledger

FEDPRIV = Path(sys.executable).with_name("fedpriv")
EVENT = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.1, count=3)


def fedpriv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FEDPRIV, *arguments], capture_output=True, text=True)


def as_json(*arguments: str) -> dict:
    result = fedpriv(*arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.fixture
def path(tmp_path) -> Path:
    """Two clients, two runs; the second run's noise was seeded for client 1."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        for client in ("0", "1"):
            data_set = ledger.register(client, 100, 1e-5).id
            for run, source in (("first", "secure"), ("second", "seeded" if client == "1" else "secure")):
                for round_ in (1, 2):
                    key = Key(run=run, client=client, round=round_, request="x")
                    release = Release(event=EVENT, rho_bar=0.7)
                    ledger.charge([Charge(key=key, data_set=data_set, release=release, noise_source=source)])
    return path


def test_show_agrees_with_the_accountant(path):
    (row, _) = as_json("ledger", "show", str(path), "--budget-epsilon", "5")["data_sets"]
    whole = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.1, count=12)
    assert row["epsilon_local"] == spent([whole], 1e-5).epsilon
    assert row["epsilon_rho"] > row["epsilon_local"]
    assert (row["runs"], row["rounds"], row["delta"]) == (2, 4, 1e-5)
    costs = [
        spent([SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.1, count=12 + 3 * more)], 1e-5).epsilon
        for more in (row["remaining_rounds"], row["remaining_rounds"] + 1)
    ]
    assert costs[0] <= 5 < costs[1]
    assert fedpriv("ledger", "show", str(path)).stdout.count("\n") == 3


def test_statement_says_what_was_spent_what_it_covers_and_where_to_check(path):
    (page,) = as_json("ledger", "statement", str(path), "--client", "0")["statements"]
    text = fedpriv("ledger", "statement", str(path), "--client", "0").stdout
    for part in (
        page["data_set"],
        page["head"],
        "one record",
        "Not covered",
        "delta 1e-05",
        "secure",
        "first",
        "second",
    ):
        assert part in text
    shown = float(text.split("epsilon ")[1].split()[0])
    assert page["epsilon_local"] <= shown <= page["epsilon_local"] + 1e-4, "rounded up"
    assert page["private"] is True
    assert "NOT PRIVATE" not in text


def test_statement_of_seeded_noise_promises_nothing(path):
    assert "NOT PRIVATE" in fedpriv("ledger", "statement", str(path), "--client", "1").stdout
    assert as_json("ledger", "statement", str(path), "--client", "1")["statements"][0]["private"] is False


def test_a_broken_chain_is_named_by_its_entry_and_nothing_is_stated_on_it(path):
    assert as_json("ledger", "verify", str(path))["entries"] == 10
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER no_update")
    db.execute("UPDATE entries SET event = replace(event, '1.5', '15') WHERE number = 3")
    db.commit()
    db.close()
    for command in (["verify"], ["show"], ["statement", "--client", "0"]):
        result = fedpriv("ledger", command[0], str(path), *command[1:], "--json")
        assert (result.returncode, result.stdout) == (1, "")
        assert "entry 3 was changed" in result.stderr
        assert "Traceback" not in result.stderr


def test_another_data_set_needs_the_holders_statement(tmp_path):
    path = str(tmp_path / "node.sqlite")
    first = as_json("ledger", "register", path, "--client", "0", "--num-records", "50")
    refused = fedpriv("ledger", "register", path, "--client", "0", "--num-records", "60")
    assert refused.returncode == 2
    assert "--disjoint" in refused.stderr
    second = as_json("ledger", "register", path, "--client", "0", "--num-records", "60", "--disjoint", "cases of 2027")
    assert second["data_set"] != first["data_set"]
    with Ledger(Path(path)) as ledger:
        assert ledger.data_set().id == second["data_set"]
    assert "cases of 2027" in fedpriv("ledger", "statement", path, "--client", "0").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["show", "none.sqlite"], 1, "no such ledger"),
        (["statement", "{path}", "--client", "7"], 2, "knows 0, 1"),
        (["show", "{path}", "--budget-epsilon", "0"], 2, "epsilon = 0"),
        (["register", "{path}", "--client", "0", "--num-records", "0"], 2, "--num-records 0"),
    ],
)
def test_mistakes_are_one_line(path, arguments, code, part):
    result = fedpriv("ledger", *(argument.format(path=path) for argument in arguments))
    assert (result.returncode, result.stdout) == (code, "")
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_repeat_and_select_needs_its_conditions_stated():
    arguments = ["repeat-and-select", "--noise-multiplier", "4", "--sampling-probability", "0.05", "--steps", "30"]
    arguments += ["--delta", "1e-5", "--mean-repetitions", "10"]
    refused = fedpriv(*arguments)
    assert refused.returncode == 2
    assert "random and secret" in refused.stderr
    result = as_json(*arguments, "--number-is-random-and-secret", "--losers-are-hidden")
    assert result["epsilon_of_one_run"] < result["epsilon"] < 10 * result["epsilon_of_one_run"]

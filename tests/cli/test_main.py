"""`fedpriv ...` as a whole: exit codes, clean output and no traceback; `data check` and `report`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import as_json, fedpriv
from tests.cli.inputs import ACCOUNT


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([*ACCOUNT[:2], "-1", *ACCOUNT[3:]], "noise_multiplier = -1"),
        ([*ACCOUNT[:-1], "2"], "delta = 2"),
        ([*ACCOUNT, "--rho-bar", "1.5"], "rho_bar = 1.5"),
        ([*ACCOUNT, "--accountant", "moments"], "accountant = 'moments': must be one of pld, rdp, closed-form"),
        ([*ACCOUNT, "--clipping", "none"], "clipping = 'none': must be one of"),
        (["account"], "noise-multiplier"),
        (["data", "check", "/no/such.csv"], "/no/such.csv"),
        (["report", "/no/such/run"], "/no/such/run"),
    ],
)
def test_a_users_mistake_exits_with_2_and_prints_nothing_else(arguments, part):
    out, err = fedpriv(*arguments, code=2)
    assert out == ""
    assert part in err


def test_data_check_shows_what_a_run_would_see(table):
    result = as_json("data", "check", table, "--client", "site")
    assert result["records"] == 240
    assert result["labels"] == {"cardiology": 80, "dermatology": 80, "neurology": 80}
    assert sum(result["clients"].values()) == 240
    assert "text, label, site" in fedpriv("data", "check", table, "--text", "body", code=2)[1]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("r.jsonl", "", "r.jsonl"),
        ("r.txt", "x", "unknown format"),
        ("r.jsonl", '{"te\\nxt": "words", "\\u001b[2Jlabel": "a"}', "it has 'te\\nxt', '\\x1b[2Jlabel'"),
    ],
    ids=["empty", "unknown format", "steers the terminal"],
)
def test_data_check_of_an_unusable_file_exits_with_2_and_one_line(tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    out, err = fedpriv("data", "check", tmp_path / name, "--json", code=2)
    assert out == ""
    assert part in err
    assert err.count("\n") == 1


def test_report_of_a_folder_that_is_no_run_exits_with_2(tmp_path):
    assert fedpriv("report", tmp_path, "--json", code=2)[0] == ""


def test_the_installed_script_prints_json_or_one_line_of_error():
    script = Path(sys.executable).parent / "fedpriv"
    found = subprocess.run([script, *ACCOUNT, "--json"], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout) == as_json(*ACCOUNT)
    refused = subprocess.run([script, *ACCOUNT, "--rho-bar", "2"], capture_output=True, text=True, timeout=120)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: rho_bar = 2.0: must lie in (0, 1]\n"

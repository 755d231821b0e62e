"""`fedpriv ...` from a shell: figures of the library, clean JSON, exit codes, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.accounting.curves import spent
from fedpriv.accounting.events import SubsampledGaussian

COMMAND = Path(sys.executable).parent / "fedpriv"
ACCOUNT = ["account", "--noise-multiplier", "2", "--sampling-probability", "0.05", "--steps", "40", "--delta", "1e-5"]


def fedpriv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def as_json(*arguments: str) -> dict[str, object]:
    result = fedpriv(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("options", "factor"),
    [([], 1.0), (["--rho-bar", "0.5"], 0.5), (["--clipping", "split", "--head"], 3**-0.5)],
    ids=["joint", "rho", "split"],
)
def test_account_gives_the_librarys_figure(accountant, options, factor):
    result = as_json(*ACCOUNT, "--accountant", accountant, *options)
    event = SubsampledGaussian(noise_multiplier=2 * factor, sampling_probability=0.05, count=40)
    assert result["epsilon"] == pytest.approx(spent([event], 1e-5, accountant).epsilon, rel=1e-9)
    assert result["effective_noise_multiplier"] == pytest.approx(2 * factor)
    assert result["noise_multiplier"] == 2
    assert result["delta"] == 1e-5


def test_closed_form_states_its_conditions():
    result = as_json(*ACCOUNT, "--accountant", "closed-form")
    assert result["conditions_hold"] is False
    assert "q < 1 / (16 rho_bar * sigma)" in result["violated"]


def test_no_noise_is_infinite_for_people_and_null_in_json():
    arguments = [*ACCOUNT[:2], "0", *ACCOUNT[3:]]
    assert as_json(*arguments)["epsilon"] is None
    assert "inf" in fedpriv(*arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([*ACCOUNT[:2], "-1", *ACCOUNT[3:]], "noise_multiplier = -1"),
        ([*ACCOUNT[:-1], "2"], "delta = 2"),
        ([*ACCOUNT, "--rho-bar", "1.5"], "rho_bar = 1.5"),
        ([*ACCOUNT, "--accountant", "moments"], "moments"),
        (["account"], "noise-multiplier"),
        (["data", "check", "/no/such.csv"], "/no/such.csv"),
        (["report", "/no/such/run"], "/no/such/run"),
    ],
)
def test_a_users_mistake_exits_with_2_and_no_traceback(arguments, part):
    result = fedpriv(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_data_check_shows_what_a_run_would_see(table):
    result = as_json("data", "check", str(table), "--client", "site")
    assert result["records"] == 240
    assert result["labels"] == {"cardiology": 80, "dermatology": 80, "neurology": 80}
    assert sum(result["clients"].values()) == 240
    assert "text, label, site" in fedpriv("data", "check", str(table), "--text", "body").stderr


@pytest.mark.parametrize("command", [[], ["account"], ["data"], ["data", "check"], ["report"]])
def test_every_command_explains_itself(command):
    result = fedpriv(*command, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_account_does_not_wait_for_torch():
    code = "import sys, fedpriv.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

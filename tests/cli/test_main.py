"""`fedpriv ...` from a shell: figures of the library, clean JSON, exit codes, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.accounting.accountants import spent
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
    code = "import sys, fedpriv.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# dp-accounting called directly; its pld figure is computed afresh, not through fedpriv.
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_account_agrees_with_dp_accounting_itself(accountant):
    import dp_accounting
    from dp_accounting import pld, rdp

    library = rdp.RdpAccountant() if accountant == "rdp" else pld.PLDAccountant()
    library.compose(dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0)), 40)
    ours = as_json(*ACCOUNT, "--accountant", accountant)["epsilon"]
    assert ours == pytest.approx(library.get_epsilon(1e-5), rel=1e-6 if accountant == "rdp" else 1e-3)


def test_closed_form_is_the_papers_figure():
    # 2 * 0.05 * sqrt(40 ln 1e5) / 2 = 0.05 * 21.459658
    assert as_json(*ACCOUNT, "--accountant", "closed-form")["epsilon"] == pytest.approx(1.0729829, abs=1e-6)


def test_batch_clipping_with_a_head_divides_the_noise():
    result = as_json(*ACCOUNT, "--accountant", "rdp", "--clipping", "batch", "--head")
    assert result["effective_noise_multiplier"] == pytest.approx(2 / (2 * 3**0.5))


@pytest.mark.parametrize("arguments", [ACCOUNT, [*ACCOUNT, "--accountant", "closed-form"]], ids=["pld", "closed-form"])
def test_json_is_one_line_on_stdout_and_nothing_else_anywhere(arguments):
    result = fedpriv(*arguments, "--json")
    assert result.stdout.count("\n") == 1
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("r.jsonl", "", "r.jsonl"),
        ("r.txt", "x", "unknown format"),
    ],
    ids=["empty", "unknown format"],
)
def test_data_check_of_an_unusable_file_exits_with_2_and_one_line(tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    result = fedpriv("data", "check", str(tmp_path / name), "--json")
    assert "Traceback" not in result.stderr
    assert (result.returncode, result.stdout) == (2, "")
    assert part in result.stderr


def test_report_of_a_folder_that_is_no_run_exits_with_2(tmp_path):
    result = fedpriv("report", str(tmp_path), "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_extreme_noise_shows_no_traceback():
    result = fedpriv("account", "--noise-multiplier", "1e-300", *ACCOUNT[3:])
    assert result.returncode in (0, 2)
    assert "Traceback" not in result.stderr


def test_a_finished_account_has_not_imported_torch():
    code = f"""
import sys
from fedpriv.cli import main as cli
sys.argv = ["fedpriv", *{ACCOUNT!r}, "--json"]
try:
    cli.main()
except SystemExit:
    pass
assert "dp_accounting" in sys.modules
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0

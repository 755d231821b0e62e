"""`fedpriv status` of a run that is over: its final figures, and those of earlier versions' runs."""

from __future__ import annotations

import json
import math
from typing import Any

from typer.testing import CliRunner

from fedpriv.cli import main as cli
from tests.runs.written import NAMES, SIZES, WriteRun, shown, status


def summary(**changes: Any) -> dict[str, Any]:
    clients = [
        {"client": c, "name": NAMES[c], "num_records": n, "epsilon_local": 0.05 * c, "delta": 1e-5, "retired": None}
        for c, n in SIZES.items()
    ]
    values = {
        "run_id": "5eed",
        "epsilon_local_max": 0.1,
        "epsilon_rho_max": 0.4,
        "epsilon_aggregate_max": None,
        "aggregate_objections": ["local_steps = 3: needs 1"],
        "delta_max": 1e-5,
        "accountant": "pld",
        "seconds": 99.5,
        "stopped_early": None,
        "clients": clients,
    }
    return {**values, **changes}


def test_a_finished_run_shows_its_final_figures(write_run: WriteRun) -> None:
    folder = write_run(seconds_ago=10**6)
    (folder / "summary.json").write_text(json.dumps(summary()))
    found = status(folder)
    assert (found.state, found.resume_command, found.accountant, found.seconds) == ("finished", None, "pld", 99.5)
    assert (found.epsilon_local_max, found.epsilon_rho_max, found.delta_max) == (0.1, 0.4, 1e-5)
    assert (found.epsilon_aggregate_max, found.aggregate_view_holds) == (None, False)
    assert [client.epsilon_local for client in found.clients] == [0.0, 0.05, 0.1]


def test_a_finished_run_shows_its_warnings_and_what_its_accuracy_is_compared_with(write_run: WriteRun) -> None:
    folder = write_run()
    quality = {"accuracy": 0.6, "accuracy_standard_error": 0.011, "majority_accuracy": 0.59, "warnings": ["too low"]}
    (folder / "summary.json").write_text(json.dumps(summary(**quality)))
    found = status(folder)
    assert "60.0% ± 1.1%, largest class 59.0%" in shown(found)
    assert "warning: too low" in shown(found)
    assert found.as_dict()["warnings"] == ("too low",)


def test_a_run_without_a_test_has_no_warnings(write_run: WriteRun) -> None:
    folder = write_run()
    assert not summary().keys() & {"warnings", "majority_accuracy"}
    (folder / "summary.json").write_text(json.dumps(summary()))
    found = status(folder)
    assert (found.warnings, found.majority_accuracy, found.accuracy_standard_error) == ((), None, None)
    assert "warning" not in shown(found)


def test_an_infinity_in_a_summary_is_one_in_json_again(write_run: WriteRun) -> None:
    folder = write_run()
    (folder / "summary.json").write_text(json.dumps(summary(epsilon_local_max="inf", aggregate_objections=[])))
    found = status(folder)
    assert found.epsilon_local_max == found.epsilon_aggregate_max == math.inf
    assert "local ∞" in shown(found)
    result = CliRunner().invoke(cli.app, ["status", str(folder), "--json"])
    assert json.loads(result.stdout)["epsilon_local_max"] == "inf"


def test_an_early_end_is_told(write_run: WriteRun) -> None:
    folder = write_run()
    (folder / "summary.json").write_text(json.dumps(summary(stopped_early="round 4: 0 of 3 clients are left")))
    assert "ended early  round 4: 0 of 3 clients are left" in shown(status(folder))

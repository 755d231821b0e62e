"""`fedpriv status` tells from a folder what its run does or did; the server's own writers write the folders."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs import files
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._status import status_of
from fedpriv.runs.figures import format_bound
from tests.cli.command_line import as_json, fedpriv
from tests.cli.inputs import charge
from tests.runs.written import NAMES, NOW, SIZES, WriteRun, event, shown, status, write_checkpoint, wrote


@pytest.mark.parametrize(
    ("seconds_ago", "state"), [(-30, "running"), (0, "running"), (60, "running"), (61, "interrupted")]
)
def test_a_run_that_was_silent_for_a_whole_round_is_interrupted(write_run: WriteRun, seconds_ago, state) -> None:
    found = status(write_run(seconds_ago=seconds_ago))
    assert (found.state, found.seconds_since_change) == (state, max(seconds_ago, 0))
    assert (found.resume_command is None) == (state == "running")


def test_a_run_whose_process_lives_is_running_however_long_it_is_silent(write_run: WriteRun) -> None:
    folder = write_run(seconds_ago=10_000)
    with files.marked_alive(folder):
        assert (status(folder).state, status(folder).is_alive) == ("running", True)
        assert "2 h 46 min ago; its process lives" in shown(status(folder))
    found = status_of(RunFolder(folder, now=NOW - 10_000))  # however lately it wrote something
    assert (found.state, found.is_alive) == ("interrupted", False)
    assert found.resume_command is not None


@pytest.mark.parametrize(("seconds_ago", "state"), [(60, "running"), (61, "unknown")])
def test_a_run_on_another_machine_is_never_called_dead(write_run: WriteRun, seconds_ago, state) -> None:
    folder = write_run()
    (folder / "process.json").write_text('{"boot": "elsewhere", "process": 7}')
    wrote(folder, seconds_ago)
    found = status(folder)
    assert (found.state, found.is_alive) == (state, None)
    assert ("nobody can tell whether the run lives" in " ".join(shown(found).split())) == (state == "unknown")


@pytest.mark.parametrize("name", ["rounds.csv", "clients.csv", "events.jsonl", "checkpoint", "comparison/rounds.csv"])
def test_whatever_a_run_writes_is_a_sign_of_life(write_run: WriteRun, name: str) -> None:
    folder = write_run(seconds_ago=1000)
    (folder / "comparison").mkdir()
    path = folder / name
    path.touch()
    os.utime(path, (NOW - 1, NOW - 1))
    assert status(folder).state == "running"


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        *((engine, "fedpriv run --resume '{}'") for engine in ("stacked", "in-process", "ray")),
        ("flower", "fedpriv coordinator run COORDINATOR -c 'resume={}'"),
    ],
)
def test_a_run_is_resumed_by_the_command_of_its_engine(write_run: WriteRun, engine: str, command: str) -> None:
    folder = write_run("my run", seconds_ago=1000, engine=engine)
    assert status(folder).resume_command == command.format(folder)
    found = status(write_run("no checkpoint", seconds_ago=1000, checkpoints=False, engine=engine))
    assert (found.state, found.resume_command, found.checkpoint_round) == ("interrupted", None, None)


def test_the_figures_are_those_of_the_tables_without_half_lines_and_no_file_changes(write_run: WriteRun) -> None:
    folder = write_run()
    for name in ("rounds.csv", "clients.csv"):
        with (folder / name).open("a") as file:
            file.write("4,3,3")
    before = {path: path.stat().st_mtime for path in folder.rglob("*")}
    found = status(folder)
    assert {path: path.stat().st_mtime for path in folder.rglob("*")} == before
    assert (found.num_rounds, found.num_rounds_planned, found.checkpoint_round) == (3, 10, 3)
    assert found.test_accuracy == 0.125 + 0.1 * 3
    assert (found.epsilon_local_max, found.epsilon_rho_max) == (0.1 * 3 * 3, 0.2 * 3 * 3)
    assert (found.epsilon_aggregate_max, found.aggregate_view_holds) == (None, False)
    assert (found.delta_max, found.accountant) == (1e-5, "rdp")
    assert (found.bytes_up, found.bytes_down, found.seconds) == (9000, 18000, 16.0)
    assert found.run_id == "5eed"


def test_the_aggregate_view_is_shown_where_it_holds(write_run: WriteRun) -> None:
    path = write_run() / "rounds.csv"
    path.write_text(path.read_text().replace(",,9000", "").replace(",,3000,", ",0.75,3000,"))
    found = status(path.parent)
    assert (found.epsilon_aggregate_max, found.aggregate_view_holds) == (0.75, True)
    assert "aggregate 0.750" in shown(found)


def test_each_client_has_its_last_status_and_how_often_each_occurred(write_run: WriteRun) -> None:
    first, second, _ = status(write_run(rounds=2)).clients
    assert (first.name, first.num_records, first.last_round, first.status) == ("St. Anna", 1200, 2, "ok")
    assert first.status_counts == {"ok": 2}
    assert first.epsilon_local == 0.1 * 2
    assert (second.status, second.detail, second.status_counts) == ("failed", "training failed", {"ok": 1, "failed": 1})
    assert second.delta == 1e-5 / 2
    found = status(write_run("not asked yet", rounds=0))
    assert [client.name for client in found.clients] == list(NAMES.values())
    assert {(each.last_round, each.status, each.epsilon_local) for each in found.clients} == {(None, None, None)}
    assert "not asked" in shown(found)


@pytest.mark.parametrize("rounds", [0, 2])
def test_what_is_charged_counts_before_its_round_is_over(write_run: WriteRun, rounds: int) -> None:
    """A run that ended within a round has paid for it, and its tables say nothing of that."""
    folder = write_run(rounds=rounds, seconds_ago=600)
    before = status(folder)
    assert before.state == "interrupted"
    event = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=1.0)
    release = Release(event=event, rho_bar=0.5)
    with Ledger(folder / files.LEDGER) as ledger:
        ledger.register_all([DataSet(id="d0", client="0", num_records=SIZES[0], delta=1e-5)])
        charge(ledger, "d0", *[release] * (rounds + 1), run="5eed")
    found = status(folder)
    paid = epsilon_of([event.with_count(rounds + 1)], 1e-5, "rdp").epsilon
    assert found.clients[0].epsilon_local == pytest.approx(paid)
    assert found.epsilon_local_max == max(paid, before.epsilon_local_max)
    assert found.clients[1] == before.clients[1]
    assert f"local {format_bound(found.epsilon_local_max)}" in shown(found)


def test_a_look_keeps_of_each_registration_what_it_needs(write_run: WriteRun) -> None:
    folder = write_run(rounds=1)
    write_checkpoint(folder, 1, {})
    whole, kept = files.read_values(folder / files.REGISTRATIONS), RunFolder(folder).registrations
    assert kept.keys() == whole.keys()
    for client, each in kept.items():
        assert each == {key: whole[client][key] for key in ("client", "name", "num_records", "data_set")}


def test_who_is_skipped_is_told_with_what_ends_it(write_run: WriteRun) -> None:
    folder = write_run()
    write_checkpoint(folder, 3, {}, skipped=(1,))
    assert [client.skipped for client in status(folder).clients] == [False, True, False]
    assert "General (1): its node stopped answering" in shown(status(folder))


def test_who_retired_is_known_from_the_checkpoint_and_from_the_last_reply(write_run: WriteRun) -> None:
    folder = write_run()
    reason = "budget_epsilon = 2 allows no further round"
    write_checkpoint(folder, 3, {2: reason})
    path = folder / "clients.csv"
    path.write_text(path.read_text().replace("3,1,900,ok,,", "3,1,900,retired,its budget is spent,"))
    found = status(folder)
    assert [client.retired for client in found.clients] == [None, "its budget is spent", reason]
    assert found.as_dict()["retired"][1] == {"client": 2, "reason": reason}
    assert f"Hillside (2): {reason}" in shown(found)


@pytest.mark.parametrize("missing", ["config.toml", "rounds.csv", "clients.csv"])
def test_a_folder_that_holds_no_run_is_one_line_and_exit_code_2(write_run: WriteRun, missing: str) -> None:
    folder = write_run()
    (folder / missing).unlink()
    said = f"error: {folder}: holds no run, {missing} is missing; give the folder that a run writes\n"
    assert fedpriv("status", folder, code=2) == ("", said)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("rounds.csv", "test_accuracy", "accuracy", "column test_accuracy is missing"),
        ("rounds.csv", "\n2,3,", "\ntwo,3,", "line 4 is damaged"),
        ("clients.csv", "\n2,0,1200,ok", "\n2,zero,1200,ok", "line 5 is damaged"),
        ("config.toml", "rounds = 10", "rounds = = 10", "not valid toml"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(write_run: WriteRun, name, old, new, message) -> None:
    path = write_run() / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=f"{name}: {message}") as error:
        status(path.parent)
    assert "\n" not in str(error.value)


def test_an_unreadable_checkpoint_hides_nothing_else(write_run: WriteRun) -> None:
    folder = write_run()
    (folder / "checkpoint" / "round-000003" / "state.json").write_text("{")
    (folder / "checkpoint" / "round-000004.tmp").mkdir()
    found = status(folder)
    assert (found.checkpoint_round, found.run_id, len(found.clients)) == (3, None, 3)


def test_json_is_one_object_of_full_precision_under_snake_case_keys(write_run: WriteRun) -> None:
    folder = write_run()
    (folder / "events.jsonl").write_text(event("round_done", epsilon_local_max=math.inf))
    found = as_json("status", folder)
    assert found["epsilon_rho_max"] == 0.2 * 3 * 3
    assert found["events"][0]["epsilon_local_max"] == "inf"
    keys = {"client", "num_records", "last_round", "status_counts", "epsilon_local", "delta"}
    assert found["clients"][0].keys() >= keys
    assert all(key == key.lower() and key.isidentifier() for key in found)


def finished(folder: Path, **changes: Any) -> Path:
    """The run's folder with a summary."""
    clients = [
        {"client": c, "name": NAMES[c], "num_records": n, "epsilon_local": 0.05 * c, "delta": 1e-5, "retired": None}
        for c, n in SIZES.items()
    ]
    summary = {"run_id": "5eed", "clients": clients, "accountant": "pld", "seconds": 99.5, "stopped_early": None}
    summary |= {"epsilon_local_max": 0.1, "epsilon_rho_max": 0.4, "epsilon_aggregate_max": None, "delta_max": 1e-5}
    summary |= {"aggregate_objections": ["local_steps = 3: needs 1"]}
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    return folder


def test_a_finished_run_shows_its_final_figures(write_run: WriteRun) -> None:
    found = status(finished(write_run(seconds_ago=10**6)))
    assert (found.state, found.resume_command, found.accountant, found.seconds) == ("finished", None, "pld", 99.5)
    assert (found.epsilon_local_max, found.epsilon_rho_max, found.delta_max) == (0.1, 0.4, 1e-5)
    assert (found.epsilon_aggregate_max, found.aggregate_view_holds) == (None, False)
    assert [client.epsilon_local for client in found.clients] == [0.0, 0.05, 0.1]
    assert (found.warnings, found.majority_accuracy, found.accuracy_standard_error) == ((), None, None)
    assert "warning" not in shown(found)


def test_a_finished_run_shows_its_warnings_its_early_end_and_what_compares(write_run: WriteRun) -> None:
    quality = {"accuracy": 0.6, "accuracy_standard_error": 0.011, "majority_accuracy": 0.59, "warnings": ["too low"]}
    quality |= {"stopped_early": "round 4: 0 of 3 clients are left"}
    found = status(folder := finished(write_run(), **quality))
    assert "60.0% ± 1.1%, largest class 59.0%" in shown(found)
    assert "warning: too low" in shown(found)
    assert "ended early  round 4: 0 of 3 clients are left" in shown(found)
    assert found.as_dict()["warnings"] == ("too low",)
    found = status(finished(folder, epsilon_local_max="inf", aggregate_objections=[]))
    assert found.epsilon_local_max == found.epsilon_aggregate_max == math.inf
    assert "local ∞" in shown(found)
    assert as_json("status", folder)["epsilon_local_max"] == "inf"

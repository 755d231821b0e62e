"""A finished run from Python: what its frames hold, and a page that text from data files cannot take over."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

import fedpriv
from fedpriv.errors import InputError, LedgerError
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.ledger import entries_frame, spending_frame, statement_text
from tests.cli.inputs import write_ledger
from tests.runs.show.conftest import write_finished_run

EVENT = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.1)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_finished_run(tmp_path / "run", num_clients=3, num_rounds=4, changes={"probe_accuracy": 0.9})
    write_ledger(tmp_path / "run" / "ledger.sqlite", EVENT)
    return tmp_path / "run"


def change(folder: Path, **summary: object) -> fedpriv.Run:
    path = folder.parent / f"changed-{'-'.join(summary)}"
    write_finished_run(path, num_clients=3, num_rounds=4, changes=summary)
    return fedpriv.open_run(path)


def test_the_frames_are_the_files_and_a_frame_that_somebody_changes_changes_nothing_else(folder):
    run = fedpriv.open_run(folder)
    written = pd.read_csv(folder / "rounds.csv").set_index("round")
    assert run.rounds["epsilon_local_max"].tolist() == pytest.approx(written["epsilon_local_max"].tolist())
    assert run.rounds.index.tolist() == [0, 1, 2, 3, 4]
    assert len(run.client_rounds) == 12
    assert run.clients["epsilon_local"].tolist() == [each["epsilon_local"] for each in run.summary["clients"]]
    assert run.epsilon() == run.clients["epsilon_local"].max()
    assert run.delta == 1e-5
    assert len(run.ledger) == 10
    frame = run.clients
    frame.loc[:, "epsilon_local"] = 0.0
    run.summary["clients"].clear()
    assert run.clients["epsilon_local"].min() > 0
    assert len(run.summary["clients"]) == 3
    with pytest.raises(AttributeError):
        run.folder = folder.parent


def test_the_report_has_a_row_for_each_model_and_the_cost_of_the_private_one_alone(folder):
    report = fedpriv.open_run(folder).report()
    assert report.index.tolist() == ["private", "without noise", "linear probe", "untrained"]
    assert report["accuracy"].tolist() == [0.871, 0.924, 0.9, 0.131]
    assert report["epsilon_local"].notna().tolist() == [True, False, False, False]
    assert report.loc["without noise", "note"] == "z = 0, clipping kept"


def test_a_report_is_printed_whole_however_narrow_the_terminal(folder):
    quality = {"probe_accuracy": 0.9, "baselines": {"num_trained_on": 20_000, "num_available": 60_614, "folds": None}}
    report = change(folder, macro_f1=0.85, **quality).report()
    with pd.option_context("display.width", 40, "display.max_colwidth", 10, "display.max_columns", 3):
        for text in (repr(report), report._repr_html_()):
            assert all(column in text for column in (*report.columns, "20,000 of 60,614 records, no privacy"))
            assert "..." not in text


def test_a_view_that_does_not_hold_and_a_run_that_is_not_finished_are_refused_with_the_reason(folder):
    run = fedpriv.open_run(folder)
    with pytest.raises(InputError, match=r"aggregate.*local_steps = 3: needs 1"):
        run.epsilon("aggregate")
    with pytest.raises(InputError, match="view = 'server': must be one of local, rho, aggregate"):
        run.epsilon("server")
    (folder / "summary.json").unlink()
    with pytest.raises(InputError, match=r"summary\.json: no such file"):
        fedpriv.open_run(folder)
    with pytest.raises(InputError, match="no such folder"):
        fedpriv.open_run(folder / "nowhere")


def test_what_a_data_file_calls_itself_cannot_run_in_a_notebook(folder):
    attack = "<img src=x onerror=alert(1)>"
    summary = fedpriv.open_run(folder).summary
    clients = [each | {"name": attack} for each in summary["clients"]]
    run = change(folder, clients=clients, warnings=[attack], labels=[attack, "b"])
    page = run._repr_html_()
    assert "<img" not in page
    assert page.count("&lt;img") == len(clients) + 1
    assert run.folder.as_posix() not in page


def test_an_epsilon_is_shown_rounded_up_with_its_delta_and_a_run_without_privacy_says_so(folder):
    run = change(folder, epsilon_local_max=1.8213)
    assert all("ε = 1.83 at δ = 1e-5" in shown for shown in (repr(run), run._repr_html_()))
    run = change(folder, private=False, epsilon_local_max=None)
    assert all("NOT PRIVATE" in shown for shown in (repr(run), run._repr_html_()))
    assert "ε = ∞" in repr(run)
    assert "\n" not in repr(run)
    assert run.epsilon() == math.inf


def test_a_ledger_becomes_a_frame_only_if_its_chain_is_intact(folder):
    path = folder / "ledger.sqlite"
    assert entries_frame(path)["phase"].value_counts().to_dict() == {"charged": 8, "registered": 2}
    spent = spending_frame(path, budget_epsilon=2.0)
    expected = epsilon_of([EVENT.with_count(4)], 1e-5).epsilon
    assert spent["epsilon_local"].tolist() == pytest.approx([expected] * 2)
    assert (spent["remaining_rounds"] > 0).all()
    assert "PRIVACY STATEMENT" in statement_text(path, "0")
    # The ledger of another day, under the head of this one.
    write_ledger(folder / "other.sqlite", EVENT)
    shutil.copy(folder / "other.sqlite", path)
    for read in (entries_frame, spending_frame, lambda each: statement_text(each, "0")):
        with pytest.raises(LedgerError):
            read(path)


def test_a_ledger_names_its_holders_as_the_run_knows_them(folder, tmp_path):
    path = folder / "ledger.sqlite"
    known = json.dumps({"0": {"client": 0, "data_set": spending_frame(path)["data_set"][0], "name": "St. Anna"}})
    with pytest.raises(InputError, match=r"holds no registrations\.json"):
        spending_frame(path, run=tmp_path)
    (tmp_path / "registrations.json").write_text(known)
    assert spending_frame(path, run=tmp_path)["name"].fillna("").tolist() == ["St. Anna", ""]
    assert "St. Anna" in statement_text(path, "0", run=str(tmp_path))
    assert "St. Anna" not in statement_text(path, "0")
    (folder / "registrations.json").write_text(known)
    assert "St. Anna" in statement_text(path, "0")

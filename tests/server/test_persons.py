"""Whole runs that protect persons: they cost what as many records would, and say whom an epsilon protects."""

import io
import json
import re
import tomllib

import pandas as pd
import pytest
from rich.console import Console

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data import load
from fedpriv.models.serving.http.cards import Cards
from fedpriv.models.variants import folders
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.risk import risk_of
from fedpriv.privacy.ledger.statement import statement_text
from fedpriv.runs import RunFolder
from fedpriv.runs.figures import figures
from fedpriv.runs.show._progress_page import RunPage, Timing
from fedpriv.runs.show._terminal import show_status
from tests.cli.command_line import as_json
from tests.events import gaussian
from tests.marks import slow
from tests.privacy.ledger.test_evidence import failures, verified
from tests.server.parts import run, summary
from tests.tiny import with_persons

Z_EVALUATION = 4.0
# At each site, where a person has three records: site-0 has three of seven rows.
NUM_PERSONS = [35, 23, 23]


def sizes_of(summary: dict) -> list[int]:
    return [client["num_records"] for client in summary["clients"]]


@pytest.fixture(scope="module")
def skewed(small_run, table, tmp_path_factory):
    """A run of persons with three records each and an evaluation, its configuration and its folder."""
    folder = tmp_path_factory.mktemp("persons")
    values = small_run | {"data": str(with_persons(table, folder / "t.csv", 3)), "person_column": "patient"}
    values |= {"evaluation_noise_multiplier": Z_EVALUATION, "ledger": str(folder / "ledger.sqlite")}
    out = run(values, folder / "run", max_records_per_person=2)
    return summary(out), values, out


def test_persons_of_one_record_each_make_the_same_run_as_records(small_run, table, tmp_path):
    values = small_run | {"data": str(with_persons(table, tmp_path / "t.csv", 1)), "table_checks": "warn", "rounds": 1}
    one = summary(run(values, tmp_path / "records"))
    other = summary(run(values, tmp_path / "persons", person_column="patient"))
    assert (one["unit"], other["unit"]) == ("record", "person")
    assert sizes_of(one) == sizes_of(other)
    figures = [pd.read_csv(tmp_path / kind / "rounds.csv").drop(columns="seconds") for kind in ("records", "persons")]
    assert figures[0].equals(figures[1])


def test_a_persons_epsilon_is_that_of_so_many_records_as_there_are_persons(skewed):
    found, _, _ = skewed
    assert found["unit"] == "person"
    assert sizes_of(found) == NUM_PERSONS
    for client in found["clients"]:
        events = [gaussian(1.0, 8 / client["num_records"], 4, unit="person"), gaussian(Z_EVALUATION, unit="person")]
        assert client["epsilon_local"] == pytest.approx(epsilon_of(events, client["delta"]).epsilon)


def test_statement_status_and_pages_say_persons_and_a_ledger_never_composes_records_with_them(skewed, tmp_path):
    _, values, out = skewed
    text = statement_text(values["ledger"], "0")
    assert "persons when it was registered" in " ".join(text.split())
    assert "one person of the client, with all of their records there" in text
    assert "a person with several records here" not in text
    folder, console = RunFolder(out), Console(width=80, record=True, highlight=False, file=io.StringIO())
    show_status(folder, console)
    status, live = console.export_text(), RunPage()(out, Timing(written=1))
    assert max(map(len, status.splitlines())) <= 80
    assert re.search("^client +persons +round", status, re.MULTILINE)
    assert "of a person at δ = 1e-5, by pld" in status
    assert '<th scope="col">persons</th>' in live
    assert "ε of a person on the local view" in live
    report = " ".join((out / "report.html").read_text().split())
    assert "how many persons it holds" in report
    assert ">persons</th>" in report
    (spent,) = [figure.text for figure in figures(folder, "closing") if figure.key == "spent"]
    assert re.match(r"ε \S+ of a person on the local view", spent)
    with pytest.raises(InputError, match=r"another unit|num_records"):
        run(values | {"person_column": "", "unit": "record"}, tmp_path / "out")


def test_sums_of_persons_are_charged_as_persons(small_run, table, tmp_path):
    values = small_run | {"data": str(with_persons(table, tmp_path / "t.csv", 3)), "person_column": "patient"}
    sums = {"local_steps": 1, "rounds": 1, "secure_aggregation": True, "min_clients": 3}
    found = summary(run(values, tmp_path / "sum", **sums))
    assert found["unit"] == "person"
    assert found["epsilon_aggregate_max"] < found["epsilon_local_max"]


@pytest.fixture(scope="module")
def shared(small_run, table, tmp_path_factory):
    """The keys of a run of persons with records at each of the three sites."""
    path = tmp_path_factory.mktemp("shared") / "t.csv"
    return small_run | {"data": str(with_persons(table, path, 3, at_all_sites=True)), "person_column": "patient"}


def test_persons_at_more_clients_than_said_are_refused(shared, tmp_path):
    with pytest.raises(InputError, match=r"more than 1 client, at up to 3; holders_per_person = 3"):
        load(parse(shared))
    with pytest.raises(InputError, match="more than 2 clients"):
        load(parse(shared | {"holders_per_person": 2}))
    with pytest.raises(InputError, match="there are 3 clients"):
        run(shared, tmp_path / "run", holders_per_person=4)


@pytest.mark.parametrize("evaluation", [*slow(None), Z_EVALUATION])
def test_the_target_is_kept_for_a_person_at_several_clients(shared, tmp_path, evaluation):
    changes = {"noise_multiplier": "by recipe", "target_epsilon": 3.0, "evaluation_noise_multiplier": evaluation}
    found = summary(run(shared, tmp_path / "run", holders_per_person=3, **changes))
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["noise_multiplier"]
    events = [gaussian(written, 8 / size, 4, unit="person") for size in sizes_of(found)]
    if evaluation:
        events += [gaussian(evaluation, count=3, unit="person")]
    delta = min(client["delta"] for client in found["clients"])
    person = epsilon_of(events, delta).epsilon
    assert 2.99 < person <= 3.0
    assert found["epsilon_local_max"] == pytest.approx(person)
    assert found["mu"] == pytest.approx(risk_of(events, delta).mu)
    assert max(client["epsilon_local"] for client in found["clients"]) < 2.5
    rounds = pd.read_csv(tmp_path / "run" / "rounds.csv")["epsilon_local_max"]
    assert (rounds <= 3.0).all()
    assert found["holders_per_person"] == 3
    # Who serves or publishes the model says the same, but for an evaluation, which no model descends from.
    guarantee = folders.read(tmp_path / "run" / "variants" / "global").guarantee()
    secure = found | {"noise_source": "secure"}  # else mu is infinite
    (tmp_path / "run" / "summary.json").write_text(json.dumps(secure))
    card = Cards(tmp_path / "run").card("global")
    of_model = epsilon_of(events[:3], delta).epsilon
    assert (guarantee.epsilon, card["epsilon"]) == (pytest.approx(of_model), pytest.approx(of_model))
    assert card["mu"] == pytest.approx(risk_of(events[:3], delta).mu)
    assert "at up to 3 clients" in card["adjacency"]


# Every day the test above holds a person's risk at several clients against that of all their releases.
@pytest.mark.slow
def test_a_target_risk_is_that_of_a_person_at_several_clients(shared, tmp_path):
    changes = {"noise_multiplier": "by recipe", "target_risk": "tpr=0.2@fpr=0.01", "rounds": 1, "local_steps": 1}
    found = summary(run(shared, tmp_path / "run", holders_per_person=3, **changes))
    assert 0.19 < found["tpr_at_fpr"]["0.01"] <= 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"person_column": ""}, "is about persons"),
        ({"holders_per_person": 9}, "at most 8"),
        ({"partition": "iid"}, "gives each person to one client"),
        ({"budget_epsilon": [3.0]}, "counts the account of one client"),
        ({"secure_aggregation": True, "local_steps": 1, "min_clients": 3}, "counts the account of one client"),
    ],
)
def test_what_counts_one_client_is_refused_beside_several(shared, changes, message):
    with pytest.raises(InputError, match=message):
        parse(shared | {"holders_per_person": 2} | changes)


# Every day tests/privacy/ledger/test_evidence.py holds the verifier's sum over a person's holders against ours.
@pytest.mark.slow
def test_the_evidence_of_persons_at_several_clients_is_confirmed_and_a_smaller_figure_is_not(shared, tmp_path):
    folder, bundle = tmp_path / "run", tmp_path / "run.zip"
    run(shared, folder, holders_per_person=2, noise_multiplier=2.0, table_checks="warn", rounds=1)
    as_json("evidence", folder, "--out", bundle)
    code, lines = verified(bundle)
    assert code == 0, lines
    assert any("(any 2, for a person at so many)" in line for line in lines)
    found = summary(folder)
    found["epsilon_local_max"] = max(client["epsilon_local"] for client in found["clients"])
    (folder / "summary.json").write_text(json.dumps(found))
    as_json("evidence", folder, "--out", tmp_path / "less.zip")
    code, lines = verified(tmp_path / "less.zip")
    assert code == 1
    (wrong,) = failures(lines)
    assert "(any 2, for a person at so many) in the run's summary: epsilon_local" in wrong

"""Runs on private tables: nothing is evaluated on holders' records, or only through noised counts that are paid for."""

import math
from pathlib import Path

import pandas as pd
import pytest

from fedpriv.config import BY_RECIPE, parse
from fedpriv.errors import InputError
from fedpriv.learning.training.private_evaluation import count
from fedpriv.learning.training.workbench import workbench
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.reader import reading, verify_with_head
from fedpriv.runs._folder import QUALITY_KEYS
from server import checkpoint
from tests.events import gaussian
from tests.marks import slow
from tests.notes import Notes
from tests.server.parts import events_charged, run, summary

Z = 2.0
EVALUATION = gaussian(Z)


def assert_compared_with_nothing(found: dict[str, object]) -> None:
    assert {key: found[key] for key in QUALITY_KEYS} == {**dict.fromkeys(QUALITY_KEYS), "warnings": []}


@pytest.fixture(scope="module")
def private(small_run) -> dict[str, object]:
    """A private table under secure noise."""
    return {key: value for key, value in small_run.items() if key not in ("simulate", "comparison")}


def test_a_private_run_without_a_test_set_has_no_accuracy_and_variants_that_cannot_be_validated(private, tmp_path):
    folder = run(private, tmp_path / "untested", rounds=1)
    found = summary(folder)
    assert [found[name] for name in ("accuracy", "accuracy_initial", "accuracy_non_private")] == [None] * 3
    assert found["private"] is True
    assert_compared_with_nothing(found)
    assert pd.read_csv(folder / "rounds.csv")[["test_accuracy", "test_loss"]].isna().all(axis=None)
    assert not (folder / "comparison").exists()
    page = (folder / "report.html").read_text()
    assert "No accuracy was measured" in page
    assert "Test accuracy" not in page
    assert sum(map(len, workbench(parse(private)).data.clients)) == 240  # nothing was held back
    events = [event for events in events_charged(folder / "ledger.sqlite").values() for event in events]
    assert {event.noise_multiplier for event in events} == {1.0}
    with pytest.raises(InputError, match="test_data: this run's server has no test set"):
        AdapterEvaluator.of_run(folder)


def test_every_ledger_is_charged_the_evaluation_and_the_summary_holds_an_estimate_with_its_interval(private, tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    folder = run(private, tmp_path / "run", ledger=str(ledger), evaluation_noise_multiplier=Z)
    found = summary(folder)
    sizes = [client["num_records"] for client in found["clients"]]
    assert sum(sizes) == 240  # N_k counts the records that are set aside
    with reading(ledger) as db:
        verify_with_head(db, ledger)
    for client, size in zip(found["clients"], sizes, strict=True):
        events = [gaussian(1.0, 8 / size, 4), EVALUATION]
        assert client["epsilon_local"] == pytest.approx(epsilon_of(events, client["delta"]).epsilon)
        assert client["epsilon_rho"] >= client["epsilon_local"]
        assert client["rounds"] == 2
        assert EVALUATION in events_charged(ledger)[client["name"]]
    nodes = list(Path(f"{ledger}.nodes").glob("*.sqlite"))
    assert len(nodes) == 3
    for node in nodes:
        (events,) = events_charged(node).values()
        assert EVALUATION in events
    low, high = found["accuracy_interval"]
    assert 0 <= low <= found["accuracy"] <= high <= 1
    assert (found["evaluation_noise_multiplier"], found["num_evaluated_clients"]) == (Z, 3)
    assert found["accuracy_initial"] is None
    assert_compared_with_nothing(found)
    page = (folder / "report.html").read_text()
    assert "The accuracy is an estimate" in page
    assert "Private evaluation" in page
    assert pd.read_csv(folder / "rounds.csv")["test_accuracy"].isna().all()


def test_no_record_is_both_trained_on_and_evaluated(private):
    bench = workbench(parse(private | {"evaluation_noise_multiplier": Z}))
    aside = [bench.set_aside(client) for client in range(3)]
    assert [len(bench.client(c)) + len(aside[c]) for c in range(3)] == [len(c) for c in bench.data.clients]
    assert 20 < sum(map(len, aside)) < 80
    plain = workbench(parse(private))
    assert [len(plain.client(c)) for c in range(3)] == [len(c) for c in plain.data.clients]
    assert sum(len(plain.set_aside(c)) for c in range(3)) == 0


@pytest.mark.parametrize("engine", [*slow("in-process"), "stacked"])
def test_with_hardly_any_noise_the_estimate_is_the_accuracy_of_the_final_model(small_run, tmp_path, engine):
    # Without noise in its rounds either, no loss distribution is composed for it.
    settings = small_run | {"evaluation_noise_multiplier": 0.001, "noise_multiplier": 0.0, "engine": engine}
    folder, again = (run(settings, tmp_path / name) for name in ("run", "again"))
    found, bench = summary(folder), workbench(parse(settings))
    adapter = checkpoint.read_last(folder, bench.initial).model.adapter
    exact = sum(count(bench.model, adapter, {}, bench.tokenize(bench.set_aside(c))) for c in range(3))
    assert found["accuracy"] == pytest.approx(float(exact[0] / exact.sum()), abs=1e-3)
    assert found["accuracy_interval"][1] - found["accuracy_interval"][0] < 1e-2
    assert summary(again)["accuracy"] == found["accuracy"]


@pytest.mark.parametrize("view", ["local", *slow("rho")])
def test_a_target_includes_the_evaluation_and_is_nearly_used_up(private, tmp_path, view):
    settings = {"target_epsilon": 4.0, "noise_multiplier": BY_RECIPE, "privacy_view": view}
    found = summary(run(private, tmp_path / "run", **settings, evaluation_noise_multiplier=6.0))
    # The `rho` view allows for clients that drop out, and here none does.
    assert {"local": 0.98, "rho": 0.95}[view] * 4 <= found[f"epsilon_{view}_max"] <= 4


def test_whoever_sees_the_sums_alone_still_sees_each_clients_counts(private, tmp_path):
    hidden = {"secure_aggregation": True, "min_clients": 3, "local_steps": 1, "rounds": 1}
    found = summary(run(private, tmp_path / "run", **hidden, evaluation_noise_multiplier=Z))
    assert not found["aggregate_objections"]
    alone = epsilon_of([EVALUATION], 1e-5).epsilon
    assert all(alone < client["epsilon_aggregate"] < client["epsilon_local"] for client in found["clients"])


def test_an_evaluation_that_costs_the_whole_target_is_refused_beforehand(private, tmp_path):
    with pytest.raises(InputError, match=r"= 2\.0: the evaluation alone costs epsilon 1\.99"):
        run(private, tmp_path / "run", target_epsilon=1.5, noise_multiplier=BY_RECIPE, evaluation_noise_multiplier=Z)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("view", "budget"), [("local", 3.6), pytest.param("rho", 9.0, marks=pytest.mark.slow)])
def test_a_budget_keeps_what_the_evaluation_costs(private, tmp_path, view, budget):
    settings = {"rounds": 6, "budget_epsilon": budget, "privacy_view": view}
    found = summary(run(private, tmp_path / "run", **settings, evaluation_noise_multiplier=Z))
    assert found["num_evaluated_clients"] == 3
    assert min(client["rounds"] for client in found["clients"]) < 6
    for client in found["clients"]:
        assert client[f"epsilon_{view}"] <= budget
        if view == "local" and client["rounds"] < 6:
            more = gaussian(1.0, 8 / client["num_records"], 2 * client["rounds"] + 2)
            assert epsilon_of([more, EVALUATION], client["delta"]).epsilon > budget, "no round is given up in vain"
    assert all(EVALUATION in events for events in events_charged(tmp_path / "run" / "ledger.sqlite").values())


def test_clients_whose_earlier_spending_leaves_no_room_are_not_asked(private, tmp_path):
    sizes = {"partition": "sizes", "client_column": "", "client_sizes": [200, 40], "batch_size": 4, "rounds": 1}
    shared = private | sizes | {"ledger": str(tmp_path / "ledger.sqlite"), "evaluation_noise_multiplier": Z}
    first = summary(run(shared, tmp_path / "first"))
    spent = {client["client"]: client["epsilon_local"] for client in first["clients"]}
    assert spent[0] < spent[1] < 3
    folder = run(shared, tmp_path / "second", notes := Notes(), budget_epsilon=[20.0, 3.0])
    assert summary(folder)["num_evaluated_clients"] == 1
    assert any("the evaluation covers 1 of 2 clients" in note for note in notes.notes)


@pytest.mark.parametrize("ledger", [True, False], ids=["nodes that repeat their reply", "nodes without a ledger"])
def test_a_run_that_died_after_its_evaluation_pays_again_only_for_a_new_release(private, tmp_path, ledger):
    settings = private | {"evaluation_noise_multiplier": Z, "rounds": 1}
    if ledger:
        settings |= {"ledger": str(tmp_path / "ledger.sqlite")}
    folder = run(settings, tmp_path / "run")
    before = summary(folder)
    (folder / "summary.json").unlink()
    after = summary(run(settings, folder, resume=str(folder)))
    of_clients = events_charged(Path(str(settings.get("ledger", folder / "ledger.sqlite")))).values()
    assert len(of_clients) == 3
    for events in of_clients:
        assert events.count(EVALUATION) == 1 or not ledger
        assert sum(event.count for event in events if event.noise_multiplier == Z) == (1 if ledger else 2)
    assert (after["accuracy"] == before["accuracy"]) == ledger
    assert (after["epsilon_local_max"] == before["epsilon_local_max"]) == ledger
    assert math.isfinite(after["epsilon_local_max"])

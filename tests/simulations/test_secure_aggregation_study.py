"""The study of secure aggregation: a cell is a whole federation, and its tables say what its lines say."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import sqrt
from pathlib import Path

import pytest

from fedpriv.learning.training.workbench import forget
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from simulations.studies import _colluders as colluders
from simulations.studies import corpora
from simulations.studies import secure_aggregation as tables
from simulations.studies._colluders import Sum
from simulations.studies.harness import Results, append, lines
from simulations.studies.secure_aggregation import AGGREGATE, ARMS, HEAD, METHODS, SumCell, cells, run_all
from tests.simulations.tiny_corpus import tiny_corpus

RESULTS = Path(__file__).resolve().parents[2] / "results"
RUNS = "runs.jsonl"
CELL = SumCell(corpus="tiny", arm=AGGREGATE, epsilon=8.0)


@pytest.fixture
def tiny(tiny_bert, monkeypatch):
    """A corpus of three clients, and a model that takes seconds."""

    monkeypatch.setitem(corpora.CORPORA, "tiny", tiny_corpus())
    monkeypatch.setitem(METHODS, HEAD, {**METHODS[HEAD], "model": str(tiny_bert), "layers": "last-1", "rounds": 3})
    forget()


def test_arms_are_federations_with_one_epsilon_and_one_noise_in_all_and_are_run_once(tiny, tmp_path, capsys):
    chosen = [replace(CELL, arm=arm) for arm in ARMS]
    run_all(tmp_path / RUNS, tmp_path, tmp_path, chosen)
    local, summed, central = lines(tmp_path / RUNS)
    assert [line["key"] for line in (local, summed, central)] == [cell.key for cell in chosen]
    assert 7.5 < local["epsilon_local_max"] <= 8
    assert 7.5 < central["epsilon_local_max"] <= 8
    assert 7.5 < summed["epsilon_aggregate_max"] <= 8 < summed["epsilon_local_max"]
    assert [line["num_clients"] for line in (local, summed, central)] == [3, 3, 1]
    over = sqrt(3) * summed["noise_multiplier"] / central["noise_multiplier"]
    assert over == pytest.approx(sqrt(3 / 2), rel=1e-3), "the third reads the sum"
    assert {"fedpriv", "torch"} <= summed["software"].keys()
    before = (tmp_path / RUNS).read_bytes()
    run_all(tmp_path / RUNS, tmp_path, tmp_path, chosen)
    assert (tmp_path / RUNS).read_bytes() == before


def test_a_corpus_without_its_file_is_skipped_with_a_message(tmp_path, capsys):
    run_all(tmp_path / RUNS, tmp_path, tmp_path / "absent", [replace(CELL, corpus="MedQuAD by source")])
    assert "holds no medquad" in capsys.readouterr().out
    assert not lines(tmp_path / RUNS)


def test_every_cell_has_a_key_of_its_own():
    keys = [cell.key for cell in cells()]
    assert len(set(keys)) == len(keys)


def test_tables_say_what_was_written(tmp_path):
    accuracies = {"local": (0.77, 0.78), "aggregate": (0.80, 0.82), "central": (0.81, 0.82)}
    for arm, found in accuracies.items():
        for seed, accuracy in enumerate(found):
            cell = replace(CELL, corpus="embedded", arm=arm, epsilon=2.0, seed=seed)
            line = {"key": cell.key, "accuracy": accuracy, "epsilon_local_max": 5.0}
            line |= {"noise_multiplier": 10.0 if arm == "central" else 5.0, "num_clients": 4, "majority_accuracy": 0.15}
            append(tmp_path / RUNS, line)
    found = Results.read(tmp_path / RUNS)
    row = "| embedded | 2 | 0.775 (2 runs) | 0.810 (2 runs) (>= 0.79) | 0.815 (2 runs) |"
    compared = "+0.035 ± 0.005 (2 runs) (> 0) | -0.005 ± 0.005 (2 runs) (>= 0) | 5.00 |"
    assert f"{row} {compared}" in tables.accuracies(found)
    assert "default recipe" not in tables.accuracies(found), "not run"
    assert "| none counted | 1.000 | " in tables.assumed(found), "4 clients with half of central's noise each"
    assert "embedded, head, epsilon 2, 33 of 39; " in tables.missing(found)


def test_a_claim_that_is_missed_is_marked():
    cell = replace(CELL, corpus="embedded", epsilon=2.0)
    values = zip(ARMS, (0.7, 0.6, 0.8), strict=True)
    figures = {"epsilon_local_max": 5.0}
    found = Results({"key": replace(cell, arm=arm).key, "accuracy": value, **figures} for arm, value in values)
    assert tables.accuracies(found).count("(**not** >") == 3


@pytest.mark.slow
def test_the_page_has_the_tables_of_its_lines():
    found = Results.read(RESULTS / "secure_aggregation.jsonl")
    page = " ".join((RESULTS / "secure_aggregation.md").read_text().split())
    of_runs = (tables.accuracies, tables.assumed)
    texts = [table(found) for table in of_runs]
    texts.append(tables.by_colluders([5]))
    for row in "\n".join(texts).splitlines():
        assert " ".join(row.split()) in page


def test_on_the_grid_five_clients_pay_hardly_more_than_with_continuous_noise():
    """z = 0.548: 29.9 alone and 8.6 in the sum."""
    five = Sum(clients=5, threshold=5, colluding=0)
    alone, summed = colluders.epsilon_alone(5, 0.548).epsilon, colluders.epsilon_in(five, 0.548).epsilon
    for found, noise, expected in ((alone, 0.548, 29.9), (summed, 0.548 * sqrt(five.honest), 8.6)):
        event = SubsampledGaussian(
            noise_multiplier=noise, sampling_probability=colluders.SAMPLING_PROBABILITY, count=colluders.NUM_STEPS
        )
        continuous = epsilon_of([event], colluders.DELTA).epsilon
        assert continuous == pytest.approx(expected, abs=0.05)
        assert 1 < found / continuous < 1.001


def test_with_all_noise_but_its_own_revealed_a_client_pays_what_its_upload_costs():
    last = Sum(clients=5, threshold=5, colluding=4)
    assert colluders.epsilon_in(last, 1.5) == colluders.epsilon_alone(5, 1.5)
    spent = [colluders.epsilon_in(Sum(clients=5, threshold=5, colluding=c), 1.5).epsilon for c in range(4)]
    assert sorted(spent) == spent
    assert spent[-1] > 1.3 * spent[0]


def test_equal_epsilon_needs_the_noise_that_the_root_says():
    for each in (Sum(clients=5, threshold=4, colluding=1), Sum(clients=30, threshold=30, colluding=10)):
        over = colluders.noise_for(each) * sqrt(each.clients) / colluders.central_noise()
        assert over == pytest.approx(each.noise_over_central, rel=4e-3)
        assert over > each.noise_over_central, "the grid adds to the sensitivity"


def test_sums_of_the_table_leave_no_two_lists_whose_honest_members_differ():
    for each in colluders.sums(5):
        honest = set(range(each.colluding, each.clients))
        signing = [set(chosen) for chosen in combinations(range(each.clients), each.threshold)]
        # Colluders sign both lists; an honest client signs one.
        assert all((one & honest) & other for one in signing for other in signing)

"""Studies with a few tests each: what their cells run, what their tables say, and figures against plain references."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from fedpriv import config as configuration
from simulations.studies import aggregation, federations, integral, lmo, min_batch, persons, plain_lora
from simulations.studies.harness import append, lines
from simulations.studies.language_models import (
    ANSWERS,
    DELTA,
    GRID,
    MESSAGES,
    PLAIN,
    PRIVATE,
    REVIEWS,
    RULES,
    LanguageCell,
    cells,
    configured,
    values_of,
)
from simulations.studies.min_batch import FAMILIES, SEARCHES, failures, margins, scores
from simulations.studies.persons import GROUP, PERSON, RECORD, PersonCell
from simulations.studies.plain_lora import configured as plain_configured

DATA = Path("data")


def test_a_sweeps_runs_leave_a_line_each_and_are_not_run_again(tmp_path, small_run, monkeypatch, capsys):
    values = {**small_run, "rounds": 1, "local_steps": 1, "grid": {"seed": [0]}}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(values))
    monkeypatch.setattr(federations, "SWEEPS", tmp_path)
    runs, out = tmp_path / "lines.jsonl", tmp_path / "out"
    federations.run_sweep("tiny", runs, out)
    (found,) = lines(runs)
    assert (found["key"], found["cell"]) == ("tiny/seed=0", {"seed": 0})
    assert found["bytes_up"] > 0
    assert found["software"]["torch"]
    capsys.readouterr()
    federations.run_sweep("tiny", runs, out)
    assert lines(runs) == [found]
    assert capsys.readouterr().out.startswith(f"{runs}: has these lines; none is run again\ntiny/seed=0: ")
    federations.run_sweep("tiny", runs, out, only=["tiny/seed=1"])
    assert "tiny/seed=0" not in capsys.readouterr().out


@pytest.mark.parametrize(("low", "high", "stddev"), [(1, 1, 2 * 2**0.5), (0.1, 0.5, 2 * 40**0.5)])
def test_noise_is_shown_by_its_standard_deviation(low, high, stddev):
    """Laplace noise of scale 1 has variance 2; with u uniform on [a, b] it is 2 / (a b)."""
    parameters = f'{{"combination": "mixture", "uniform": {{"weight": 1, "low": {low}, "high": {high}}}}}'
    line = {"cell": {"mechanism_parameters": parameters}, "noise_multiplier": 2.0}
    assert lmo._stddev(line) == pytest.approx(stddev)


def test_sweeps_on_real_data_name_files_of_the_data_folder():
    for name in ("aggregation-medquad", "aggregation-sst2"):
        assert set(aggregation.FILES[name]) <= {"data", "test_data"}
        text = (federations.SWEEPS / f"{name}.toml").read_text()
        assert all(f'{key} = "{file}"' in text for key, file in aggregation.FILES[name].items())


def test_a_lead_stands_with_its_target_and_a_missed_one_in_bold(tmp_path):
    accuracies = {PERSON: 0.8, RECORD: 0.82, GROUP: 0.78}
    for method, accuracy in accuracies.items():
        for setting in ("embedded", "MedQuAD by focus"):
            cell = PersonCell(setting=setting, method=method, epsilon=2.0)
            append(tmp_path / "runs.jsonl", {"key": cell.key, "accuracy": accuracy})
    persons.write(tmp_path / "page.md", tmp_path / "runs.jsonl")
    rows = (tmp_path / "page.md").read_text().splitlines()
    leads = {row[2:-2].split(" | ")[0]: row[2:-2].split(" | ")[3:] for row in rows if " | 2 | " in row}
    assert leads["embedded"][:2] == ["-0.020 (one seed) (>= -0.05)", "+0.020 (one seed) (**not** >= 0.05)"]
    assert leads["MedQuAD by focus"][0] == "-0.020 (one seed)"
    assert leads["embedded"][2] == "not run"


def test_a_selection_shows_its_best_mean_by_each_measure_and_says_where_there_is_none():
    mean = {"test": {"accuracy": 0.83, "f1": 0.7}, "train": {"accuracy": 0.84, "f1": 0.72}}
    own = {"data": "Adult", "architecture": "dnn-1", "way": "Adam", "start": "Keras", "seed": 1, "num_subsamples": 22}
    best = {"epochs": 5, "recurrence": 20, "k": 21, "mean": mean}
    line = own | {"size": None, "chosen": None, "by_mean": best, "plain": {"test": {"accuracy": 0.85}}}
    assert integral._tried_table([line]).splitlines()[2] == (
        "| Adam | Keras | 1 | no cluster |  | 20 of 22 (21) | 0.8300 | 0.8500 |"
    )


@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_classifier_learns_its_pooled_records(weights, small_run):
    """Tested on the records that it trains on: whether anything is learned, not how much of it holds elsewhere."""
    values = {key: small_run[key] for key in ("model", "data")} | {"public_data": True, "layers": "all"}
    values |= {"test_data": small_run["data"], "num_clients": 2, "partition": "iid"}
    how = plain_lora.PlainTraining(rate=1e-2, batch=16, epochs=8)
    line = plain_lora.measure(plain_configured(values, weights=weights), how)
    assert line["accuracy"] > line["accuracy_initial"] + 0.2


def config_of(cell: LanguageCell, tmp_path: Path) -> configuration.RunConfig:
    return configured(cell, values_of(cell, DATA, tmp_path), tmp_path / "run")


def test_every_cell_has_a_key_of_its_own_and_a_configuration(tmp_path):
    planned = list(cells())
    assert len({cell.key for cell in planned}) == len(planned)
    # Cells that differ in their seed alone have one configuration, but for that seed.
    for cell in {replace(cell, seed=0): cell for cell in planned if cell.method == PRIVATE}.values():
        config = config_of(cell, tmp_path)
        assert config.seed == cell.seed
        assert (config.target_epsilon or None, config.delta) == (cell.epsilon, cell.delta)
        assert cell.epsilon or config.noise_multiplier == 0


@pytest.mark.parametrize("task", [REVIEWS, MESSAGES])
def test_questions_with_answers_name_columns_answers_and_epsilon_alone(task, tmp_path):
    cell = LanguageCell(task=task, epsilon=8.0)
    config = config_of(cell, tmp_path)
    assert (config.factors, config.aggregation, config.train) == ("answers", "fed-sb", "all")
    of_recipe = {"learning_rate", "clip_norm", "rounds", "rank", "alpha", "layers", "target_modules", "prompt_template"}
    assert of_recipe.isdisjoint(values_of(cell, DATA, tmp_path))


def test_the_grids_differ_in_what_they_vary_alone(tmp_path):
    base = LanguageCell(task=GRID, epsilon=2.0)
    one = config_of(base, tmp_path)
    assert config_of(replace(base, delta=1e-3), tmp_path) == replace(one, delta=1e-3)
    assert config_of(replace(base, rank=16), tmp_path) == replace(one, rank=16)
    assert config_of(replace(base, epsilon=4.0), tmp_path) == replace(one, target_epsilon=4.0)
    assert (one.delta, one.max_records) == (DELTA, 150)
    assert (one.aggregation, one.factors, one.sampling_probability) == ("ffa-lora", "weights", 0.15)
    papers = config_of(replace(base, rule=RULES["DP-LoRA"]), tmp_path)
    assert papers == replace(one, aggregation="dp-lora"), "A is trained too, and nothing else differs"
    assert papers.rule.trains == "lora"


def test_data_sets_of_the_dp_lora_paper_are_trained_by_what_they_have(tmp_path):
    piqa, boolq, fpb = (config_of(LanguageCell(task=task, epsilon=8.0), tmp_path) for task in ("PIQA", "BoolQ", "FPB"))
    assert (piqa.choice_columns, piqa.aggregation, piqa.num_clients) == (("sol1", "sol2"), "ffa-lora", 5)
    assert (boolq.labels, boolq.answers, fpb.factors) == (("False", "True"), ("no", "yes"), "answers")
    letter = config_of(LanguageCell(task="FPB by MiniLM, Algorithm 1", epsilon=2.0, rank=8), tmp_path)
    assert (letter.clipping, letter.rounds, letter.local_steps, letter.batch_size) == ("batch", 50, 1, 8)
    assert (letter.rank, letter.alpha, letter.clip_norm) == (8, 8.0, 10.0)
    assert letter.model == configuration.RunConfig().model


def test_training_in_one_place_reads_the_prompts_of_the_federation(tmp_path):
    cell = LanguageCell(task=MESSAGES, method=PLAIN)
    plain = plain_configured(values_of(cell, DATA, tmp_path), weights=False)
    private = config_of(replace(cell, method=PRIVATE, epsilon=8.0), tmp_path)
    assert plain.prompt_template == private.prompt_template != "{}"
    assert (plain.aggregation, plain.factors, plain.answers) == ("dp-lora", "weights", private.answers)
    free = config_of(LanguageCell(task=ANSWERS, epsilon=8.0), tmp_path)
    assert (free.aggregation, free.factors, free.max_records) == ("ffa-lora", "inputs", 500)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_validation_is_the_same_each_time_and_passes_without_replacements(family):
    one, other = (FAMILIES[family](7) for _ in range(2))
    assert one.num_blocks == other.num_blocks
    assert one(frozenset())
    sets = [frozenset(range(begin, begin + 40)) for begin in range(0, one.num_blocks - 40, 40)]
    answers = [one(positions) for positions in sets]
    assert answers == [other(positions) for positions in sets]
    assert set(answers) == {True, False}


def test_the_drop_is_counted_record_by_record():
    oracle, rows = margins(3), np.arange(100)
    lost = 0
    for record, margin in enumerate(oracle.margins):
        after = margin + sum(float(oracle.shifts[row, record]) for row in rows)
        lost += int(margin > 0) - int(after > 0)
    assert oracle.drop(rows) == lost > 0


def test_a_fatal_block_fails_whatever_else_is_replaced():
    oracle = failures(3)
    (fatal,) = oracle.fatal.nonzero()
    assert len(fatal) >= 1
    assert not any(oracle(frozenset({int(position)})) for position in fatal)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_by_the_rule_drd_leaves_at_most_2_points_more_than_greedy_20(family):
    """In the mean over seeds of which none chose the rule; no L does so in both families, as L = 10 and 30 show."""
    chosen = {name: SEARCHES[name] for name in ("drd, rule", "drd, L = 10", "drd, L = 30")}
    found = scores(FAMILIES[family], range(200, 240), chosen)
    assert found["drd, rule"].ratio < 1
    assert found["drd, rule"].worse <= 0.02
    assert found["drd, L = 10"].ratio > 1
    assert found["drd, L = 30"].worse > 0.02


def test_min_batch_prints_both_halves_of_both_families(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["min_batch", "--oracles", "3"])
    monkeypatch.setattr(min_batch, "SEARCHES", {name: SEARCHES[name] for name in ("greedy-20", "drd, rule")})
    min_batch.main()
    printed = capsys.readouterr().out
    assert printed.count("| drd, rule |") == 4
    assert "failures, reported on seeds 3 to 5" in printed

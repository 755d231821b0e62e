"""The study of what private models are worth: a cell is a whole federation, and its tables say what its lines say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.training._caches import Body
from fedpriv.learning.training.workbench import forget, workbench
from server.observer import LogObserver
from simulations.engines import federation
from simulations.studies import _utility_cells as run
from simulations.studies import corpora
from simulations.studies import utility as tables
from simulations.studies._utility_cells import CENTRAL, FACTORS, METHODS, PROBES, RATES, UtilityCell, cells
from simulations.studies.federations import FeatureStore
from simulations.studies.harness import Estimate, Results, append, difference, lines
from tests.simulations.tiny_corpus import tiny_corpus

RUNS = "runs.jsonl"
CELL = UtilityCell(corpus="tiny", method="head", epsilon=8.0)


@pytest.fixture
def tiny(tiny_bert, monkeypatch):
    """A corpus of two clients whose labels are words of its texts, and a model that takes seconds."""

    monkeypatch.setitem(corpora.CORPORA, "tiny", tiny_corpus())
    small = {"model": str(tiny_bert), "layers": "last-1", "rank": 4, "rounds": 3}
    for name in ("head", CENTRAL):
        monkeypatch.setitem(METHODS, name, {**METHODS[name], **small})
    monkeypatch.setitem(METHODS, PROBES, {**METHODS[PROBES], **small, "rounds": 1, "local_steps": 3})
    monkeypatch.setitem(RATES, "rate x 2", {**RATES["rate x 2"], **small})
    forget()


def test_a_cell_is_a_federation_within_its_epsilon_and_is_run_once(tiny, tmp_path, capsys):
    chosen = [CELL, replace(CELL, view="sum"), replace(CELL, method=PROBES), replace(CELL, method=CENTRAL)]
    chosen += [replace(CELL, epsilon=None), replace(CELL, method="rate x 2"), replace(CELL, method="baselines")]
    run.run_all(tmp_path / RUNS, tmp_path, tmp_path, chosen)
    found = {line["key"]: line for line in lines(tmp_path / RUNS)}
    assert found.keys() == {cell.key for cell in chosen}
    local, summed, probes, central, without, rate, _ = (found[cell.key] for cell in chosen)
    for line in (local, probes, central, rate):
        assert 7.5 < line["epsilon_local_max"] <= 8
    assert 7.5 < summed["epsilon_aggregate_max"] <= 8 < summed["epsilon_local_max"]
    assert without["noise_multiplier"] == 0
    assert (local["num_clients"], central["num_clients"], probes["num_rounds"]) == (3, 1, 1)
    assert local["accuracies"][-1] == local["accuracy"]
    before = (tmp_path / RUNS).read_bytes()
    run.run_all(tmp_path / RUNS, tmp_path, tmp_path, chosen)
    assert (tmp_path / RUNS).read_bytes() == before


def test_a_finished_run_is_a_line_if_it_is_the_run_of_a_cell(tmp_path, tiny_bert, table):
    values = {"model": str(tiny_bert), "layers": "last-1", "rank": 4, "max_length": 16, "rounds": 2, "train": "auto"}
    values |= {"data": str(table), "partition": "iid", "num_clients": 5, "delta": 1e-5, "target_epsilon": 8.0}
    values |= {"comparison": False, "baselines": False, "public_data": True, "out": str(tmp_path / "run"), "seed": 1}
    federation.run(parse(values), LogObserver())
    with pytest.raises(InputError, match=r"differs in max_length, model, data$"):
        run.keep_finished(tmp_path / RUNS, [tmp_path / "run"])
    config = tmp_path / "run" / "config.toml"
    text = config.read_text().replace(str(tiny_bert), "all-MiniLM-L6-v2").replace("max_length = 16", "max_length = 64")
    config.write_text(text.replace(str(table), "sst2_train.csv.gz"))
    for _ in range(2):
        run.keep_finished(tmp_path / RUNS, [tmp_path / "run"])
    (line,) = lines(tmp_path / RUNS)
    assert line["key"] == "SST-2 all rows/auto, secure noise/8/local/1"
    assert 7.5 < line["epsilon_local_max"] <= 8
    assert line["accuracies"][-1] == line["accuracy"]
    assert line["software"].keys() >= {"fedpriv", "torch"}


@pytest.mark.slow
def test_kept_features_change_no_run(tiny, tmp_path):
    run.run_all(tmp_path / "first.jsonl", tmp_path / "first", tmp_path, [CELL])
    forget()
    run.run_all(tmp_path / RUNS, tmp_path / "second", tmp_path, [replace(CELL, seed=0, method=CENTRAL)])
    assert (tmp_path / "second" / "features.npz").is_file()
    forget()
    run.run_all(tmp_path / RUNS, tmp_path / "second", tmp_path, [CELL])
    (first,), (_, again) = lines(tmp_path / "first.jsonl"), lines(tmp_path / RUNS)
    assert again["accuracies"] == first["accuracies"]


def test_features_of_a_trained_body_are_not_kept(tiny, tmp_path):
    values = corpora.keys("tiny", 0, data=tmp_path, folder=tmp_path, validation=False, pooled=False)
    config = parse({**values, "model": METHODS["head"]["model"], "layers": "last-1", "simulate": True})
    bench, store = workbench(config), FeatureStore(tmp_path / "features.npz")
    store.serve(bench.model, config)
    with torch.no_grad():
        for name, parameter in bench.model.parameters.items():
            if ".lora_" not in name:
                parameter.normal_()
    before, _ = bench.model.evaluation_logits(bench.test, range(4))
    with torch.no_grad():
        for name, parameter in bench.model.parameters.items():
            if ".lora_B." in name:
                parameter.add_(0.5)
    after, _ = bench.model.evaluation_logits(bench.test, range(4))
    assert not torch.allclose(before, after)


def test_features_that_are_missing_are_computed_beside_those_that_are_kept(tiny, tmp_path):
    values = corpora.keys("tiny", 0, data=tmp_path, folder=tmp_path, validation=False, pooled=False)
    config = parse({**values, "model": METHODS["head"]["model"], "layers": "last-1", "simulate": True, "train": "head"})
    model, records = workbench(config).model, workbench(config).test
    drawn = [(records, torch.arange(len(records)))]
    expected = model.features.features(drawn, Body({}, {}), keep=False)
    FeatureStore(tmp_path / "features.npz").serve(model, config)
    model.features.features([(records, torch.arange(0, len(records), 3))], Body({}, {}), keep=False)
    torch.testing.assert_close(model.features.features(drawn, Body({}, {}), keep=False), expected)


def test_a_corpus_without_its_file_is_skipped_with_a_message(tmp_path, capsys):
    run.run_all(tmp_path / RUNS, tmp_path, tmp_path / "absent", [replace(CELL, corpus="Adult in sentences")])
    assert "adult.csv.gz" in capsys.readouterr().out
    with pytest.raises(InputError, match="holds no medquad"):
        corpora.keys("MedQuAD by source", 0, data=tmp_path, folder=tmp_path, validation=False, pooled=False)


def test_every_cell_has_a_key_of_its_own():
    keys = [cell.key for cell in cells()]
    assert len(set(keys)) == len(keys)


def test_differences_are_taken_seed_by_seed():
    found = difference({0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.8, 1: 0.9, 3: 0.1})
    assert found is not None
    assert found.mean == pytest.approx(0.0)
    assert found.standard_error == pytest.approx(0.1)  # of +0.1 and -0.1: sqrt(0.02 / 1) / sqrt(2)
    assert Estimate.of([0.5]).text() == "0.500 (one seed)"


def line(method, accuracy, *, epsilon=2.0, seed=0, corpus="embedded"):
    cell = UtilityCell(corpus=corpus, method=method, epsilon=epsilon, seed=seed)
    return {"key": cell.key, "accuracy": accuracy}


def test_what_was_missed_is_stated_and_what_was_not_run_is_printed(tmp_path, capsys):
    for each in (line("head", 0.775), line("head", 0.785, seed=1), line("recipe", 0.7), line("recipe", 0.7, seed=1)):
        append(tmp_path / RUNS, each)
    tables.write(tmp_path / "page.md", tmp_path / RUNS)
    page = " ".join((tmp_path / "page.md").read_text().split())
    assert "| recipe less head | >= 0 | **0 of 2** | -0.080 ± 0.005 (2 runs) | embedded, epsilon 2, local |" in page
    assert "recipe less head over all 2 pairs of runs: -0.0800 ± 0.0050." in page
    assert "| embedded | head | 0.780 (2 runs) | | | |" in page
    assert "Standard errors are at most 0.005. " in page
    assert "Not run: head, local, 97 of 99; " in capsys.readouterr().out


def test_a_budget_at_which_accuracy_falls_for_certain_is_named(tmp_path):
    means = {1.0: 0.70, 2.0: 0.75, 4.0: 0.76, 8.0: 0.74, 16.0: 0.739, None: 0.80}
    for epsilon, mean in means.items():
        for seed, noise in enumerate((-0.002, 0.0, 0.002)):
            append(tmp_path / RUNS, line("head", mean + noise * (epsilon == 16.0), epsilon=epsilon, seed=seed))
    tables.write(tmp_path / "page.md", tmp_path / RUNS)
    page = (tmp_path / "page.md").read_text()
    shown = " | ".join(f"{mean:.3f} (3 runs)" for mean in means.values())
    assert f"| embedded | {shown} |" in page
    assert "Falls beyond two standard errors, of both views: embedded, local, 8: -0.020 ± 0.000 (3 runs)." in page


def test_the_rule_is_compared_with_the_best_mean_of_the_grid():
    accuracies = dict(zip(RATES, (0.70, 0.72, 0.75, 0.78, 0.80, 0.60, 0.50), strict=True))
    results = Results(line(method, accuracy) for method, accuracy in accuracies.items())
    assert FACTORS[3] == 1
    found = tables.gap_of_rule(results, "embedded", 2.0)
    assert found is not None
    assert found.mean == pytest.approx(-0.02)
    assert tables.gap_of_rule(results, "embedded", 8.0) is None

"""The studies of utility and of secure aggregation: a cell is a whole federation, and tables say what lines say."""

from dataclasses import replace
from itertools import combinations
from math import sqrt

import numpy as np
import pandas as pd
import pytest
import torch

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.training._caches import Body
from fedpriv.learning.training.workbench import forget, workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from simulations.studies import _colluders as colluders
from simulations.studies import _utility_cells as run
from simulations.studies import corpora
from simulations.studies import secure_aggregation as sums
from simulations.studies import utility as tables
from simulations.studies._colluders import Sum
from simulations.studies._utility_cells import CENTRAL, FACTORS, METHODS, PROBES, RATES, UtilityCell
from simulations.studies.corpora import Corpus
from simulations.studies.federations import FeatureStore
from simulations.studies.harness import Estimate, Results, append, difference, lines
from simulations.studies.secure_aggregation import AGGREGATE, ARMS, SumCell
from tests.tiny import LABELS, WORDS

RUNS = "runs.jsonl"
CELL = UtilityCell(corpus="tiny", method="head", epsilon=8.0)
SUM_CELL = SumCell(corpus="tiny", arm=AGGREGATE, epsilon=8.0)


def frames(_data, seed):
    """120 records for training and 30 for testing; client b has two of four."""
    rng = np.random.default_rng(seed)
    labels = [LABELS[i % len(LABELS)] for i in range(150)]
    texts = [" ".join([label, *rng.choice(WORDS, 3)]) for label in labels]
    frame = pd.DataFrame({"text": texts, "label": labels, "client": (["a", "b", "b", "c"] * 38)[:150]})
    return frame[:120], frame[120:]


@pytest.fixture
def tiny(tiny_bert, monkeypatch):
    """A corpus of three clients whose labels are words of its texts, and a model that takes seconds."""
    corpus = Corpus(frames=frames, sharing=(("partition", "natural"), ("client_column", "client")))
    monkeypatch.setitem(corpora.CORPORA, "tiny", corpus)
    small = {"model": str(tiny_bert), "layers": "last-1", "rank": 4, "rounds": 3}
    for methods, name in ((METHODS, "head"), (METHODS, CENTRAL), (sums.METHODS, sums.HEAD)):
        monkeypatch.setitem(methods, name, {**methods[name], **small})
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


def frame(texts):
    return pd.DataFrame({"text": texts, "label": ["0"] * len(texts)})


@pytest.mark.parametrize("shared", [0, 3, 40])
def test_the_nearest_text_is_that_of_plain_sets(shared):
    rng = np.random.default_rng(shared)
    texts, others = ([" ".join(rng.choice(WORDS[:4], 7)) for _ in range(number)] for number in (300, 50))
    others += [f"{text.upper()}!" for text in texts[:shared]] + ["a"]
    texts.append("A")

    def runs(text):
        split = text.lower().replace("!", "").split()
        return {tuple(split[i : i + 3]) for i in range(max(1, len(split) - 2))}

    expected = [max(len(runs(t) & runs(o)) / len(runs(t) | runs(o)) for o in others) for t in texts]
    np.testing.assert_allclose(corpora.nearest(texts, others), expected, rtol=1e-6)


@pytest.mark.parametrize("has_copies", [True, False])
def test_near_copies_of_what_is_trained_on_are_not_tested(has_copies, monkeypatch, tmp_path):
    train = frame(["Of eyes, ears and noses alike.", "one two three"])
    test = frame(["of eyes ears and noses -- alike", "of eyes, ears and noses", "of eyes", "one two three four"])
    corpus = Corpus(frames=lambda *_: (train, test), has_copies=has_copies)
    monkeypatch.setitem(corpora.CORPORA, "tiny", corpus)
    kept, tested = corpora.apart("tiny", tmp_path, 0)
    assert list(kept["text"]) == list(train["text"])
    assert list(tested["text"]) == list(test["text"])[1 * has_copies :], "three of four runs are no copy"


def test_of_phrases_whole_sentences_are_tested_and_no_part_of_these_is_trained_on(monkeypatch, tmp_path):
    train = ["A good film", "good film", "a good film with a bad end", "the end", "with", "bad acting"]
    test = ["good film", "It is a good film .", "it is a good film", "bad", "a bad end and worse acting"]
    monkeypatch.setitem(
        corpora.CORPORA, "tiny", Corpus(frames=lambda *_: (frame(train), frame(test)), are_phrases=True, most=2)
    )
    kept, tested = corpora.apart("tiny", tmp_path, 0)
    assert list(tested["text"]) == ["It is a good film .", "a bad end and worse acting"]
    assert len(kept) == 2
    assert {*kept["text"]} < {"a good film with a bad end", "the end", "with", "bad acting"}
    shares = corpora.overlap("tiny", tmp_path, 0)
    assert shares == {"num_test": 5, "within": 0.4, "equal": 0.2, "near": 0.2, "num_train": 2, "num_left": 2}


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


def bench_with_kept_features(tmp_path, **changes):
    values = corpora.keys("tiny", 0, data=tmp_path, folder=tmp_path, validation=False, pooled=False)
    values |= {"model": METHODS["head"]["model"], "layers": "last-1", "simulate": True}
    bench = workbench(config := parse(values | changes))
    FeatureStore(tmp_path / "features.npz").serve(bench.model, config)
    return bench


def test_features_of_a_trained_body_are_not_kept(tiny, tmp_path):
    bench = bench_with_kept_features(tmp_path)
    parameters = bench.model.parameters.items()
    with torch.no_grad():
        for parameter in (each for name, each in parameters if ".lora_" not in name):
            parameter.normal_()
        before, _ = bench.model.evaluation_logits(bench.test, range(4))
        for parameter in (each for name, each in parameters if ".lora_B." in name):
            parameter.add_(0.5)
        after, _ = bench.model.evaluation_logits(bench.test, range(4))
    assert not torch.allclose(before, after)


def test_features_that_are_missing_are_computed_beside_those_that_are_kept(tiny, tmp_path):
    bench = bench_with_kept_features(tmp_path, train="head")
    features, records = bench.model.features, bench.test
    some, drawn = ([(records, torch.arange(0, len(records), step))] for step in (3, 1))
    features.features(some, Body({}, {}), keep=False)
    found = features.features(drawn, Body({}, {}), keep=False)
    forget()
    expected = workbench(bench.config).model.features.features(drawn, Body({}, {}), keep=False)
    torch.testing.assert_close(found, expected)


def test_features_of_encoders_of_other_widths_are_kept_beside_each_other(tmp_path):
    first, kept = FeatureStore(tmp_path / "features.npz"), {b"a" * 16: 3, b"b" * 16: 5, b"c" * 16: 3}
    first._states = {key: np.full(width, key[0], np.float32) for key, width in kept.items()}
    first.save()
    again = FeatureStore(tmp_path / "features.npz")._states
    assert {key: (state.tolist(), state.dtype) for key, state in again.items()} == {
        key: ([float(key[0])] * width, np.float32) for key, width in kept.items()
    }


@pytest.mark.parametrize(
    ("study", "cell", "said"),
    [
        (run, replace(CELL, corpus="Adult in sentences"), "adult.csv.gz"),
        (sums, replace(SUM_CELL, corpus="MedQuAD by source"), "holds no medquad"),
    ],
    ids=["utility", "sums"],
)
def test_a_corpus_without_its_file_is_skipped_with_a_message(study, cell, said, tmp_path, capsys):
    study.run_all(tmp_path / RUNS, tmp_path, tmp_path / "absent", [cell])
    assert said in capsys.readouterr().out
    assert not lines(tmp_path / RUNS)
    with pytest.raises(InputError, match="holds no medquad"):
        corpora.keys("MedQuAD by source", 0, data=tmp_path, folder=tmp_path, validation=False, pooled=False)


@pytest.mark.parametrize("study", [run, sums], ids=["utility", "sums"])
def test_every_cell_has_a_key_of_its_own(study):
    keys = [cell.key for cell in study.cells()]
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
    assert "| recipe less head | >= 0 | **0 of 1** | -0.080 ± 0.005 (2 runs) | embedded, epsilon 2, local |" in page
    assert "| embedded | head | 0.780 (2 runs) | | | |" in page
    assert "Standard errors are at most 0.005. " in page
    assert "; head, local, 97 of 99; " in capsys.readouterr().out


def test_the_rule_is_compared_with_the_best_mean_of_the_grid():
    accuracies = dict(zip(RATES, (0.70, 0.72, 0.75, 0.78, 0.80, 0.60, 0.50), strict=True))
    results = Results(line(method, accuracy) for method, accuracy in accuracies.items())
    assert FACTORS[3] == 1
    found = tables.gap_of_rule(results, "embedded", 2.0)
    assert found is not None
    assert found.mean == pytest.approx(-0.02)
    assert tables.gap_of_rule(results, "embedded", 8.0) is None


def test_arms_are_federations_with_one_epsilon_and_one_noise_in_all_and_are_run_once(tiny, tmp_path, capsys):
    chosen = [replace(SUM_CELL, arm=arm) for arm in ARMS]
    sums.run_all(tmp_path / RUNS, tmp_path, tmp_path, chosen)
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
    sums.run_all(tmp_path / RUNS, tmp_path, tmp_path, chosen)
    assert (tmp_path / RUNS).read_bytes() == before


def test_tables_say_what_was_written_and_mark_a_claim_that_is_missed(tmp_path):
    accuracies = {"local": (0.77, 0.78), "aggregate": (0.80, 0.82), "central": (0.81, 0.82)}
    for arm, found in accuracies.items():
        for seed, accuracy in enumerate(found):
            cell = replace(SUM_CELL, corpus="embedded", arm=arm, epsilon=2.0, seed=seed)
            line = {"key": cell.key, "accuracy": accuracy, "epsilon_local_max": 5.0}
            line |= {"noise_multiplier": 10.0 if arm == "central" else 5.0, "num_clients": 4, "majority_accuracy": 0.15}
            append(tmp_path / RUNS, line)
    found = Results.read(tmp_path / RUNS)
    row = "| embedded | 2 | 0.775 (2 runs) | 0.810 (2 runs) (>= 0.79) | 0.815 (2 runs) |"
    compared = "+0.035 ± 0.005 (2 runs) (> 0) | -0.005 ± 0.005 (2 runs) (>= 0) | 5.00 |"
    assert f"{row} {compared}" in sums.accuracies(found)
    assert "default recipe" not in sums.accuracies(found), "not run"
    assert "| none counted | 1.000 | " in sums.assumed(found), "4 clients with half of central's noise each"
    assert "embedded, head, epsilon 2, 33 of 39; " in sums.missing(found)

    cell = replace(SUM_CELL, corpus="embedded", epsilon=2.0)
    keys = [replace(cell, arm=arm).key for arm in ARMS]
    values = zip(keys, (0.7, 0.6, 0.8), strict=True)
    found = Results({"key": key, "accuracy": value, "epsilon_local_max": 5.0} for key, value in values)
    assert sums.accuracies(found).count("(**not** >") == 3


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

"""A run's figures and baselines: nothing but public training records decides these, and a worthless model is told."""

import csv
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel

from fedpriv.config import ON_NODES, parse
from fedpriv.learning.adapters import lora
from fedpriv.learning.data import TextData
from fedpriv.learning.data.records import collate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import Workbench
from fedpriv.runs._folder import QUALITY_KEYS
from server import baselines
from server.baselines import Baselines, _features, compute
from server.summary import _labels_of, warnings_of
from tests.server.parts import run, summary
from tests.tiny import LABELS, random_records

Row = tuple[str, str]
Bench = Callable[..., tuple[Baselines | None, Workbench]]


def write(path: Path, rows: Sequence[tuple[str, ...]]) -> str:
    """A table of these records, with their holders if they are given."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label", "holder")[: len(rows[0]) if rows else 2], *rows])
    return str(path)


def swapped(rows: Sequence[Row]) -> list[Row]:
    return [(text, LABELS[1 - LABELS.index(label)]) for text, label in rows]


@pytest.fixture
def baselines_of(tiny_bert, tmp_path, quick_nodes) -> Bench:
    """The baselines of a run on these records, and its workbench; warnings are errors."""

    def build(train: Sequence[Row], test: Sequence[Row], **changes: object) -> tuple[Baselines | None, Workbench]:
        values: dict[str, object] = {"model": str(tiny_bert), "layers": "last-1", "recipe": "per-sample"}
        values |= {"data": write(tmp_path / "train.csv", train), "test_data": write(tmp_path / "test.csv", test)}
        values |= {"num_clients": 3, "batch_size": 1, "public_data": True, "labels": LABELS[:2], "memory_limit_mb": 8}
        config = parse(values | changes)
        bench = Workbench(config)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module="sklearn")
            return compute(config, bench), bench

    return build


def records(num: int, *, seed: int = 0, told: float = 1.0) -> list[Row]:
    """Records of two classes, three words long, of which one names the class with the given probability."""
    generator = np.random.default_rng(seed)
    rows = []
    for label in generator.choice(LABELS[:2], num):
        words = [*generator.choice(["pain", "chest", "knee", "rash"], 2), label if generator.random() < told else "has"]
        rows.append((" ".join(words), str(label)))
    return rows


def test_words_that_name_the_class_and_the_order_of_two_words_are_learnt(baselines_of):
    found, _ = baselines_of(records(120), records(60, seed=1))
    assert found.tfidf_accuracy == 1.0
    assert found.probe_accuracy > 0.9
    assert (found.num_trained_on, found.num_available, found.folds) == (120, 120, None)
    rows = [("knee pain", "cardiology"), ("pain knee", "dermatology")] * 30
    assert baselines_of(rows, rows[:10])[0].tfidf_accuracy == 1.0


def test_labels_that_no_word_tells_cannot_be_predicted(baselines_of):
    found, _ = baselines_of(records(200, told=0.0), records(200, seed=1, told=0.0))
    # 4.5 standard errors of 200 coins.
    assert abs(found.tfidf_accuracy - 0.5) < 0.16
    assert abs(found.probe_accuracy - 0.5) < 0.16


def test_the_adapter_and_what_is_merged_change_nothing_and_the_same_seed_gives_the_same_figures(baselines_of):
    train, test = records(60, told=0.5), records(60, seed=1, told=0.5)
    expected, bench = baselines_of(train, test)
    before = _features(bench.model, bench.test.items(), cached=False)
    lora.write_parameters(bench.model.parameters, {n: t + 0.3 for n, t in bench.initial.items()})
    with torch.no_grad():
        changed, _ = bench.model.logits(bench.test.items()[:4], cached=False)
    assert np.array_equal(_features(bench.model, bench.test.items(), cached=False), before)
    with torch.no_grad():
        assert not torch.equal(bench.model.logits(bench.test.items()[:4], cached=False)[0], changed)
    np.testing.assert_allclose(_features(bench.model, bench.test.items(), cached=True), before, atol=1e-5)
    assert baselines_of(train, test)[0] == expected


def test_features_are_the_mean_of_the_plain_model_s_last_states(baselines_of, tiny_bert):
    _, bench = baselines_of(records(30), records(30, seed=1))
    plain = AutoModel.from_pretrained(tiny_bert).eval()
    found = _features(bench.model, bench.test.items(), cached=True)
    for row, item in zip(found, bench.test.items(), strict=True):
        batch = {name: tensor for name, tensor in collate([item]).items() if name != "labels"}
        with torch.no_grad():
            states = plain(**batch).last_hidden_state[0]
        np.testing.assert_allclose(row, states.mean(dim=0).numpy(), atol=1e-5)


def test_features_of_a_causal_model_leave_out_padding(causal):
    model = TrainingModel(causal("llama"), memory_limit=2**30)
    items = random_records(9, classes=0, longest=20).items()
    together = _features(model, items, cached=False)
    alone = np.concatenate([_features(model, [item], cached=False) for item in items])
    assert together.shape == (9, 32)
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_the_test_records_train_nothing_and_of_too_many_training_records_some_are_sampled(baselines_of, monkeypatch):
    monkeypatch.setattr(baselines, "MOST_RECORDS", 40)
    train, test = records(90), records(40, seed=1)
    right, wrong = baselines_of(train, test)[0], baselines_of(train, swapped(test))[0]
    assert (right.num_trained_on, right.num_available) == (40, 90)
    assert (right.tfidf_accuracy, wrong.tfidf_accuracy) == (1.0, 0.0)
    assert right.probe_accuracy + wrong.probe_accuracy == pytest.approx(1.0)


@pytest.mark.parametrize(
    "train",
    [
        [("pain knee", "cardiology")] * 12,
        [("pain knee", "cardiology")] * 12 + [("rash", "dermatology")],
        [("!", "cardiology")] * 9 + [("?", "dermatology")] * 3,
    ],
    ids=["one class", "a class with one record", "no words"],
)
def test_hardly_any_information_is_no_error(baselines_of, train):
    found, _ = baselines_of(train, [("knee", "cardiology")] * 3 + [("chest", "dermatology")])
    assert found.tfidf_accuracy == 0.75
    assert 0 <= found.probe_accuracy <= 1


def test_a_holder_alone_learns_from_its_own_records_and_from_nobody_else_s(baselines_of, tmp_path):
    """The second holder's labels are swapped, and the third one has a single class."""
    held = [records(60), swapped(records(60, seed=2))]
    held.append([row for row in records(60, seed=3) if row[1] == LABELS[0]])
    test = records(40, seed=1)
    data = write(tmp_path / "held.csv", [(*row, f"h{holder}") for holder, rows in enumerate(held) for row in rows])
    found, _ = baselines_of([], test, data=data, client_column="holder", num_clients=5)
    share = sum(label == LABELS[0] for _, label in test) / len(test)
    assert found.alone == {0: pytest.approx(1.0, abs=0.1), 1: pytest.approx(0.0, abs=0.1), 2: share}
    assert found.alone_on_own == {}, "nobody knows whose the test records are"


def test_each_holder_sees_on_its_own_test_records_what_it_reaches_alone_and_together(baselines_of, tmp_path):
    """The second holder calls everything by the other name, in training and in the test."""
    rows = [(*row, "h0") for row in records(60)] + [(*row, "h1") for row in swapped(records(60, seed=2))]
    test = [(*row, "h0") for row in records(30, seed=1)] + [(*row, "h1") for row in swapped(records(10, seed=3))]
    tests = write(tmp_path / "held-test.csv", [*test, (*records(1)[0], "stranger")])
    paths = {"data": write(tmp_path / "held.csv", rows), "test_data": tests}
    found, bench = baselines_of([], [], **paths, client_column="holder", num_clients=5)
    assert bench.data.test_holders == (0,) * 30 + (1,) * 10 + (-1,)
    assert found.alone_on_own == {0: pytest.approx(1.0, abs=0.1), 1: pytest.approx(1.0, abs=0.1)}
    assert found.alone[0] == pytest.approx(31 / 41, abs=0.1)


def test_of_many_holders_or_records_some_are_alone_each_with_all_that_it_has(monkeypatch):
    monkeypatch.setattr(baselines, "MOST_RECORDS", 10)
    held = [[None] * num for num in (6, 0, 11, 3, 4)]
    for seed in range(8):
        found = baselines._alone(held, np.random.default_rng(seed))
        assert found
        assert all(found[client] == len(held[client]) for client in found)
        assert not {1, 2} & found.keys()
        assert sum(found.values()) <= 10
    monkeypatch.setattr(baselines, "MOST_ALONE", 2)
    assert len(baselines._alone([[None]] * 9, np.random.default_rng(0))) == 2


def test_on_nodes_every_test_record_is_predicted_from_the_others_and_few_are_no_error(baselines_of):
    # A word of its own would give every record's class away to a classifier that has seen the record.
    words = iter(f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "abcdefghij")
    unknown = [(next(words), label) for _, label in records(200, told=0.0)]
    nodes = {"data": ON_NODES, "baselines": True}
    found, bench = baselines_of([], unknown, **nodes)
    assert found.tfidf_accuracy < 0.66
    assert (found.num_trained_on, found.num_available, found.folds) == (160, 200, 5)
    assert (bench.data.clients, found.alone) == ((), {})
    assert baselines_of([], records(50), **nodes)[0].tfidf_accuracy == 1.0
    found, _ = baselines_of([], records(3), **nodes)
    assert (found.folds, 0 <= found.tfidf_accuracy <= 1) == (3, True)
    assert baselines_of([], records(1), **nodes)[0] is None


@pytest.mark.parametrize(("keys", "told"), [({"public_data": True}, True), ({"simulate": True}, True), ({}, False)])
def test_the_labels_of_a_client_are_told_only_where_nobody_s_privacy_depends_on_them(keys, told):
    clients = (TextData(texts=("x", "y", "z"), labels=("a", "b", "a")),)
    bench = SimpleNamespace(data=SimpleNamespace(clients=clients))
    config = parse({"data": "records.csv", "client_column": "site", **keys})
    assert _labels_of(bench, config, ("a", "b", "c"))(0) == ({"num_by_label": [2, 1, 0]} if told else {})


FIGURES = ("majority_accuracy", "accuracy_standard_error", "macro_f1", "confusion_matrix", "labels")
GOOD = {"accuracy": 0.75, "standard_error": 0.02, "majority": 0.6, "loss_initial": 0.69, "loss": 0.5}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"accuracy": 0.641}, []),
        ({"accuracy": 0.639}, ["accuracy 0.639 ± 0.020 is not above 0.600"]),
        ({"accuracy": 0.4}, ["largest class"]),
        ({"accuracy": 1.0, "majority": 1.0, "standard_error": 0.0}, ["largest class"]),
        ({"loss": 0.7}, ["test loss rose from 0.690 (untrained) to 0.700"]),
        ({"loss": math.nan}, ["test loss rose from 0.690 (untrained) to nan"]),
        ({"accuracy": 0.6, "loss": 0.7}, ["largest class", "test loss rose"]),
        ({"majority": None, "standard_error": None, "accuracy": 0.1}, []),
        ({"majority": None, "standard_error": None, "loss": 0.7}, ["test loss rose"]),
        (dict.fromkeys(GOOD), []),
    ],
)
def test_a_model_without_worth_is_warned_of_and_nothing_is_compared_with_what_is_not_known(changes, expected):
    found = warnings_of(**(GOOD | changes))
    assert len(found) == len(expected)
    assert all(words in line for words, line in zip(expected, found, strict=True))


@pytest.fixture(scope="module")
def paper(small_run) -> dict[str, object]:
    return small_run | {"recipe": "per-sample"}


def test_a_public_run_has_baselines_and_figures_of_its_final_model(paper, tmp_path):
    found = summary(run(paper, tmp_path / "run", public_data=True))
    confusion, labels = found["confusion_matrix"], found["labels"]
    assert labels == sorted(LABELS)
    num = sum(map(sum, confusion))
    assert num == 48
    assert sum(confusion[c][c] for c in range(3)) / num == found["accuracy"]
    assert found["majority_accuracy"] == max(map(sum, confusion)) / num
    variance = found["accuracy"] * (1 - found["accuracy"])
    assert found["accuracy_standard_error"] == pytest.approx(math.sqrt(variance / num))
    assert found["tfidf_accuracy"] == 1.0  # a word of each text is its label
    assert found["probe_accuracy"] > found["majority_accuracy"]
    assert found["baselines"]["num_trained_on"] == found["baselines"]["num_available"] == 192
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Confusion matrix" in page
    assert "Best baseline" in page


def test_private_records_train_no_baseline_and_the_comparison_has_none_either(paper, tmp_path):
    found = summary(run(paper, tmp_path / "run", comparison=True, rounds=1))
    assert [found[key] for key in ("probe_accuracy", "tfidf_accuracy", "baselines")] == [None] * 3
    assert all(found[key] is not None for key in FIGURES)
    inner = summary(tmp_path / "run" / "comparison")
    assert inner["probe_accuracy"] is None
    assert inner["confusion_matrix"] is not None


def test_a_run_that_learns_nothing_says_so_and_has_the_same_figures_when_it_is_finished_again(paper, tmp_path, caplog):
    still = {"noise_multiplier": 60.0, "learning_rate": 20.0}
    with caplog.at_level("WARNING", logger="flwr"):
        found = summary(run(paper, tmp_path / "run", **still))
    assert len(found["warnings"]) == 2
    assert found["warnings"][0] in caplog.text
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(line[1:] in page for line in found["warnings"])
    (tmp_path / "run" / "summary.json").unlink()
    after = summary(run(paper, tmp_path / "run", **still, resume=str(tmp_path / "run")))
    assert [found[key] for key in QUALITY_KEYS] == [after[key] for key in QUALITY_KEYS]

"""Baselines on tiny data with known answers: nothing but public training records decides them."""

import csv
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from fedpriv.config import ON_NODES, parse
from fedpriv.learning.adapters import lora
from fedpriv.learning.data.records import collate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import Workbench
from server import baselines
from server.baselines import Baselines, _features, compute
from tests.tiny import LABELS, random_records

Row = tuple[str, str]
Bench = Callable[..., tuple[Baselines | None, Workbench]]


SWAP = {LABELS[0]: LABELS[1], LABELS[1]: LABELS[0]}


def write(path: Path, rows: Sequence[tuple[str, ...]]) -> str:
    """A table of these records, with their holders if they are given."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label", "holder")[: len(rows[0]) if rows else 2], *rows])
    return str(path)


def swapped(rows: Sequence[Row]) -> list[Row]:
    return [(text, SWAP[label]) for text, label in rows]


@pytest.fixture
def baselines_of(tiny_bert, tmp_path) -> Bench:
    """The baselines of a run on these records, and its workbench; warnings are errors."""

    def build(train: Sequence[Row], test: Sequence[Row], **changes: object) -> tuple[Baselines | None, Workbench]:
        values: dict[str, object] = {"model": str(tiny_bert), "layers": "last-1", "recipe": "per-sample"}
        values |= {"data": write(tmp_path / "train.csv", train), "test_data": write(tmp_path / "test.csv", test)}
        values |= {"num_clients": 3, "batch_size": 1, "public_data": True, "labels": LABELS[:2]}
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


def test_words_that_name_the_class_are_learnt_by_both(baselines_of):
    found, _ = baselines_of(records(120), records(60, seed=1))
    assert found.tfidf_accuracy == 1.0
    assert found.probe_accuracy > 0.9
    assert (found.num_trained_on, found.num_available, found.folds) == (120, 120, None)


def test_the_order_of_two_words_is_learnt_by_pairs_of_words(baselines_of):
    rows = [("knee pain", "cardiology"), ("pain knee", "dermatology")] * 30
    assert baselines_of(rows, rows[:10])[0].tfidf_accuracy == 1.0


def test_labels_that_no_word_tells_cannot_be_predicted(baselines_of):
    found, _ = baselines_of(records(200, told=0.0), records(200, seed=1, told=0.0))
    # 4.5 standard errors of 200 coins.
    assert abs(found.tfidf_accuracy - 0.5) < 0.16
    assert abs(found.probe_accuracy - 0.5) < 0.16


def test_the_same_seed_gives_the_same_figures(baselines_of):
    train, test = records(90, told=0.5), records(60, seed=1, told=0.5)
    assert baselines_of(train, test)[0] == baselines_of(train, test)[0]


def test_the_adapter_and_what_is_merged_change_nothing(baselines_of):
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


def test_the_test_records_train_nothing(baselines_of):
    train, test = records(60), records(40, seed=1)
    right, wrong = baselines_of(train, test)[0], baselines_of(train, swapped(test))[0]
    assert right.tfidf_accuracy + wrong.tfidf_accuracy == 1.0
    assert right.probe_accuracy + wrong.probe_accuracy == pytest.approx(1.0)


def test_more_records_than_the_limit_are_sampled(baselines_of, monkeypatch):
    monkeypatch.setattr(baselines, "MOST_RECORDS", 40)
    found, _ = baselines_of(records(90), records(30, seed=1))
    assert (found.num_trained_on, found.num_available) == (40, 90)
    assert found.tfidf_accuracy == 1.0


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
    paths = {
        "data": write(tmp_path / "held.csv", rows),
        "test_data": write(tmp_path / "held-test.csv", [*test, (*records(1)[0], "stranger")]),
    }
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


def test_on_nodes_every_test_record_is_predicted_from_the_others(baselines_of):
    # A word of its own would give every record's class away to a classifier that has seen the record.
    words = iter(f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "abcdefghij")
    unknown = [(next(words), label) for _, label in records(200, told=0.0)]
    nodes = {"data": ON_NODES, "baselines": True}
    found, bench = baselines_of([], unknown, **nodes)
    assert found.tfidf_accuracy < 0.66
    assert (found.num_trained_on, found.num_available, found.folds) == (160, 200, 5)
    assert bench.data.clients == ()
    assert found.alone == {}
    assert baselines_of([], records(50), **nodes)[0].tfidf_accuracy == 1.0


def test_on_nodes_a_few_test_records_are_no_error(baselines_of):
    nodes = {"data": ON_NODES, "baselines": True}
    assert baselines_of([], records(1), **nodes)[0] is None
    found, _ = baselines_of([], records(3), **nodes)
    assert found.folds == 3
    assert 0 <= found.tfidf_accuracy <= 1

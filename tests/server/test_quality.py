"""What a run's summary says about the model's worth: figures, baselines and warnings."""

import math
from types import SimpleNamespace

import pytest

from fedpriv.config import parse
from fedpriv.learning.data import TextData
from fedpriv.runs._folder import QUALITY_KEYS
from server.summary import _labels_of, warnings_of
from tests.server.parts import run, summary
from tests.tiny import LABELS


@pytest.mark.parametrize(
    ("keys", "told"), [({"public_data": True}, True), ({"simulate": True}, True), ({}, False)], ids=str
)
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
    assert found["accuracy_standard_error"] == pytest.approx(
        math.sqrt(found["accuracy"] * (1 - found["accuracy"]) / num)
    )
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


def test_a_run_that_learns_nothing_says_so_everywhere_and_has_the_same_figures_when_it_is_finished_again(
    paper, tmp_path, caplog
):
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

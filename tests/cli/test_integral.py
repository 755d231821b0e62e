"""`fedpriv integral` on tables that nobody prepared, and one line for what cannot be."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors
import torch

from tests.cli.command_line import as_json, fedpriv, refused
from tests.cli.inputs import write_plain_table
from tests.threads import with_threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """messy.csv: ten classes, gaps, rare categories, an id, a constant column; plain.csv: two classes, one number."""
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    lines = ["id,score,town,unit,grade"]
    for row in range(1500):
        grade = row % 10
        score = "" if rng.random() < 0.2 else f"{grade + rng.normal():.3f}"
        town = "" if rng.random() < 0.1 else f"town-{rng.zipf(1.6) % 200}"
        lines.append(f"id-{row},{score},{town},kg,{'' if row < 5 else grade}")
    (folder / "messy.csv").write_text("\n".join(lines) + "\n")
    write_plain_table(folder / "plain.csv")
    return folder


def test_select_on_a_messy_table_with_ten_classes(folder):
    options = ["--subsample-size", "100", "--epsilon", "0.05", "--epochs", "2", "--out", "means"]
    found = as_json("integral", "select", "messy.csv", "--target", "grade", *options, folder=folder)
    assert len(found["classes"]) == 10
    assert found["num_unlabelled"] == 5
    assert found["left_out_columns"]["unit"] == "constant"
    assert "id" in found["left_out_columns"]
    assert found["num_subsamples"] == found["num_train_records"] // 100 == 10
    assert found["recurrence"] == found["cluster_sizes"][0] == len(found["clusters"][0]["members"])
    assert sum(found["cluster_sizes"]) == 10
    assert found["clusters"][0]["holds"]
    assert 0 <= found["clusters"][0]["test_accuracy"] <= 1
    assert {look["epochs"] for look in found["looks"]} == {1, 2}
    assert {look["epsilon"] for look in found["looks"]} == {0.05, 0.1, 0.2}
    assert found["is_differentially_private"] is False
    means = folder / found["files"][0]
    with safetensors.safe_open(means, "numpy") as file:
        assert len(json.loads(file.metadata()["features"])) == found["num_features"]
        assert file.get_tensor("0.weight").shape == (5, found["num_features"])


def test_select_warns_of_a_column_that_gives_the_class_away(folder):
    frame = pd.read_csv(folder / "plain.csv")
    frame.assign(told=frame["label"].map(lambda label: int(label == frame["label"].min()))).to_csv(folder / "told.csv")
    options = ["--target", "label", "--subsample-size", "60", "--epsilon", "0.05", "--epochs", "1"]
    said, _ = fedpriv("integral", "select", "told.csv", *options, folder=folder)
    assert "warning: single columns give classes away almost without error" in said
    assert "told 1.0000; the majority class has" in said
    said, _ = fedpriv("integral", "select", "plain.csv", *options, folder=folder)
    assert "warning" not in said


def test_select_says_plainly_when_there_is_no_cluster(folder):
    options = ["--subsample-size", "60", "--epsilon", "0.0001", "--epochs", "10", "--clustering", "complete", "--align"]
    command = ["integral", "select", "plain.csv", "--target", "label", *options]
    assert "no other column holds anything to learn from" in refused(*command, "--drop", "x", folder=folder)
    said, _ = fedpriv(*command, folder=folder)
    assert "No two of 7 models are within 0.0001 of each other: there is no cluster, and nothing is" in said
    assert "majority class" in said


def test_attack_reports_every_target_against_chance(folder):
    options = ["--subsample-size", "10", "--owners", "4", "--trials", "2", "--subsamples", "20", "--best", "3"]
    options += ["--epochs", "2", "--overfit-epochs", "5", "--dp-epsilon", "8", "--dp-steps", "3"]
    found = as_json("integral", "attack", "plain.csv", "--target", "label", *options, folder=folder)
    assert found["chance"] == 0.5
    names = [row["name"] for row in found["targets"]]
    assert "plain, overfitted" in names
    assert "DP-SGD, epsilon 8" in names
    for row in found["targets"]:
        assert row["note"] or row["low"] <= row["success"] <= row["high"]


def test_advice_of_the_paper(folder):
    """Section 4.1: 172 weights on AI4I's 8 features, 1720 records, 5 subsamples of 10,000."""
    found = as_json("integral", "advice", "--features", "8", "--records", "10000")
    assert found["num_parameters"] == 172
    assert found["rule_of_thumb"] == {"records": 1720, "num_subsamples": 5}
    said, _ = fedpriv("integral", "advice", "plain.csv", "--target", "label", folder=folder)
    assert "disjoint subsamples of 420" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("select", "plain.csv", "--target", "label", "--subsample-size", "300", "--epsilon", "1"), "give 1 "),
        (("select", "none.csv", "--target", "label", "--subsample-size", "9", "--epsilon", "0.1"), "no such file"),
        (("attack", "plain.csv", "--target", "y"), "target = 'y': no such column; there are x, label"),
        (("advice",), "give a CSV with its --target, or --features and --records"),
    ],
)
def test_a_mistake_is_one_line_and_the_number_of_threads_is_the_callers_again(folder, arguments, words):
    with with_threads(2):
        assert words in refused("integral", *arguments, folder=folder)
        assert torch.get_num_threads() == 2

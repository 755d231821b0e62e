"""`fedpriv integral` on tables that nobody prepared, and one line for what cannot be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

from fedpriv.cli import main as cli

Fedpriv = Callable[..., str]


@pytest.fixture
def fedpriv(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Fedpriv]:
    """Runs the command line in this process, in the folder; gives stdout, or stderr where it fails."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(folder)

    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["fedpriv", "integral", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, out + err
        return out if code == 0 else err

    yield run
    torch.set_num_threads(threads)


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
    labels = rng.random(600) < 0.3
    numbers = rng.normal(size=600) + 3 * labels
    rows = [f"{number:.4f},{'yes' if label else 'no'}" for number, label in zip(numbers, labels, strict=True)]
    (folder / "plain.csv").write_text("x,label\n" + "\n".join(rows) + "\n")
    return folder


def test_select_on_a_messy_table_with_ten_classes(fedpriv, folder):
    found = json.loads(
        fedpriv(
            "select", "messy.csv", "--target", "grade", "--subsample-size", "100", "--epsilon", "0.05",
            "--epochs", "2", "--out", "means", "--json",
        )
    )  # fmt: skip
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


def test_select_says_plainly_when_there_is_no_cluster(fedpriv):
    said = fedpriv(
        "select", "plain.csv", "--target", "label", "--subsample-size", "60", "--epsilon", "0.0001",
        "--epochs", "10", "--clustering", "complete", "--align", "--drop", "x", code=2,
    )  # fmt: skip
    assert "no other column holds anything to learn from" in said
    said = fedpriv(
        "select", "plain.csv", "--target", "label", "--subsample-size", "60", "--epsilon", "0.0001",
        "--epochs", "10", "--clustering", "complete", "--align",
    )  # fmt: skip
    assert (
        "No two of 7 models are within 0.0001 of each other: there is no cluster, and nothing is recommended." in said
    )
    assert "majority class" in said


def test_attack_reports_every_target_against_chance(fedpriv):
    found = json.loads(
        fedpriv(
            "attack", "plain.csv", "--target", "label", "--subsample-size", "10", "--owners", "4",
            "--trials", "2", "--subsamples", "20", "--best", "3", "--epochs", "2", "--overfit-epochs", "5",
            "--dp-epsilon", "8", "--dp-steps", "3", "--json",
        )
    )  # fmt: skip
    assert found["chance"] == 0.5
    names = [row["name"] for row in found["targets"]]
    assert "plain, overfitted" in names
    assert "DP-SGD, epsilon 8" in names
    for row in found["targets"]:
        assert row["note"] or row["low"] <= row["success"] <= row["high"]


def test_advice_of_the_paper(fedpriv):
    """Section 4.1: 172 weights on AI4I's 8 features, 1720 records, 5 subsamples of 10,000."""
    found = json.loads(fedpriv("advice", "--features", "8", "--records", "10000", "--json"))
    assert found["num_parameters"] == 172
    assert found["rule_of_thumb"] == {"records": 1720, "num_subsamples": 5}
    assert "disjoint subsamples of 420" in fedpriv("advice", "plain.csv", "--target", "label")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("select", "plain.csv", "--target", "label", "--subsample-size", "300", "--epsilon", "1"), "give 1 "),
        (("select", "none.csv", "--target", "label", "--subsample-size", "9", "--epsilon", "0.1"), "no such file"),
        (("attack", "plain.csv", "--target", "y"), "target = 'y': no such column; there are x, label"),
        (("advice",), "give a CSV with its --target, or --features and --records"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line(fedpriv, arguments, words):
    said = fedpriv(*arguments, code=2)
    assert words in said
    assert len(said.strip().splitlines()) == 1

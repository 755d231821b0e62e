"""`fedpriv audit`: bounds and membership from score files, and one line for what is wrong with a file."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from fedpriv.methods.audit._bounds import one_run_audit
from tests.cli.command_line import as_json, fedpriv, refused
from tests.cli.inputs import write_csv


def text(*arguments: object) -> str:
    """What `fedpriv audit` prints for a reader."""
    return fedpriv("audit", *arguments)[0]


def error(*arguments: object) -> str:
    """What is wrong with the arguments."""
    return refused("audit", *arguments)


def write_scores(path: Path, num: int, *, seed: int, gain: int) -> tuple[Path, np.ndarray, np.ndarray]:
    """A file of scores, which inclusion raises by `gain`, with the scores and who was included."""
    rng = np.random.default_rng(seed)
    included = (rng.random(num) < 0.5).astype(int)
    scores = gain * included + rng.standard_normal(num)
    return write_csv(path, score=scores, included=included), scores, included


@pytest.fixture
def game(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    return write_scores(tmp_path / "scores.csv", 400, seed=1, gain=2)


def test_one_run_is_the_librarys_bound_and_a_refuted_claim_has_exit_code_1(game):
    path, scores, included = game
    fixed = ("--delta", 1e-5, "--guesses", 60, "--gaussian")
    found = as_json("audit", "one-run", "--scores", path, *fixed)
    expected = one_run_audit(scores, included, num_guesses=60, delta=1e-5)
    assert found["epsilon_lower"] == expected.epsilon_lower < found["gaussian_epsilon_lower"]
    assert found["num_correct"] == expected.num_correct
    assert "epsilon >=" in text("one-run", "--scores", path, *fixed)
    assert as_json("audit", "one-run", "--scores", path, "--claimed-epsilon", 0.5, code=1)["claim_refuted"] is True
    assert "not refuted" in text("one-run", "--scores", path, "--claimed-epsilon", 50)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("score,included\n1,0\nnan,1\n", "score = 'nan' in"),
        ("score,included\n1,0\nx,1\n", "line 3: must be a finite number"),
        ("score,included\n1,1\n2,1\n", "needs canaries in and out"),
        ("score,included\n1,0\n2\n", "line 3: 1 values for 2 columns"),
        ("score,included\n1,0\n2,3\n", "included = 3: must be 0 or 1"),
        ("score,inside\n1,0\n", "column 'included'"),
        ("score,included\n", "has no rows"),
        ("", "has no rows"),
    ],
)
def test_a_bad_score_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "bad.csv"
    path.write_text(content)
    assert message in error("one-run", "--scores", path)


def test_missing_file_and_bad_options_are_named(tmp_path, game):
    path, *_ = game
    assert "no such file" in error("one-run", "--scores", tmp_path / "none.csv")
    assert "num_guesses = 3" in error("one-run", "--scores", path, "--guesses", 3)
    assert "delta = 1.0" in error("one-run", "--scores", path, "--delta", 1.0)
    assert "confidence = 2.0" in error("one-run", "--scores", path, "--confidence", 2)
    assert "needs --guesses" in error("one-run", "--scores", path, "--gaussian")


def test_membership_makes_every_attack_that_the_columns_allow(tmp_path):
    rng = np.random.default_rng(2)
    members = (rng.random((5, 300)) < 0.5).astype(int)
    losses = np.exp(rng.standard_normal((5, 300)) - members)
    shadows = {f"shadow_loss_{i}": losses[i] for i in range(1, 5)}
    inside = {f"shadow_member_{i}": members[i] for i in range(1, 5)}
    usable = (members[1:].sum(axis=0) % 4 != 0).nonzero()[0]
    columns = {"member": members[0], "loss": losses[0], "reference_loss": losses[1], **shadows, **inside}
    path = write_csv(tmp_path / "losses.csv", **{name: column[usable] for name, column in columns.items()})
    plot = tmp_path / "roc.png"
    found = as_json("audit", "membership", "--scores", path, "--roc-plot", plot)
    assert set(found["attacks"]) == {"loss", "calibrated", "lira", "rmia"}
    assert found["attacks"]["loss"]["auc"] > 0.6
    assert plot.stat().st_size > 1000
    assert "release that no epsilon covers" in text("membership", "--scores", path)


def test_membership_names_what_is_missing(tmp_path):
    path = write_csv(tmp_path / "a.csv", member=[0, 1], other=[1, 2])
    assert "needs loss or score" in error("membership", "--scores", path)
    path = write_csv(tmp_path / "b.csv", member=[0, 1], loss=[1, 2], shadow_loss_1=[1, 2])
    assert "shadow_member_1" in error("membership", "--scores", path)


def test_any_model_can_be_audited_by_a_function_of_ones_own(tmp_path, monkeypatch):
    safetensors.torch.save_file({"mean": torch.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "judge_of_a_model.py").write_text(
        "def judge():\n    return lambda tensors: (tensors['mean'].numpy(), [1, 1, 0, 0])\n"
    )
    monkeypatch.chdir(tmp_path)
    found = as_json("audit", "model", "model.safetensors", "--losses", "judge_of_a_model:judge")
    assert found["attacks"]["loss"]["auc"] == 1.0
    assert "no such file" in error("model", "none.safetensors", "--losses", "judge_of_a_model:judge")
    assert "MODULE:FUNCTION" in error("model", "model.safetensors", "--losses", "nowhere:judge")
    (tmp_path / "model.txt").write_text("x")
    assert "not a safetensors file" in error("model", "model.txt", "--losses", "judge_of_a_model:judge")


def test_several_runs_count_together_and_no_run_twice(tmp_path):
    paths = [write_scores(tmp_path / f"{seed}.csv", 200, seed=seed, gain=1)[0] for seed in (5, 6)]
    options = ("--delta", 1e-5, "--guesses", 60)
    once = as_json("audit", "one-run", "--scores", paths[0], *options)
    both = as_json("audit", "one-run", "--scores", paths[0], "--scores", paths[1], *options)
    assert (both["num_canaries"], both["num_guesses"]) == (400, 120)
    assert both["num_correct"] > once["num_correct"]
    assert "two files hold the same run" in error("one-run", "--scores", paths[0], "--scores", paths[0], *options)
    assert "--guesses alone" in error("one-run", "--scores", paths[0], "--scores", paths[1])

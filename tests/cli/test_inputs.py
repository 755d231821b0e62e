"""`fedpriv config check` names every problem in a line each; `schema` prints what an editor reads."""

import json
import re

import pytest
from typer.testing import CliRunner

from fedpriv.cli.main import app
from fedpriv.config import schema
from tests.cli.command_line import as_json, fedpriv


def check(path, text, *options, code=2):
    """The lines that a check of this file prints, which ends with this code."""
    path.write_text(text)
    return fedpriv("config", "check", path, *options, code=code)[0].splitlines()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "study.toml"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            'ronds = 3\nrank = 0\noptimizer = "lion"\nnoise_multiplier = 1\ntarget_epsilon = 8\n',
            [
                r"ronds:.* did you mean rounds\?",
                "noise_multiplier = 1:",
                "rank = 0:",
                "optimizer = 'lion':.*'sgd' or 'adamw'",
            ],
        ),
        (
            'partition = "natural"\nweight_decay = 0.1\nvariant_rounds = [99]\n',
            ["partition ", "weight_decay ", "variant_rounds "],
        ),
        ("target_epsilon = 8\n[[runs]]\nnoise_multiplier = 2\n[[runs]]\nrank = 8\n", ["noise_multiplier = 2:"]),
        (
            'data = "none.csv"\nclient_column = "site"\nnoise_multiplier = 0\nprivacy_view = "aggregate"\n',
            ["noise_multiplier = 0:", "privacy_view = aggregate:"],
        ),
    ],
    ids=["wrong keys", "keys that do not fit", "noise and target in a sweep", "what no run may do"],
)
def test_all_problems_are_told_at_once_without_a_look_at_files(file, text, problems):
    lines = check(file, text, "--no-files")
    assert all(re.match(problem, line) for problem, line in zip(problems, lines, strict=True)), lines


def test_problems_of_a_sweep_s_runs_are_told_once_each(file):
    text = 'title = "t"\n[grid]\nrank = [4, -1]\nseed = [0, 1, 2]\n'
    assert check(file, text) == ["rank = -1: input should be greater than or equal to 1"]
    lines = check(file, text.replace(", -1", ""), "--no-files", code=0)
    assert lines == [f"{file}: a sweep of 3 runs, nothing wrong"]
    check(file, "grid = 3\n", code=2)


def test_files_that_it_names_are_looked_for_unless_told_otherwise(file, tmp_path, table):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    text = f'data = "{table}"\nlabel_column = "lable"\nmodel = "{tmp_path}/none"\nout = "{tmp_path}/full"\n'
    lines = check(file, text)
    assert [line.split(" ")[0] for line in lines] == ["out", "model", "label_column"]
    assert "it has text, label, site" in lines[2]
    check(file, text, "--no-files", code=0)


@pytest.mark.parametrize("key", ["recipe = 'dp-lora-paper'", "clipping = 'batch'"])
def test_that_the_papers_noise_is_not_divided_by_its_batch_is_said(file, key):
    lines = check(file, key, "--no-files", code=0)
    assert "not divided by batch_size, and the gradient that it hides has length C at most" in lines[-2]
    joint = check(file, f"{key.partition('clip')[0]}\nclipping = 'joint'", "--no-files", code=0)
    assert not any("not divided" in line for line in joint)


def test_what_is_no_toml_is_one_line(file, tmp_path):
    check(file, "rounds = = 3", code=2)
    lines = check(file, "rounds = = 3", "--json")
    assert json.loads(lines[0])["problems"] == [f"{file}: not a TOML file (Invalid value (at line 1, column 10))"]
    fedpriv("config", "check", tmp_path / "none.toml", code=2)


def test_json_of_a_check(file):
    file.write_text("rounds = 5\n")
    expected = {"file": str(file), "kind": "run", "num_runs": 1, "problems": [], "notes": []}
    assert as_json("config", "check", file, "--no-files") == expected


def test_the_schema_is_printed_for_runs_and_for_sweeps():
    assert json.loads(fedpriv("config", "schema")[0]) == schema()
    assert json.loads(fedpriv("config", "schema", "--sweep")[0]) == schema(sweep=True)
    assert "| `rounds = 40` | integer >= 1 |" in fedpriv("config", "schema", "--markdown")[0]


def test_completion_knows_the_names_of_options():
    found = CliRunner().invoke(
        app,
        prog_name="fedpriv",
        env={"_FEDPRIV_COMPLETE": "complete_bash", "COMP_WORDS": "fedpriv account --accountant cl", "COMP_CWORD": "3"},
    )
    assert found.stdout.split() == ["closed-form"]


def test_a_table_that_a_run_would_refuse_ends_its_check_with_one_and_a_mended_copy_with_zero(tmp_path):
    rows = ["a rash on the left knee,skin,North", "a cough at night,lung,North", "chest pain,heart,north"]
    (tmp_path / "t.csv").write_text("\n".join(["text,label,client", *rows * 30]) + "\n")
    options = ["--model", "", "--client", "client"]
    refused, _ = fedpriv("data", "check", tmp_path / "t.csv", *options, code=1)
    assert "a run refuses: clients: 'north' differs from 'North'" in refused
    fedpriv("data", "check", tmp_path / "t.csv", *options, "--fix", tmp_path / "clean.csv")
    fedpriv("data", "check", tmp_path / "clean.csv", *options)

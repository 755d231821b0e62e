"""The command line: bad input gives one line, with what would be right and nothing written; and completion by tab."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedpriv.config import KEYS
from simulations.__main__ import _engine_names, _override_names, _recipe_names, app

ROOT = Path(__file__).resolve().parents[2]
ASK = """
eval "$({python} -m simulations --show-completion)"
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}
_simulations_completion
echo "${{COMPREPLY[*]}}"
"""


SITES = ["data={table}", "client_column=site"]
SMALL = [*SITES, "batch_size=8", "model={tiny}"]


def simulate(tmp_path: Path, *pairs: str) -> Result:
    overrides = [part for pair in pairs for part in ("-c", pair)]
    return CliRunner().invoke(app, ["run", *overrides, "--out", str(tmp_path / "out")])


def weightless(tmp_path: Path) -> Path:
    folder = tmp_path / "no-weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


@pytest.mark.parametrize(
    ("pairs", "parts"),
    [
        (["ronds=3"], ["ronds", "unknown configuration key", "rounds"]),
        (["noise_multiplier=-1"], ["noise_multiplier = -1", "greater than or equal to 0"]),
        (["batch_size=401"], ["batch_size = 401", "400"]),
        (["data=/no/such.csv"], ["data = '/no/such.csv'", "no such file"]),
        ([*SITES, "text_column=txt"], ["text_column = 'txt'", "text, label, site"]),
        (["data={table}", "client_column=hospital"], ["client_column = 'hospital'", "text, label, site"]),
        ([*SITES, "test_data={odd}"], ["label_column = 'label'", "astrology", "{odd}"]),
        ([*SITES, "batch_size=8", "model={weightless}"], ["model = ", "{weightless}", "weights"]),
        ([*SMALL, "comparison=true", "rounds=1"], ["comparison = true", "simulate"]),
        ([*SMALL, "noise_multiplier=0"], ["noise_multiplier = 0", "simulate"]),
        (["data={table}", "partition=natural"], ["partition = natural", "client_column"]),
        (["data={table}", "partition=iid", "num_clients=500"], ["num_clients = 500", "240"]),
        (["data={table}", "partition=sizes", "client_sizes=[100, 0]"], ["client_sizes", "greater than or equal to 1"]),
        (["rounds"], ["rounds", "key=value"]),
        (["engine=teleport"], ["engine = 'teleport'", "in-process"]),
        (["layers=last-9"], ["layers = 'last-9'", "6 layers"]),
        (["max_length=100000"], ["max_length = 100000", "256"]),
    ],
    ids=lambda value: value[-1].split("{")[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, table, tiny_bert, pairs, parts):
    odd = tmp_path / "odd.csv"
    odd.write_text("text,label\nthe stars,astrology\npain,cardiology\n")
    names = {"table": table, "odd": odd, "weightless": weightless(tmp_path), "tiny": tiny_bert}
    result = simulate(tmp_path, *(pair.format(**names) for pair in pairs))
    assert result.exit_code == 2, result.output
    # What implies another recipe is said first; and that it starts, where the model has to be opened to see it.
    assert all(line == "starting" or line.startswith("recipe = ") for line in result.stdout.splitlines())
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for part in parts:
        assert part.format(**names) in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_configuration_file_is_one_line(tmp_path):
    result = CliRunner().invoke(app, ["run", str(tmp_path / "none.toml")])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "no such configuration file" in result.stderr


def test_keys_their_values_engines_and_recipes_are_completed():
    assert _override_names("target_e") == ["target_epsilon=", "target_epsilon_published="]
    assert _override_names("") == [f"{key}=" for key in KEYS]
    assert _override_names("simulate=") == ["simulate=true", "simulate=false"]
    assert _override_names("mechanism=l") == ["mechanism=lmo"]
    assert _override_names("rank=") == _override_names("none=") == []
    assert _engine_names("") == ["stacked", "in-process", "ray"]
    assert _recipe_names("dp") == ["dp-lora-paper"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("-m simulations ru", "run"),
        ("-m simulations run --recipe d", "dp-lora-paper"),
        ("-m simulations run -c rounds=3 -c engine=st", "stacked"),
        ("-m simulations run -c target_r", "target_risk="),
        ("-m simulations run simulations/conf", ""),
        ("script.py ", ""),
    ],
)
def test_bash_asks_and_gets_what_it_can_put_in_place(line, answers):
    script = ASK.format(python=sys.executable, line=f"{sys.executable} {line}")
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (answers, "")

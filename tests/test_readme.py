"""Everything that the README and the pages for researchers, officers and developers tell a stranger to type is run.

`make run` and `make test` install into the clone; here the first one's last line is run, and CI runs the second one
(.ci/run). Both on a fresh clone are tried by hand before a release. The operator's page is run by
tests/deployment/test_walkthrough.py.
"""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from tests.cli.inputs import write_csv
from tests.test_docs_code import ROOT, blocks

README = (ROOT / "README.md").read_text()
# Lines to type that a person, test_what_make_run_starts_ends_with_a_report, .ci/run or tests/test_site.py runs, and
# what test_own_data does. A line that the README gains is missing here, and fails.
RUN_ELSEWHERE = {
    'git clone "${REPOSITORY:?set it to the address of this repository}" fedpriv && cd fedpriv',
    *("make run", "make test", "make docs"),
}
OWN_DATA = ["data", "init", "config", "run", "predict", "export", "card", "push"]
HERE = Path(sys.executable).parent
# What makes a run short; everything else is the line's own.
FEW_ROUNDS = ["-c", "rounds=3", "-c", "lora_rounds=1", "-c", "comparison=false", "-c", "baselines=false"]
SHORT = [*FEW_ROUNDS, "-c", "max_records=60"]
A_RUN = "fedpriv run --out results/20261121-042553-embedded -c ledger=results/ledger.sqlite"
# {page: {a line: what is appended to it, or who else runs it}}. A line that a page gains is missing here, and fails.
LINES: Mapping[str, Mapping[str, Sequence[str] | str]] = {
    "simulation": {
        "fedpriv run": SHORT,
        "fedpriv run -c rounds=10 -c target_epsilon=4": SHORT[4:],
        "fedpriv run simulations/configs/medquad.toml --out results/medquad": FEW_ROUNDS,
        "fedpriv init messages.csv": "tests/test_readme.py",
        "fedpriv config check messages.toml": "tests/test_readme.py",
        "fedpriv run messages.toml": "tests/test_readme.py",
        'pip install -e ".[federation,offline,partition,ray]"': "a person",
        "export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1": "tests/integration/test_flower_engine.py",
        "export RAY_ADDRESS=local": "tests/integration/test_flower_engine.py",
        'flwr run . --stream --federation-config "num-supernodes=5" -c "out=\'$PWD/results/flower\'"': (
            "tests/integration/test_flower_engine.py"
        ),
    },
    "sweeps": {"fedpriv sweep simulations/configs/sweeps/epsilon.toml": [*SHORT, "--max-parallel", "1"]},
    "ledger": {
        "fedpriv ledger show results/ledger.sqlite --budget-epsilon 4": [],
        "fedpriv ledger verify results/ledger.sqlite --head DIGEST": [],
        "fedpriv ledger statement results/ledger.sqlite --client 4": [],
    },
    "accounting": {
        "fedpriv account --noise-multiplier 1.88 --sampling-probability 0.16 --steps 30 --delta 1e-5": [],
        "fedpriv calibrate --epsilon 2 --delta 1e-5 --sampling-probability 0.16 --steps 30": [],
        "fedpriv run -c budget_epsilon=4 -c ledger=results/ledger.sqlite": SHORT,
        "fedpriv evidence results/20261121-042553-embedded --out bundle.zip": [],
        "unzip bundle.zip verify_evidence.py": [],
        "python verify_evidence.py bundle.zip": [],
    },
    "audit": {
        "fedpriv audit power --canaries 250 --epsilon 4": [],
        "fedpriv run -c audit=tokens -c audit_canaries=50": SHORT,
        "fedpriv audit one-run --scores scores.csv --delta 1e-5 --guesses 200 --claimed-epsilon 4": [],
        "fedpriv audit membership --scores losses.csv --roc-plot roc.png": [],
        "fedpriv audit model mean-1.safetensors --losses study:judge": [],
    },
}


def lines_to_type() -> list[str]:
    """What stands in blocks without a language, and `make` in sentences."""
    code = "\n".join(blocks(README, "", "sh")).replace("\\\n", " ")
    typed = [" ".join(line.split("#")[0].split()) for line in code.splitlines() if line.strip()]
    return typed + [made for made in re.findall(r"`(make \w+)`", README) if made not in typed]


def environment() -> dict[str, str]:
    """The variables of this process without what leads to this clone."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}


def start(line: str, folder: Path, *more: object, programs: Path = HERE) -> str:
    """What a line prints, with the programs of this environment or another one; it ends with success."""
    program, *words = shlex.split(line)
    variables = environment() | {"COLUMNS": "100"} | ({"PYTHONPATH": str(ROOT)} if programs == HERE else {})
    command = [str(programs / Path(program).name), *words, *map(str, more)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_every_line_that_the_readme_shows_has_something_that_runs_it():
    others = [line.split() for line in lines_to_type() if line not in RUN_ELSEWHERE]
    assert [words[:1] for words in others] == [["fedpriv"]] * len(OWN_DATA)
    assert [words[1] for words in others] == OWN_DATA
    assert set(lines_to_type()) >= RUN_ELSEWHERE


@pytest.mark.slow
def test_what_make_run_starts_ends_with_a_report(tmp_path):
    made = re.search(r"^run: .*\n\t\$\(BIN\)/(fedpriv .*)$", (ROOT / "Makefile").read_text(), re.M)
    assert made
    shown = start(made[1], ROOT, "--out", tmp_path / "run")
    assert "St. Anna" in shown
    assert "2.30" in shown
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def check_own_data(folder: Path, programs: Path) -> None:
    """Type every line about a stranger's own table, and look at what each says."""
    departments, hospitals = ["cardiology", "neurology"] * 150, ["Anna"] * 150 + ["Bruno"] * 150
    letters = [f"message {number} about {department}" for number, department in enumerate(departments)]
    write_csv(folder / "messages.csv", text=letters, department=departments, hospital=hospitals)
    said = {}
    for line in (line for line in lines_to_type() if line not in RUN_ELSEWHERE):
        name = line.split()[1]
        quick = ["-c", "rounds=6", "-c", "lora_rounds=1"] if name == "run" else []
        said[name] = start(line, folder, *quick, programs=programs)
    assert "300" in said["data"]
    assert "messages.toml" in said["init"]
    assert "Bruno" in said["run"]
    assert (folder / "results" / "messages" / "report.html").exists()
    assert re.search("cardiology|neurology", said["predict"])
    assert (folder / "classifier" / "modules.json").exists()
    assert "epsilon" in said["card"]
    assert "adapter_model.safetensors" in said["push"]


@pytest.mark.slow
def test_own_data(tmp_path):
    check_own_data(tmp_path, HERE)


@pytest.mark.slow
def test_the_lines_of_python(tmp_path, capsys):
    (code,) = blocks(README, "python")
    assert len([line for line in code.splitlines() if line]) <= 10
    assert code.count("run(") == 1
    found: dict[str, object] = {"__name__": "__main__"}
    exec(compile(code.replace("run(", f"run(out={str(tmp_path / 'run')!r}, "), "README.md", "exec"), found)
    assert "2.094" in capsys.readouterr().out
    for table in (found["result"].rounds, found["result"].clients, found["result"].report()):
        assert isinstance(table, pd.DataFrame)


def lines_of(page: str) -> list[str]:
    """What stands in a page's blocks without a language, less comments, output and the place of the programs."""
    typed = list[str]()
    for block in blocks((ROOT / "docs" / f"{page}.md").read_text(), ""):
        lines = block.splitlines()
        typed += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
    parts = [part.split(" #")[0] for line in typed if line.strip() for part in line.split(" && ")]
    parts = [part.removeprefix("PATH=$PWD/.venv/bin:$PATH ").removeprefix(".venv/bin/") for part in parts]
    return [" ".join(part.split()) for part in parts]


@pytest.mark.parametrize("page", LINES)
def test_every_line_of_a_page_has_something_that_runs_it(page: str) -> None:
    assert sorted(lines_of(page)) == sorted(LINES[page])
    for runner in LINES[page].values():
        assert not isinstance(runner, str) or runner == "a person" or (ROOT / runner).is_file()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the pages take for granted: the clone's configurations, files to audit, and public data."""
    (tmp_path / "simulations").symlink_to(ROOT / "simulations")
    included = np.arange(400) % 2
    scores = np.random.default_rng(0).normal(included)
    write_csv(tmp_path / "scores.csv", score=scores, included=included)
    write_csv(tmp_path / "losses.csv", loss=-scores, member=included)
    kinds = ["information", "symptoms", "treatment", "inheritance"]
    kinds = [*kinds, "frequency", "genetic changes", "causes", "exams and tests"] * 20
    answers, sources = [f"answer {n} on {kind}" for n, kind in enumerate(kinds)], ["north"] * 80 + ["south"] * 80
    write_csv(tmp_path / "medquad.csv", answer=answers, question_type=kinds, source=sources)
    (tmp_path / "medquad.csv.gz").write_bytes(gzip.compress((tmp_path / "medquad.csv").read_bytes()))
    save_file({"weight": np.ones(2, dtype=np.float32)}, tmp_path / "mean-1.safetensors")
    (tmp_path / "study.py").write_text(
        "import numpy as np\n\n\ndef judge():\n    return lambda tensors: (np.arange(40.0), np.arange(40) < 20)\n"
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", LINES)
def test_the_lines_of_a_page_run(page: str, folder: Path) -> None:
    if page in ("ledger", "accounting"):
        start(A_RUN, folder, *SHORT)
    for line in lines_of(page):
        how = LINES[page][line]
        if isinstance(how, str):
            continue
        if "DIGEST" in line:
            told = json.loads(start("fedpriv ledger verify results/ledger.sqlite --json", folder))
            line = line.replace("DIGEST", told["head"])
        program, *words = shlex.split(line)
        programs = Path("/usr/bin") if program == "unzip" else HERE
        start(shlex.join([program, *words]), folder, *how, programs=programs)

"""Everything that the README tells a stranger to type is run.

`make run` and `make test` install into the clone; here the first one's last line is run, and CI runs the second one
(.ci/run). Both on a fresh clone are tried by hand before a release.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.test_docs_code import ROOT, blocks

README = (ROOT / "README.md").read_text()

# {a line to type: the test that runs it}. A line that the README gains is missing here, and fails.
RUN_BY = {
    'git clone "${REPOSITORY:?set it to the address of this repository}" fedpriv && cd fedpriv': "a person",
    "make run": "test_what_make_run_starts_ends_with_a_report",
    "make test": ".ci/run",
    "fedpriv data check messages.csv --text text --label department --client hospital": "test_own_data",
    "fedpriv init messages.csv --epsilon 4": "test_own_data",
    "fedpriv config check messages.toml": "test_own_data",
    "fedpriv run messages.toml --out results/messages": "test_own_data",
    "fedpriv predict results/messages 'a rash on the left knee'": "test_own_data",
    "fedpriv export results/messages classifier": "test_own_data",
    "fedpriv card results/messages": "test_own_data",
    "fedpriv push results/messages clinic/letters": "test_own_data",
    "make docs": "tests/test_site.py",
}


def lines_to_type() -> list[str]:
    """What stands in blocks without a language, and `make` in sentences."""
    code = "\n".join(blocks(README, "", "sh")).replace("\\\n", " ")
    typed = [" ".join(line.split("#")[0].split()) for line in code.splitlines() if line.strip()]
    return typed + [made for made in re.findall(r"`(make \w+)`", README) if made not in typed]


HERE = Path(sys.executable).parent


def start(line: str, folder: Path, *more: object, programs: Path = HERE) -> str:
    """What a line prints, with the programs of this environment or another one; it ends with success."""
    program, *words = shlex.split(line)
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    environment |= {"COLUMNS": "100"} | ({"PYTHONPATH": str(ROOT)} if programs == HERE else {})
    command = [str(programs / Path(program).name), *words, *map(str, more)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_every_line_that_the_readme_shows_has_something_that_runs_it():
    assert sorted(set(lines_to_type())) == sorted(RUN_BY)


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
    with (folder / "messages.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "department", "hospital"])
        for number in range(300):
            department = ["cardiology", "neurology"][number % 2]
            writer.writerow([f"message {number} about {department}", department, ["Anna", "Bruno"][number // 150]])
    said = {}
    for line in (line for line in lines_to_type() if RUN_BY[line] == "test_own_data"):
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

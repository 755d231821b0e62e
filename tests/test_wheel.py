"""The wheel alone, in an empty environment: what somebody gets who installs fedpriv without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ACCOUNT = "account --noise-multiplier 1.88 --sampling-probability 0.16 --steps 30 --delta 1e-5"

pytestmark = pytest.mark.slow


def run(folder: Path, *command: object, code: int = 0) -> str:
    """What a command prints, on both streams, outside the repository and its path."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said[-3000:]
    return said


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(folder, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (made,) = folder.glob("fedpriv-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The folder of programs of a new environment that has the wheel and what it depends on, nothing else."""
    venv.create(wheel.parent / "empty", with_pip=True)
    programs = wheel.parent / "empty" / "bin"
    run(wheel.parent, programs / "python", "-m", "pip", "install", "--quiet", wheel)
    return programs


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fedpriv"}
    assert {"fedpriv/py.typed", "fedpriv/serving/http/page.html"} <= set(names)


def test_the_commands_work_where_nothing_else_is_installed(installed):
    shown = run(installed, installed / "fedpriv", "--help")
    assert "clone" in shown, "the help has to say where simulations and nodes are started"
    assert "2.327" in run(installed, installed / "fedpriv", *ACCOUNT.split())
    assert "accounting" in run(installed, installed / "python", "-c", "import fedpriv; print(dir(fedpriv))")


def test_what_needs_more_says_so_in_one_line(installed, tmp_path):
    said = run(tmp_path, installed / "fedpriv", "serve", "run", tmp_path, code=2)
    assert "pip install 'fedpriv[serve]'" in said
    assert len(said.strip().splitlines()) == 1

"""A coordinator's folder, and its command line in this process."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from server.deploy import folder
from server.deploy.__main__ import app
from server.deploy.folder import Coordinator
from simulations.sites import free_port, run_in_process
from tests.bundles import bundled_once

PASSPHRASE = "correct horse battery"


def deploy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_in_process(app, "fedpriv coordinator", *arguments)


def refused(*arguments: object) -> str:
    """The one line with which a command is refused."""
    done = deploy(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    return done.stderr


def make(path: Path, *addresses: str, **options: Any) -> Coordinator:
    """A coordinator's folder for these addresses."""
    given = {"addresses": addresses, "port": 9093, "days": 30, "passphrase": PASSPHRASE, **options}
    return folder.make(path, **given)


@pytest.fixture(autouse=True)
def _bundled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bundled_once(monkeypatch)


@pytest.fixture
def coordinator(tmp_path):
    return make(tmp_path / "co", "127.0.0.1", "fl.example.org", port=free_port())


@pytest.fixture
def passphrase_file(tmp_path):
    file = tmp_path / "passphrase"
    file.write_text(f"{PASSPHRASE}\n")
    return file


@pytest.fixture
def planned(tmp_path, tiny_bert):
    """A coordinator that plans a run with the tiny BERT."""
    values = {"model": str(tiny_bert), "data": "on-nodes", "labels": ["a", "b"], "rounds": 7, "test_data": "/own/t.csv"}
    return make(tmp_path / "co", "h.org", planned=values)

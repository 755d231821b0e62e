"""A coordinator's folder, and its command line in this process."""

import subprocess

import pytest

from server.deploy import folder
from server.deploy.__main__ import app
from simulations.sites import free_port, run_in_process
from tests.bundles import bundled_once

PASSPHRASE = "correct horse battery"


def deploy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_in_process(app, "fedpriv coordinator", *arguments)


@pytest.fixture(autouse=True)
def _bundled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bundled_once(monkeypatch)


@pytest.fixture
def coordinator(tmp_path):
    return folder.make(
        tmp_path / "co", addresses=["127.0.0.1", "fl.example.org"], port=free_port(), days=30, passphrase=PASSPHRASE
    )


@pytest.fixture
def passphrase_file(tmp_path):
    file = tmp_path / "passphrase"
    file.write_text(f"{PASSPHRASE}\n")
    return file


@pytest.fixture
def planned(tmp_path, tiny_bert):
    """A coordinator that plans a run with the tiny BERT."""
    values = {"model": str(tiny_bert), "data": "on-nodes", "labels": ["a", "b"], "rounds": 7, "test_data": "/own/t.csv"}
    return folder.make(
        tmp_path / "co", addresses=["h.org"], port=free_port(), days=30, passphrase=PASSPHRASE, planned=values
    )

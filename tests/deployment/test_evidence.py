"""The evidence of two nodes and their coordinator is confirmed: what was signed is what the three ledgers charged."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulations.sites import DeployedFederation
from tests.cli.command_line import as_json
from tests.deployment.conftest import QUICK, holdings

pytestmark = pytest.mark.deployment

NODES = range(2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, table, tiny_bert) -> Iterator[DeployedFederation]:
    folder = tmp_path_factory.mktemp("pair")
    own = holdings(folder, table, num_nodes=len(NODES))
    federation = DeployedFederation(
        folder / "federation", num_nodes=len(NODES), holdings=own, model=tiny_bert, settings=QUICK
    )
    yield federation
    federation.stop()


def confirmed(path: Path, bundle: Path) -> tuple[list[str], dict[str, bytes]]:
    """The verifier's lines on the evidence of a folder, all of them confirmed, and the bundle's files."""
    as_json("evidence", path, "--out", bundle)
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    program = bundle.with_suffix(".py")
    program.write_bytes(files["verify_evidence.py"])
    done = subprocess.run([sys.executable, "-I", program, bundle], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines(), files


def test_the_evidence_of_a_deployed_run_is_confirmed_at_the_coordinator_and_at_each_node(pair, holders_run, tmp_path):
    pair.run({**holders_run, "num_clients": len(NODES), "noise_multiplier": 4.0, "out": str(tmp_path / "runs" / "out")})
    lines, files = confirmed(tmp_path / "runs" / "out", tmp_path / "run.zip")
    assert sum("its registration is signed by ssh-ed25519" in line for line in lines) == len(NODES)
    assert sum("receipts of data set" in line for line in lines) == len(NODES)
    registered = json.loads(files["run/registrations.json"])
    for client in NODES:
        lines, files = confirmed(pair.node(client), tmp_path / f"node-{client}.zip")
        assert any(f"2 receipts of data set {registered[str(client)]['data_set']}" in line for line in lines)
        assert any("by the rule renyi" in line for line in lines)
        assert "Clinic" not in files["node/about.json"].decode() + files["node/figures.json"].decode()

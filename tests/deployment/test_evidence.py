"""The evidence of two nodes and their coordinator is confirmed: what was signed is what the three ledgers charged."""

import json
import math
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulations.sites import DeployedFederation
from tests.cli.command_line import as_json
from tests.deployment.conftest import OF_A_PERSON, deployed

# test_budgets.py has the evidence of a run and of its nodes confirmed too.
pytestmark = [pytest.mark.deployment, pytest.mark.nightly]

NODES = range(2)


@pytest.fixture(scope="module", params=["record", "person"])
def unit(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(tmp_path_factory, table, tiny_bert, unit) -> Iterator[DeployedFederation]:
    folder, persons = tmp_path_factory.mktemp("pair"), unit == "person"
    with deployed(folder, table, tiny_bert, num_nodes=len(NODES), persons=persons) as federation:
        yield federation


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


def test_the_evidence_of_a_deployed_run_is_confirmed_at_the_coordinator_and_at_each_node(
    pair, unit, holders_run, tmp_path
):
    values = {**holders_run, "num_clients": len(NODES), "noise_multiplier": 4.0, "unit": unit}
    pair.run({**values, "out": str(tmp_path / "runs" / "out")})
    lines, files = confirmed(tmp_path / "runs" / "out", tmp_path / "run.zip")
    summary = json.loads((tmp_path / "runs" / "out" / "summary.json").read_text())
    held = [len((pair.folder.parent / f"records-{client}.csv").read_text().splitlines()) - 1 for client in NODES]
    protected = [math.ceil(number / (OF_A_PERSON if unit == "person" else 1)) for number in held]
    assert (summary["unit"], [client["num_records"] for client in summary["clients"]]) == (unit, protected)
    assert sum("its registration is signed by ssh-ed25519" in line for line in lines) == len(NODES)
    assert sum("receipts of data set" in line for line in lines) == len(NODES)
    registered = json.loads(files["run/registrations.json"])
    for client in NODES:
        lines, files = confirmed(pair.node(client), tmp_path / f"node-{client}.zip")
        # Those of two rounds, and of the registration.
        assert any(f"3 receipts of data set {registered[str(client)]['data_set']}" in line for line in lines), lines
        assert any("by the rule renyi" in line for line in lines)
        assert "Clinic" not in files["node/about.json"].decode() + files["node/figures.json"].decode()


def test_a_run_for_another_unit_is_refused_and_costs_nothing(pair, unit, holders_run, tmp_path):
    before = [len(pair.charges(client)) for client in NODES]
    other = {"record": "person", "person": "record"}[unit]
    values = {**holders_run, "num_clients": len(NODES), "unit": other, "registration_seconds": 20}
    output = pair.run({**values, "out": str(tmp_path / "out")}, code=1)
    assert "unit" in output, output
    assert [len(pair.charges(client)) for client in NODES] == before

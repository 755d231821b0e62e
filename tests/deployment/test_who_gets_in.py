"""Who is kept out: strangers, borrowed keys, other authorities, expired certificates, plain HTTP, other versions."""

from __future__ import annotations

import http.client
import re
import shutil
import subprocess
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w

from fedpriv.deployment import joining, keys
from server.deploy import superlink
from server.deploy.certificates import make_ca, make_server_certificate
from server.deploy.folder import Coordinator
from simulations.sites import CLIENT, ROOT, SERVER, DeployedFederation, Service, free_port, kit
from tests.deployment.conftest import NUM_NODES

pytestmark = pytest.mark.deployment


@pytest.fixture
def stranger(hospitals: DeployedFederation, tmp_path: Path):
    """Makes a node's folder that was never registered, and starts it."""
    services = []

    def start(name: str, **changes: object) -> Service:
        folder, invitation = tmp_path / name, tmp_path / f"{name}.toml"
        asked = tomllib.loads((hospitals.coordinator / "invitations" / "0.toml").read_text())
        invitation.write_text(tomli_w.dumps(asked | {"name": name, "partition_id": 7} | changes))
        heard = joining.read(joining.Invitation, invitation).fingerprint
        kit(CLIENT, "init", folder, "--invite", invitation, "--fingerprint", heard)
        services.append(Service(tmp_path / f"{name}.log", CLIENT, "start", folder))
        return services[-1]

    yield start
    for service in services:
        service.kill()


def test_an_unregistered_node_is_refused(hospitals, stranger):
    service = stranger("stranger")
    service.wait_for("Exit Code: 305", 90)
    assert "CERTIFICATE" not in service.text()  # the SuperLink was reached, and said no
    assert hospitals.online() == NUM_NODES


def test_another_authority_is_not_trusted(stranger, tmp_path):
    (tmp_path / "other").mkdir()
    make_ca(tmp_path / "other", 30)
    service = stranger("other-ca", ca=(tmp_path / "other" / "ca.crt").read_text())
    service.wait_for("certificate verify failed: unable to get local issuer certificate", 90)
    report = kit(CLIENT, "doctor", tmp_path / "other-ca", code=1)
    assert "signed by another CA" in report


def test_one_key_serves_one_node(hospitals, stranger, tmp_path):
    kit(SERVER, "invite", hospitals.coordinator, "Clinic 0 again")
    node = hospitals.node(0)
    lines = [keys.public_line(node / name) for name in ("node.key", "vault.key")]
    made = joining.made(
        joining.Application, name="Clinic 0 again", partition_id=NUM_NODES, node_key=lines[0], vault_key=lines[1]
    )
    (tmp_path / "again.toml").write_text(joining.text(made.signed(node / "vault.key"), "again"))
    told = ("--fingerprint", keys.fingerprint(lines[1]))
    refusal = kit(SERVER, "admit", hospitals.coordinator, tmp_path / "again.toml", *told, code=2)
    assert "is registered for partition id 0" in refusal, refusal
    twin = tmp_path / "twin"
    shutil.copytree(hospitals.node(0), twin, ignore=shutil.ignore_patterns("vault.sock"))
    text = (twin / "node.toml").read_text()
    old = next(line for line in text.splitlines() if line.startswith("port"))
    (twin / "node.toml").write_text(text.replace(old, f"port = {free_port()}"))
    service = Service(tmp_path / "twin.log", CLIENT, "start", twin)
    try:
        service.wait_for("Exit Code: 305", 90)
        assert "CERTIFICATE" not in service.text()
    finally:
        service.kill()
    assert hospitals.online() == NUM_NODES


def test_plain_http_gets_no_answer(hospitals, tmp_path):
    connection = http.client.HTTPConnection("127.0.0.1", hospitals.port, timeout=10)
    connection.request("GET", "/")
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.getresponse()


def test_an_expired_certificate_is_refused(stranger, tmp_path):
    folder = tmp_path / "coordinator"
    port = free_port()
    told = kit(SERVER, "init", folder, "--address", "127.0.0.1", "--port", port)
    passphrase = re.search("shown this once: (.*)", told)[1]
    past = datetime.now(UTC) - timedelta(days=3)
    make_server_certificate(folder, ("127.0.0.1",), 1, passphrase=passphrase, not_before=past)
    assert "expired" in kit(SERVER, "doctor", folder, code=1)
    assert "expired" in kit(SERVER, "start", folder, code=2)
    # A coordinator that starts it all the same gets no node.
    link = stranger("expired", superlink=f"127.0.0.1:{port}", ca=(folder / "ca.crt").read_text())
    coordinator = Coordinator.read(folder)
    process = subprocess.Popen(
        superlink.command(coordinator), cwd=folder, env=superlink.variables(coordinator), stderr=subprocess.DEVNULL
    )
    try:
        link.wait_for("certificate verify failed: certificate has expired", 90)
        assert "expired" in kit(CLIENT, "doctor", tmp_path / "expired", code=1)
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_node_with_another_version_takes_no_part(hospitals, corpus_run, tmp_path):
    # The node's operator has installed another fedpriv: a copy of this one that says so.
    other = tmp_path / "other"
    other.mkdir()
    for package in ("clients", "fedpriv"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "fedpriv" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    hospitals.services["node-1"].stop()
    hospitals.start_node(1, checkout=other)
    hospitals.wait_for_nodes(NUM_NODES)
    values = {**corpus_run, "rounds": 2, "min_clients": 1, "registration_seconds": 25, "out": str(tmp_path / "out")}
    output = hospitals.run(values)
    assert "software = 'fedpriv 9." in output
    assert "1 of 2 nodes registered" in output

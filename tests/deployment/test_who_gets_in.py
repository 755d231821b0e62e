"""Who is kept out: strangers, borrowed keys, other authorities and versions, expired certificates, other code.

A stranger has ca.crt and the coordinator's address alone.
"""

import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest
import tomli_w
from flwr.proto.runtime_pb2 import AcquireTaskRequest

from fedpriv.operate import approvals, joining
from fedpriv.operate.checks import check_tls
from fedpriv.operate.flower import environment, program_folder
from fedpriv.privacy.ledger import keys
from server.deploy import superlink
from server.deploy.certificates import make_ca, make_server_certificate
from server.deploy.folder import Coordinator
from simulations.sites import CLIENT, ROOT, SERVER, DeployedFederation, Service, free_port, kit, wait_until
from tests.deployment.conftest import NUM_NODES
from tests.deployment.test_full_run import check_against_in_process

pytestmark = pytest.mark.deployment


# So many that the run outlasts all attempts.
_ROUNDS = 12

_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "evil"
version = "1.0.0"
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "evil:app"
clientapp = "evil:client"
"""

_EVIL = """\
from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
app = ServerApp()
client = ClientApp()
@app.main()
def main(grid, context):
    Path({marker!r}).write_text(Path({loot!r}).read_text())
"""


def has_lines(log: str) -> bool:
    """Whether what `flwr log` printed is of a run."""
    return "INFO" in log


def plant(federation: DeployedFederation, marker: Path) -> list[Path]:
    """Code of a stranger's, where Flower would install the operator's approved bundle, on coordinator and nodes."""
    name = f"fedpriv.fedpriv.{metadata.version('fedpriv')}.{approvals.bundle_digest(ROOT)[:8]}"
    homes = [federation.coordinator / "flower", federation.node(0) / "flower"]
    planted = [home / "apps" / name / room / "app.py" for home, room in zip(homes, ("server", "clients"), strict=True)]
    for file in planted:
        file.parent.mkdir(parents=True)
        file.write_text(f"open({str(marker)!r}, 'w').close()\n")
    return planted


class Stranger:
    """Somebody with the coordinator's ca.crt, the address, and a Flower home of their own."""

    def __init__(self, folder: Path, ca: Path, port: int, loot: Path) -> None:
        self.folder, self.port, self.marker = folder, port, folder / "marker"
        self.ca = folder / "ca.crt"
        shutil.copy(ca, self.ca)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "federation"\n[superlink.federation]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{self.ca}"\n'
        )
        keys.make_key_pair(folder / "evil")
        (folder / "app").mkdir()
        (folder / "app" / "pyproject.toml").write_text(_APP)
        (folder / "app" / "evil.py").write_text(_EVIL.format(marker=str(self.marker), loot=str(loot)))

    def flwr(self, *arguments: str) -> bool:
        """Whether a command of Flower's succeeds."""
        text = self._printed(*arguments, "--format", "json")
        found = text.find("{")
        return found >= 0 and bool(json.loads(text[found:]).get("success"))

    def _printed(self, *arguments: str) -> str:
        program = str(Path(sys.executable).parent / "flwr")
        home = {"HOME": str(self.folder), "FLWR_HOME": str(self.folder / "home")}
        done = subprocess.run(
            [program, *arguments], cwd=self.folder / "app", env={**os.environ, **home}, capture_output=True, text=True
        )
        return done.stdout

    def log(self, run: str) -> bool:
        """Whether a run's log can be read."""
        return has_lines(self._printed("log", run, "federation", "--show"))

    def acquires(self) -> bool:
        """Whether the API answers that hands out the ServerApp's token."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=30, context=ssl.create_default_context(cafile=str(self.ca))
        )
        body = AcquireTaskRequest(supported_task_types=["flwr-serverapp"]).SerializeToString()
        connection.request("POST", "/v1/runtime/acquire-task", body, {"Content-Type": "application/protobuf"})
        return connection.getresponse().status == 200

    def got_through(self, run: str) -> list[str]:
        """What of all attempts succeeded, against a run in progress."""
        attempts = {
            "register": lambda: self.flwr("supernode", "register", str(self.folder / "evil.pub"), "federation"),
            "list": lambda: self.flwr("ls", "federation"),
            "log": lambda: self.log(run),
            "run": lambda: self.flwr("run", ".", "federation"),
            "acquire-task": self.acquires,
            "stop": lambda: self.flwr("stop", run, "federation"),
        }
        return [name for name, attempt in attempts.items() if attempt()]


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
    made = joining.Application(name="Clinic 0 again", partition_id=NUM_NODES, node_key=lines[0], vault_key=lines[1])
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


def test_strangers_get_nothing_through_while_nodes_and_operator_work(hospitals, corpus_run, tmp_path):
    stranger = Stranger(tmp_path, hospitals.coordinator / "ca.crt", hospitals.port, hospitals.coordinator / "ca.key")
    planted = plant(hospitals, stranger.marker)
    out = tmp_path / "out"
    values = {**corpus_run, "rounds": _ROUNDS}
    run = hospitals.start_run("operators", {**values, "out": str(out)})
    run.wait_for(r"run \d+ writes", 60)
    number = re.search(r"run (\d+) writes", run.text())[1]
    wait_until(lambda: has_lines(hospitals.flwr("log", number, "federation", "--show")), "the run's log", 60)
    assert stranger.got_through(number) == []
    assert run.process.poll() is None, "the run was over before the attempts were"
    wait_until(lambda: run.process.poll() is not None, "the operator's run", 300)
    assert run.process.returncode == 0, run.text()[-3000:]
    assert json.loads((out / "summary.json").read_text())["num_rounds"] == _ROUNDS
    assert check_against_in_process(hospitals, values, out) != 0
    assert len(json.loads(hospitals.flwr("supernode", "list", "federation", "--format", "json"))["nodes"]) == NUM_NODES
    assert not stranger.marker.exists()
    assert [file.read_text() for file in planted] == [
        (ROOT / file.parent.name / "app.py").read_text() for file in planted
    ]
    assert "closed to register, run, list, stop, log, acquire-task, " in kit(SERVER, "doctor", hospitals.coordinator)


def test_a_bundle_that_the_operator_did_not_approve_is_not_executed(hospitals, tmp_path):
    author = Stranger(tmp_path, hospitals.coordinator / "ca.crt", hospitals.port, hospitals.coordinator / "ca.key")
    started = json.loads(hospitals.flwr("run", str(author.folder / "app"), "federation", "--format", "json"))
    assert started["success"]

    def status() -> str:
        listed = hospitals.flwr("ls", "federation", "--run-id", started["run-id"], "--format", "json")
        return json.loads(listed)["runs"][0]["status"]

    wait_until(lambda: status().startswith("finished"), "the run's end", 60)
    assert (status(), author.marker.exists()) == ("finished:failed", False)
    assert "is not approved; review it" in (hospitals.coordinator / "superlink.log").read_text()


def test_doctor_does_not_take_a_plain_superlink_for_closed(tmp_path):
    folder, port = tmp_path / "coordinator", free_port()
    kit(SERVER, "init", folder, "--address", "127.0.0.1", "--port", port)
    made = Coordinator.read(folder)
    tls = ["--ssl-ca-certfile", made.ca_certificate, "--ssl-certfile", made.server_certificate]
    tls += ["--ssl-keyfile", made.server_key, "--enable-supernode-auth"]
    process = subprocess.Popen(
        [program_folder() / "flower-superlink", "--host", "127.0.0.1", "--port", str(port), *tls],
        env=environment(made.flower_home),
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: check_tls("127.0.0.1", port, made.ca_certificate).ok, "the SuperLink", 60)
        report = kit(SERVER, "doctor", folder, code=1)
        stranger = Stranger(tmp_path, made.ca_certificate, port, made.ca_key)
        assert stranger.flwr("ls", "federation")  # it is open indeed
    finally:
        process.terminate()
        process.wait(timeout=60)
    opened = "register, run, list, stop, log, acquire-task, responses, /docs, /openapi.json"
    assert f"OPEN TO STRANGERS: {opened};" in report, report


def test_a_node_with_another_version_takes_no_part(hospitals, corpus_run, tmp_path):
    # The node's operator has installed another fedpriv: a copy of this one that says so.
    other = tmp_path / "other"
    other.mkdir()
    for package in ("clients", "fedpriv"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "fedpriv" / "texts.py").open("a") as texts:
        texts.write("# of a later commit, with the same version\n")
    hospitals.services["node-1"].stop()
    hospitals.start_node(1, checkout=other)
    hospitals.wait_for_nodes(NUM_NODES)
    values = {**corpus_run, "rounds": 2, "min_clients": 1, "registration_seconds": 25, "out": str(tmp_path / "out")}
    output = hospitals.run(values)
    assert re.search(r"Clinic 1 \(1\): runs fedpriv \S+ \(\w+\), the coordinator fedpriv", output), output
    assert "1 of 2 nodes registered" in output

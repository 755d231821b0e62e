"""Strangers at the coordinator's door, who have ca.crt and its address alone; bundles that nobody approved there."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPSConnection
from importlib import metadata
from pathlib import Path

import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest

from fedpriv.deployment import approvals, keys
from fedpriv.deployment.checks import check_tls
from fedpriv.deployment.flower import environment, program_folder
from server.deploy.folder import Coordinator
from simulations.sites import ROOT, SERVER, DeployedFederation, free_port, kit, wait_until

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
        connection = HTTPSConnection(
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


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedFederation]:
    """A SuperLink and two nodes of the synthetic corpus."""
    federation = DeployedFederation(tmp_path_factory.mktemp("door") / "federation", num_nodes=2)
    yield federation
    federation.stop()


def test_strangers_get_nothing_through_while_nodes_and_operator_work(federation, corpus_run, tmp_path):
    stranger = Stranger(tmp_path, federation.coordinator / "ca.crt", federation.port, federation.coordinator / "ca.key")
    planted = plant(federation, stranger.marker)
    out = tmp_path / "out"
    run = federation.start_run("operators", {**corpus_run, "num_clients": 2, "rounds": _ROUNDS, "out": str(out)})
    run.wait_for(r"run \d+ writes", 60)
    number = re.search(r"run (\d+) writes", run.text())[1]
    wait_until(lambda: has_lines(federation.flwr("log", number, "federation", "--show")), "the run's log", 60)
    assert stranger.got_through(number) == []
    assert run.process.poll() is None, "the run was over before the attempts were"
    wait_until(lambda: run.process.poll() is not None, "the operator's run", 300)
    assert run.process.returncode == 0, run.text()[-3000:]
    assert json.loads((out / "summary.json").read_text())["num_rounds"] == _ROUNDS
    assert len(json.loads(federation.flwr("supernode", "list", "federation", "--format", "json"))["nodes"]) == 2
    assert not stranger.marker.exists()
    assert [file.read_text() for file in planted] == [
        (ROOT / file.parent.name / "app.py").read_text() for file in planted
    ]
    assert "closed to register, run, list, stop, log, acquire-task, " in kit(SERVER, "doctor", federation.coordinator)


def test_a_bundle_that_the_operator_did_not_approve_is_not_executed(federation, tmp_path):
    author = Stranger(tmp_path, federation.coordinator / "ca.crt", federation.port, federation.coordinator / "ca.key")
    started = json.loads(federation.flwr("run", str(author.folder / "app"), "federation", "--format", "json"))
    assert started["success"]

    def status() -> str:
        listed = federation.flwr("ls", "federation", "--run-id", started["run-id"], "--format", "json")
        return json.loads(listed)["runs"][0]["status"]

    wait_until(lambda: status().startswith("finished"), "the run's end", 60)
    assert (status(), author.marker.exists()) == ("finished:failed", False)
    assert "is not approved; review it" in (federation.coordinator / "superlink.log").read_text()


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

"""Secure sums between SuperNodes that start a process for each message: plain FedAvg's mean, and no session is left."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpriv.deployment.flower import environment, program_folder
from fedpriv.ledger import reading
from simulations.sites import ROOT, free_port, wait_until
from tests.flower.test_flower_examples import EXAMPLES, NOISE_OFF, check_same, edit

pytestmark = [pytest.mark.deployment, pytest.mark.nightly]

NUM_NODES, ROUNDS = 3, 2


class SuperNodes:
    """A SuperLink and three SuperNodes on loopback, each message of which has a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.home = folder / "flower"
        self.home.mkdir(parents=True)
        address = f"127.0.0.1:{self.port}"
        (self.home / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\ninsecure = true\n')
        self.variables = environment(self.home, PYTHONPATH=str(ROOT))
        self.processes = [self._start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", self.port)]
        wait_until(lambda: "success" in self.flwr("ls", "here", "--format", "json"), "SuperLink answers", 60)
        for k in range(NUM_NODES):
            config = f"partition-id={k} num-partitions={NUM_NODES}"
            node = ("flower-supernode", "--insecure", "--superlink", address, "--port", free_port())
            self.processes.append(self._start(*node, "--node-config", config))

    def _start(self, program: str, *arguments: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [program_folder() / program, *map(str, arguments)],
            env=self.variables,
            cwd=self.folder,
            stdout=(self.folder / "log").open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def flwr(self, *arguments: str) -> str:
        command = [str(program_folder() / "flwr"), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout

    def run(self, app: Path, config: str) -> str:
        """The status in which a run of an app ends."""
        output = self.flwr("run", str(app), "here", "-c", config)
        found = re.search(r"Successfully started run (\d+)", output)
        assert found, output

        def status() -> str:
            return json.loads(self.flwr("ls", "here", "--run-id", found[1], "--format", "json"))["runs"][0]["status"]

        deadline = time.monotonic() + 900
        while not (state := status()).startswith("finished") and time.monotonic() < deadline:
            time.sleep(5)
        return state

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(60)


@pytest.fixture
def nodes(tmp_path) -> Iterator[SuperNodes]:
    running = SuperNodes(tmp_path / "nodes")
    yield running
    running.stop()


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """The example with ledgers of its own, for three clients."""
    folder = tmp_path / "sums"
    shutil.copytree(EXAMPLES / "sums", folder, ignore=shutil.ignore_patterns("__pycache__"))
    edit(folder, {"LEDGERS": tmp_path / "ledgers", **NOISE_OFF["sums"][0]})
    server = folder / "digits_sums" / "server_app.py"
    text = server.read_text()
    assert text.count("_nodes=4") == 2
    server.write_text(text.replace("_nodes=4", f"_nodes={NUM_NODES}"))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_three_supernodes_end_with_the_mean_of_plain_fedavg_and_without_a_session(nodes, example, tmp_path):
    out = tmp_path / "model.safetensors"
    state = nodes.run(example, f'num-server-rounds={ROUNDS} out="{out}"')
    log = (nodes.folder / "log").read_text()
    assert state == "finished:completed", log[-5000:]
    from digits_sums import task

    check_same(out, task, "sums", NUM_NODES)
    assert "no sum" not in log
    for k in range(NUM_NODES):
        ledger = tmp_path / "ledgers" / f"{k}.sqlite"
        assert not list(ledger.with_name(f"{ledger.name}.sums").iterdir())
        with reading(ledger) as db:
            assert not db.charges(db.data_set(None).id)

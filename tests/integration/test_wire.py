"""The bytes in a run's tables against what really crosses a socket between a SuperNode and its SuperLink."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest

from fedpriv.config import parse, to_flower
from simulations.sites import free_port

# Every day tests/server/test_wire_bytes.py counts the objects that are sent; here they cross a real socket.
pytestmark = [pytest.mark.flower, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


class CountingProxy(threading.Thread):
    """Passes connections on to a port of this machine and counts the bytes of either direction."""

    def __init__(self, target: int) -> None:
        super().__init__(daemon=True)
        self.up = self.down = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def run(self) -> None:
        while True:
            node, _ = self._listener.accept()
            link = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pass_on, args=(node, link), daemon=True).start()

    def _pass_on(self, node: socket.socket, link: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(node, selectors.EVENT_READ, link)
            ready.register(link, selectors.EVENT_READ, node)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(2**16)
                    if not data:
                        node.close()
                        link.close()
                        return
                    if key.fileobj is node:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                    key.data.sendall(data)


class Federation:
    """A SuperLink and three SuperNodes on loopback; the first node speaks through a proxy."""

    def __init__(self, home: Path) -> None:
        self.processes: list[subprocess.Popen] = []
        self.home = home
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FEDPRIV_TRUST_RUN_CONFIG": "1",
        }
        self.port = free_port()
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self._start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port))
        self._wait_for(self.port)
        self.proxy = CountingProxy(self.port)
        self.proxy.start()
        for client in range(3):
            self._start(
                *("flower-supernode", "--insecure", "--port", str(free_port())),
                *("--superlink", f"127.0.0.1:{self.port if client else self.proxy.port}"),
                *("--node-config", f"partition-id={client} num-partitions=3"),
            )

    def _start(self, *command: str) -> None:
        with (self.home / f"{len(self.processes)}.log").open("w") as log:
            self.processes.append(
                subprocess.Popen(
                    [str(BIN / command[0]), *command[1:]],
                    cwd=self.home,
                    env=self.environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    @staticmethod
    def _wait_for(port: int) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"nothing listens on port {port}")

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        return done.stdout + done.stderr

    def stop(self) -> None:
        for process in psutil.process_iter():
            try:
                if process.environ().get("FLWR_HOME") == str(self.home) and process.pid != os.getpid():
                    process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        for process in self.processes:
            process.wait(timeout=300)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path / "flower-home")
    yield federation
    federation.stop()


def test_bytes_in_the_tables_are_those_on_the_socket(deployment, small_run, tmp_path):
    # A rule that sends more than the adapter down.
    config = parse(
        {**small_run, "aggregation": "fedex-lora", "rank": 4096, "out": str(tmp_path / "out"), "engine": "flower"}
    )
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in to_flower(config).items())
    output = deployment.flwr("run", ".", "here", "--stream", "-c", pairs)
    logs = "\n".join(file.read_text()[-2000:] for file in sorted(deployment.home.glob("*.log")))
    assert (tmp_path / "out" / "summary.json").is_file(), output + logs
    rows = pd.read_csv(tmp_path / "out" / "clients.csv").query("client == 0")
    assert rows.bytes_up.min() > 4_000_000
    # What is more than the tables say: registration, polls, heartbeats and the envelopes of the messages.
    assert rows.bytes_up.sum() < deployment.proxy.up < rows.bytes_up.sum() * 1.03
    assert rows.bytes_down.sum() < deployment.proxy.down < rows.bytes_down.sum() * 1.03

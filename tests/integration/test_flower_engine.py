"""The same apps under `flwr run`: numbers of the in-process engine, one fedpriv for both, and the bytes on a socket."""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import psutil
import pytest

import fedpriv
from fedpriv.config import parse, to_flower
from fedpriv.operate.approvals import bundle_of
from server.observer import LogObserver
from simulations.engines import federation
from simulations.sites import free_port, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# One process trains all clients, in turn: loading torch in a second one takes longer than the whole run.
FEDERATION = "num-supernodes=3 client-resources-num-cpus=2 init-args-num-cpus=2"


def environment_of(home: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FEDPRIV_TRUST_RUN_CONFIG": "1",
    }


def end_all(home: Path, number: signal.Signals) -> None:
    """Send the signal to what was started with this home."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(home) and process.pid != os.getpid():
                process.send_signal(number)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


@pytest.fixture
def flower_environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Flower home and a port of its own; what was started there is ended with the test."""
    home = tmp_path / "flower-home"
    # Otherwise Flower's engine joins the cluster that Ray last noted here, even if it no longer exists.
    own = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()), "RAY_ADDRESS": "local"}
    yield environment_of(home) | own
    end_all(home, signal.SIGTERM)


def flwr(environment: dict[str, str], *arguments: str) -> str:
    """What it prints, errors last."""
    command = [str(BIN / "flwr"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    return done.stdout + done.stderr


def status(environment: dict[str, str], run_id: str) -> str:
    shown = flwr(environment, "ls", "--run-id", run_id, "--format", "json")
    return json.JSONDecoder().raw_decode(shown.lstrip())[0]["runs"][0]["status"]


# Without an import, which takes seconds: each worker collects this file.
@pytest.mark.skipif(find_spec("ray") is None, reason="Flower's own simulation engine needs the extra ray")
def test_flower_runs_the_same_apps_to_the_same_numbers(flower_environment, small_run, tmp_path):
    config = parse({**small_run, "engine": "flower", "out": str(tmp_path / "flower")})
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in to_flower(config).items())
    output = flwr(flower_environment, "run", ".", "--stream", "--federation-config", FEDERATION, "-c", pairs)
    run_id = re.search(r"Successfully started run (\d+)", output)
    assert run_id, output
    ended = lambda: status(flower_environment, run_id[1]).startswith("finished")  # noqa: E731
    wait_until(ended, "the run's end", 300, every=1)
    assert status(flower_environment, run_id[1]) == "finished:completed", output

    files = {kind: set(re.findall(rf"{kind} use\S* (\S+__init__\.py)", output)) for kind in ("server", "clients")}
    assert files["server"] == files["clients"] == {fedpriv.__file__}, output

    federation.run(parse({**small_run, "out": str(tmp_path / "in-process")}), LogObserver())
    flower, local = (
        pd.read_csv(tmp_path / name / "rounds.csv").drop(columns="seconds") for name in ("flower", "in-process")
    )
    pd.testing.assert_frame_equal(flower, local, rtol=1e-5)
    assert json.loads((tmp_path / "flower" / "summary.json").read_text())["engine"] == "flower"


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
        self.environment = environment_of(home)
        self.port = free_port()
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self._start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port))
        wait_until(self._listens, f"port {self.port}", 300)
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
            words, here = [str(BIN / command[0]), *command[1:]], {"cwd": self.home, "env": self.environment}
            self.processes.append(subprocess.Popen(words, **here, stdout=log, stderr=subprocess.STDOUT))

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        end_all(self.home, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=300)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path / "flower-home")
    yield federation
    federation.stop()


# Every day tests/server/test_wire_bytes.py counts the objects that are sent; here they cross a real socket.
def test_bytes_in_the_tables_are_those_on_the_socket(deployment, small_run, tmp_path):
    # A rule that sends more than the adapter down.
    config = parse(
        {**small_run, "aggregation": "fedex-lora", "rank": 4096, "out": str(tmp_path / "out"), "engine": "flower"}
    )
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in to_flower(config).items())
    output = flwr(deployment.environment, "run", ".", "here", "--stream", "-c", pairs)
    logs = "\n".join(file.read_text()[-2000:] for file in sorted(deployment.home.glob("*.log")))
    assert (tmp_path / "out" / "summary.json").is_file(), output + logs
    rows = pd.read_csv(tmp_path / "out" / "clients.csv").query("client == 0")
    assert rows.bytes_up.min() > 4_000_000
    # What is more than the tables say: registration, polls, heartbeats, the envelopes of the messages, and the bundle.
    assert rows.bytes_up.sum() < deployment.proxy.up < rows.bytes_up.sum() * 1.03
    down = deployment.proxy.down - len(bundle_of(ROOT))
    assert rows.bytes_down.sum() < down < rows.bytes_down.sum() * 1.01

"""The same two apps under `flwr run .`: same numbers as the in-process engine, and one fedpriv for both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import psutil
import pytest

import fedpriv
from fedpriv.config import parse, to_flower
from server.observer import LogObserver
from simulations.engines import federation
from simulations.sites import free_port

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    # Without an import, which takes seconds: each worker collects this file.
    pytest.mark.skipif(find_spec("ray") is None, reason="Flower's own simulation engine needs the extra ray"),
]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# One process trains all clients, in turn: loading torch in a second one takes longer than the whole run.
FEDERATION = "num-supernodes=3 client-resources-num-cpus=2 init-args-num-cpus=2"


@pytest.fixture
def flower_environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Flower home and a port of its own; what was started there is ended with the test."""
    home = tmp_path / "flower-home"
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FEDPRIV_TRUST_RUN_CONFIG": "1",
        # Otherwise Flower's engine joins the cluster that Ray last noted here, even if it no longer exists.
        "RAY_ADDRESS": "local",
    }
    yield environment
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(home) and process.pid != os.getpid():
                process.send_signal(signal.SIGTERM)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def flwr(environment: dict[str, str], *arguments: str, timeout: float = 1200) -> str:
    command = [str(BIN / "flwr"), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    ).stdout


def status(environment: dict[str, str], run_id: str) -> str:
    listing = json.loads(flwr(environment, "ls", "--run-id", run_id, "--format", "json"))
    return listing["runs"][0]["status"]


def test_flower_runs_the_same_apps_to_the_same_numbers(flower_environment, small_run, tmp_path):
    config = parse({**small_run, "engine": "flower", "out": str(tmp_path / "flower")})
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in to_flower(config).items())
    output = flwr(
        flower_environment, "run", ".", "--stream", "--federation-config", FEDERATION, "-c", pairs
    )  # fmt: skip
    run_id = re.search(r"Successfully started run (\d+)", output)
    assert run_id, output
    deadline = time.monotonic() + 300
    while not (state := status(flower_environment, run_id[1])).startswith("finished") and time.monotonic() < deadline:
        time.sleep(1)
    assert state == "finished:completed", output

    files = {kind: set(re.findall(rf"{kind} use\S* (\S+__init__\.py)", output)) for kind in ("server", "clients")}
    assert files["server"] == files["clients"] == {fedpriv.__file__}, output

    federation.run(parse({**small_run, "out": str(tmp_path / "in-process")}), LogObserver())
    flower, local = (
        pd.read_csv(tmp_path / name / "rounds.csv").drop(columns="seconds") for name in ("flower", "in-process")
    )
    pd.testing.assert_frame_equal(flower, local, rtol=1e-5)
    assert json.loads((tmp_path / "flower" / "summary.json").read_text())["engine"] == "flower"

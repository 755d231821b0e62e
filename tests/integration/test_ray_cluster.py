"""A Ray cluster of two nodes gives the results of one machine; both are on loopback, with small object stores."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
import psutil
import pytest
import tomli_w

from fedpriv.runs import resume_command
from simulations.sites import free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of a head and a second node, which has two cores in all."""
    pytest.importorskip("ray", reason="needs the extra ray")
    # A socket's path has at most 107 characters, so pytest's folders are too long.
    folder = Path("/tmp") / f"fedpriv-ray-{os.getpid()}"
    port, small = free_port(), ["--object-store-memory=100000000", "--num-cpus=1", "--node-ip-address=127.0.0.1"]
    address = f"127.0.0.1:{port}"
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
    processes = []
    try:
        for options in (head, [f"--address={address}"]):
            processes.append(started(*options, *small))
            wait_for_nodes(address, len(processes), processes)
        yield address
    finally:
        # Each by its own process: `ray stop` would end every cluster of this machine.
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def started(*options: str) -> subprocess.Popen[bytes]:
    """`ray start --block`, which ends what it started when it is terminated."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_nodes(address: str, num: int, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until the cluster has so many nodes."""
    code = (
        f"import ray; ray.init({address!r}, log_to_driver=False, logging_level='ERROR'); "
        "print(sum(n['Alive'] for n in ray.nodes()))"
    )

    def are_there() -> bool:
        assert all(process.poll() is None for process in processes), "a node did not start"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip() == str(num)

    wait_until(are_there, f"{num} nodes of the cluster", 120)


def simulate(*arguments: object, address: str = "") -> None:
    """`python -m simulations`, with RAY_ADDRESS if it is given."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_ADDRESS": address} if address else {}
    command = [sys.executable, "-m", "simulations", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    found = pd.read_csv(folder / "rounds.csv")["test_loss"].tolist()
    assert len(set(found)) == 3, "nothing was learnt, so the test would prove nothing"
    return found


# With two shares of clients and a core on each node, there is an actor on both.
def test_the_ray_engine_gives_the_results_of_one_machine(
    cluster: str, small_run: Mapping[str, object], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(small_run))
    simulate("run", config, "--out", tmp_path / "alone")
    simulate("run", config, "--engine", "ray", "--out", tmp_path / "cluster", address=cluster)
    assert losses(tmp_path / "cluster") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("alone", "cluster")]
    assert [summary["engine"] for summary in summaries] == ["stacked", "ray"]
    assert summaries[0]["epsilon_local_max"] == summaries[1]["epsilon_local_max"]


def test_a_run_that_a_batch_system_ends_says_how_to_go_on_and_leaves_no_process(
    small_run: Mapping[str, object], tmp_path: Path
) -> None:
    config, out = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(tomli_w.dumps({**small_run, "rounds": 10_000}))
    command = [sys.executable, "-m", "simulations", "run", config, "--engine", "ray", "--out", out]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    rounds = out / "rounds.csv"
    wait_until(lambda: run.poll() is not None or (rounds.exists() and "\n2," in rounds.read_text()), "two rounds", 300)
    of_ray = psutil.Process(run.pid).children(recursive=True)
    assert len(of_ray) > 3
    run.terminate()
    _, told = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, told
    assert told.decode().splitlines()[-1].endswith(f"resume it: {resume_command(out, 'ray')}")
    _, alive = psutil.wait_procs(of_ray, timeout=60)
    assert not alive


def test_a_sweep_gives_the_results_of_one_machine(
    cluster: str, small_run: Mapping[str, object], tmp_path: Path
) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text(tomli_w.dumps({**small_run, "grid": {"seed": [0, 1]}}))
    simulate("sweep", config, "--out", tmp_path / "alone", "--max-parallel", 1)
    simulate("sweep", config, "--out", tmp_path / "cluster", "--max-parallel", 2, address=cluster)
    alone, spread = (pd.read_csv(tmp_path / name / "sweep.csv") for name in ("alone", "cluster"))
    assert spread["status"].tolist() == alone["status"].tolist() == ["done", "done"]
    for column in ("epsilon_local_max", "epsilon_sum", "folder"):
        assert spread[column].tolist() == alone[column].tolist()
    for key in alone["folder"]:
        assert losses(tmp_path / "cluster" / key) == pytest.approx(losses(tmp_path / "alone" / key), abs=1e-5)

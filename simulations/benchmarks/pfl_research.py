"""Whole federations, compared with pfl-research, which calls itself the fastest simulator.

    python -m simulations.benchmarks.pfl_research --python VENV/bin/python [--clients 100 1000] [--rounds 10]

The peer runs in a Python of its own: `python -m venv VENV && VENV/bin/pip install torch "pfl[pytorch]" transformers
peft`. Both train the same task on the same records: tiny BERT (2 layers, width 64), LoRA of rank 8 on query and value
and the head; every client in every round, 40 records of 24 tokens each (8 where there are 1,000 clients), one epoch of
SGD in batches of 8. Not private, they average the clients' updates. Private, each update is clipped and noise comes to
the sum: with pfl at the server, with fedpriv in each upload (`noise_on = "upload"`). A third arm of ours, `records`,
clips every record's gradient, which pfl does not offer. Times are those of whole processes, with the start, the report,
and one test at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import logging

import numpy as np

from fedpriv.config import parse
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.workbench import workbench
from server.observer import LogObserver
from simulations.benchmarks._measuring import resident
from simulations.benchmarks.registered_clients import WORDS, write_records
from simulations.engines import federation
from simulations.tiny_bert import make_tiny_bert

BATCH, NUM_TEST, CLIP_NORM, LEARNING_RATE = 8, 200, 1.0, 0.1
ARMS = {
    "not private": {"noise_on": "upload", "noise_multiplier": 0.0},
    "private": {"noise_on": "upload", "noise_multiplier": 1.0},
    "records": {"noise_on": "gradients", "noise_multiplier": 1.0},
}


# The peer's time over ours, and our memory.
RATIO, MEBIBYTES = 2.0, 600.0


def records_each(num_clients: int) -> int:
    """The number of records of a client."""
    return 40 if num_clients < 1000 else 8


def values_of(folder: Path, num_clients: int, rounds: int) -> dict[str, Any]:
    """The configuration of a run, less what its arm says."""
    each = records_each(num_clients)
    return {
        "model": str(folder / "tiny-bert"),
        "data": str(folder / "records.csv"),
        "recipe": "per-sample",
        "partition": "iid",
        "num_clients": num_clients,
        "test_fraction": NUM_TEST / (num_clients * each + NUM_TEST),
        "layers": "all",
        "rounds": rounds,
        "local_steps": each // BATCH,
        "batch_size": BATCH,
        "optimizer": "sgd",
        "learning_rate": LEARNING_RATE,
        "clip_norm": CLIP_NORM,
        "evaluate_every": rounds,
        "simulate": True,
        "comparison": False,
        "baselines": False,
        "out": str(folder / "run"),
    }


def ours(arm: str, folder: Path, num_clients: int, rounds: int) -> dict[str, Any]:
    """Accuracy and peak memory of one run."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = parse(values_of(folder, num_clients, rounds) | ARMS[arm])
    federation.run(config, LogObserver())
    accuracy = json.loads((Path(config.out) / "summary.json").read_text())["accuracy"]
    return {"accuracy": accuracy, "peak": resident("VmHWM")}


def write_task(folder: Path, num_clients: int) -> None:
    """The model, and the records as both sides read them."""
    each = records_each(num_clients)
    write_records(folder / "records.csv", num_clients * each // 4)
    make_tiny_bert(folder / "tiny-bert", WORDS)
    config = parse(values_of(folder, num_clients, 1) | ARMS["private"])
    bench = workbench(config)
    arrays: dict[str, Any] = {}
    for name, records in [*((str(k), bench.client(k)) for k in range(num_clients)), ("test", bench.test)]:
        assert isinstance(records, Records)
        longest = max(map(len, records.features["input_ids"]))
        rows = [row.numpy() for row in records.features["input_ids"]]
        arrays[f"input_ids {name}"] = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
        arrays[f"attention_mask {name}"] = np.stack([np.arange(longest) < len(row) for row in rows])
        arrays[f"labels {name}"] = records.labels.numpy()
    np.savez(folder / "clients.npz", **arrays)
    task = {
        "clients": num_clients,
        "labels": len(bench.label_names),
        "rank": config.rank,
        "alpha": config.alpha,
        "batch_size": BATCH,
        "learning_rate": LEARNING_RATE,
        "clip_norm": CLIP_NORM,
    }
    (folder / "task.json").write_text(json.dumps(task))


def measured(command: list[str]) -> dict[str, Any]:
    """The last line that a process prints, with its wall-clock seconds."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: failed\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"seconds": time.perf_counter() - started}


def main() -> None:
    """Print a line for each arm and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="of the environment with pfl; without it only ours are measured")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(ours(arguments.arm, arguments.folder, arguments.clients[0], arguments.rounds)))
        return
    lines = []
    for num_clients in arguments.clients:
        with tempfile.TemporaryDirectory() as name:
            write_task(Path(name), num_clients)
            rounds = ["--rounds", str(arguments.rounds)]
            mine = [sys.executable, "-m", "simulations.benchmarks.pfl_research", "--folder", name, *rounds]
            commands = {("fedpriv", arm): [*mine, "--clients", str(num_clients), "--arm", arm] for arm in ARMS}
            if arguments.python:
                theirs = [arguments.python, str(Path(__file__).with_name("_pfl_arm.py")), name, *rounds]
                commands |= {("pfl", "not private"): theirs, ("pfl", "private"): [*theirs, "--private"]}
            found = {}
            for (who, arm), command in commands.items():
                values = found[who, arm] = measured(command)
                print(
                    f"{num_clients} clients, {who}, {arm}: {values['seconds']:.1f} s, {values['peak'] / 2**20:.0f} "
                    f"MiB, accuracy {values['accuracy']:.3f}",
                    flush=True,
                )
                shutil.rmtree(Path(name) / "run", ignore_errors=True)
        for arm in ("not private", "private") if arguments.python else ("records",):
            peer = found.get(("pfl", arm), found["fedpriv", "private"])
            ratio = peer["seconds"] / found["fedpriv", arm]["seconds"]
            whose = "pfl-research" if arguments.python else "noise on uploads"
            claim = f"{num_clients} clients, {arm}, {whose} / fedpriv"
            lines.append({"claim": claim, "ratio": ratio, "target": RATIO, "met": ratio >= RATIO})
            peak = found["fedpriv", arm]["peak"] / 2**20
            claim = f"{num_clients} clients, {arm}, peak memory of fedpriv"
            lines.append({"claim": claim, "mebibytes": peak, "target": MEBIBYTES, "met": peak <= MEBIBYTES})
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()

"""Memory follows the clients that are sampled, not those that are registered.

    python -m simulations.benchmarks.registered_clients [--registered 1000 10000] [--sampled 100] [--rounds 20]

A tiny BERT (2 layers, width 64), 4 records a client, LoRA in all layers, 2 local steps, seeded; the stacked engine,
from registration to report. Each size runs in a fresh process, which prints its peak resident memory and the peak
before the first round, with data and registrations. The claim is about what the rounds add.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fedpriv.accounting.recipe import LearningRate
from fedpriv.config import RunConfig, parse
from fedpriv.protocol import Registration
from server.observer import LogObserver
from simulations.engines import federation
from simulations.tiny_bert import make_tiny_bert

RECORDS_EACH, TOKENS = 4, 24
WORDS = [f"word{number}" for number in range(500)]


class Peak(LogObserver):
    """Records the peak of memory when the rounds begin."""

    before = 0

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        self.before = peak_memory()


def peak_memory() -> int:
    """Peak resident bytes so far."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def write_records(path: Path, num_clients: int) -> None:
    """A CSV of random words with a label."""
    generator = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(num_clients * RECORDS_EACH + 200):
            writer.writerow([" ".join(generator.choices(WORDS, k=TOKENS)), generator.choice("ab")])


def one_size(registered: int, sampled: int, rounds: int) -> dict[str, Any]:
    """Peaks and seconds of one run."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        write_records(Path(folder) / "records.csv", registered)
        config = parse(
            {
                "model": str(make_tiny_bert(Path(folder) / "tiny-bert", WORDS)),
                "data": str(Path(folder) / "records.csv"),
                "partition": "sizes",
                "client_sizes": [RECORDS_EACH] * registered,
                "test_fraction": 200 / (registered * RECORDS_EACH + 200),
                "clients_per_round": sampled,
                "layers": "all",
                "rounds": rounds,
                "local_steps": 2,
                "batch_size": 2,
                "noise_multiplier": 1.0,
                "simulate": True,
                "comparison": False,
                "baselines": False,
                "out": str(Path(folder) / "run"),
            }
        )
        observer, started = Peak(), time.perf_counter()
        federation.run(config, observer)
        return {"before": observer.before, "peak": peak_memory(), "seconds": time.perf_counter() - started}


def main() -> None:
    """Print a line for each size and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registered", type=int, nargs=2, default=[1000, 10_000])
    parser.add_argument("--sampled", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one_size(arguments.one, arguments.sampled, arguments.rounds)))
        return
    added = []
    for registered in arguments.registered:
        command = [sys.executable, "-m", "simulations.benchmarks.registered_clients", "--one", str(registered)]
        command += ["--sampled", str(arguments.sampled), "--rounds", str(arguments.rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        added.append((measured["peak"] - measured["before"]) / 2**20)
        print(
            f"{registered} registered, {arguments.sampled} sampled, {arguments.rounds} rounds: peak "
            f"{measured['peak'] / 2**20:.0f} MiB, of which {added[-1]:.0f} MiB came with the rounds; "
            f"{measured['seconds']:.1f} s"
        )
    few, many = arguments.registered
    claim = f"memory that {arguments.rounds} rounds add, {many} registered clients / {few}"
    ratio = added[1] / max(added[0], 1.0)
    print(json.dumps({"claim": claim, "ratio": ratio, "target": 1.5, "met": ratio <= 1.5}))


if __name__ == "__main__":
    main()

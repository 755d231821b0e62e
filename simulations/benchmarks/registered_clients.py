"""A federation with far more clients than a round asks: how long it takes to begin, a round, and what it holds.

    python -m simulations.benchmarks.registered_clients [--registered 1000 100000] [--sampled 1000] [--rounds 5]

A tiny BERT (2 layers, width 64), 4 records a client, LoRA in all layers, 2 local steps, seeded; the stacked engine,
from the first record to the report. Each size runs in a fresh process, which prints when each part began, the median of
its rounds and its peak resident memory. `begin` is the time from the data to the first message: registration, the
accounts and the ledger.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fedpriv.config import RunConfig, parse
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.accounting.recipe import LearningRate
from fedpriv.runs import RoundRow
from server.observer import LogObserver, RunProgress
from simulations.benchmarks._measuring import claim, fresh_process, resident
from simulations.engines import federation
from simulations.tiny_bert import make_tiny_bert

RECORDS_EACH, TOKENS = 4, 24
WORDS = [f"word{number}" for number in range(500)]
# {clients, of which 1,000 a round: the most seconds to begin, seconds a round, and MiB}, on two cores.
TARGETS = {100_000: (25.0, 5.0, 1024.0)}


class Clock(LogObserver):
    """Notes when each part of a run begins, and how long its rounds take."""

    def __init__(self) -> None:
        super().__init__()
        self.began: dict[str, float] = {"start": time.perf_counter()}
        self.rounds: list[float] = []
        self.before = 0

    def progressed(self, progress: RunProgress) -> None:
        if not progress.total and progress.round is None:
            self.began.setdefault(progress.what, time.perf_counter())

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        self.began["rounds"], self.before = time.perf_counter(), resident("VmHWM")

    def round_done(self, row: RoundRow) -> None:
        if row.round:
            self.rounds.append(row.seconds)

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        self.began["end"] = time.perf_counter()

    @property
    def parts(self) -> dict[str, float]:
        """{part: seconds from its beginning to that of the next}."""
        times = list(self.began.values())
        return {part: after - before for part, before, after in zip(self.began, times, times[1:], strict=False)}


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
                "partition": "iid",
                "num_clients": registered,
                "test_fraction": 200 / (registered * RECORDS_EACH + 200),
                "clients_per_round": sampled,
                "layers": "all",
                "rounds": rounds,
                "local_steps": 2,
                "batch_size": 2,
                "noise_multiplier": 1.0,
                "simulate": True,
                "memory_limit_mb": 128,
                "comparison": False,
                "baselines": False,
                "out": str(Path(folder) / "run"),
            }
        )
        clock = Clock()
        federation.run(config, clock)
        parts = clock.parts
        return {
            "registered": registered,
            "parts": {part: round(seconds, 1) for part, seconds in parts.items()},
            "begin": sum(parts[part] for part in ("registering the nodes", "calibrating the noise")),
            "round": statistics.median(clock.rounds),
            "before": clock.before,
            "peak": resident("VmHWM"),
            "seconds": sum(parts.values()),
        }


def main() -> None:
    """Print a line for each size and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registered", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--sampled", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one_size(arguments.one, arguments.sampled, arguments.rounds)))
        return
    for registered in arguments.registered:
        options = ("--one", registered, "--sampled", arguments.sampled, "--rounds", arguments.rounds)
        measured = fresh_process("registered_clients", *options)
        peak, before = measured["peak"] / 2**20, measured["before"] / 2**20
        print(
            f"{registered} registered, {arguments.sampled} sampled: begins in {measured['begin']:.1f} s, a round "
            f"{measured['round']:.2f} s, peak {peak:.0f} MiB, of which {peak - before:.0f} MiB came with the rounds; "
            f"{measured['seconds']:.0f} s in all: {measured['parts']}"
        )
    of = f"{registered} registered clients, {arguments.sampled} a round"
    to_begin, a_round, mebibytes = TARGETS.get(registered, (None, None, None))
    claim(f"seconds until {of} are asked", at_most=to_begin, seconds=measured["begin"])
    claim(f"a round of {of}", at_most=a_round, seconds=measured["round"])
    claim(f"peak memory of {of}", at_most=mebibytes, mebibytes=peak)


if __name__ == "__main__":
    main()

"""Measure how long accounting for many clients takes, and how far its bounds lie above the exact epsilons.

    python -m simulations.benchmarks.accounting_scale [--clients 10000] [--seed 0]

Every client has its own number of records (log-uniform from 100 to 100,000, batches of 64), its own number of rounds
(50 to 100) and its own delta; all have noise multiplier 1. The time one by one is that of a sample, extrapolated.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.law import Accountant
from fedpriv.privacy.accounting.many_clients import epsilons
from fedpriv.privacy.accounting.views import default_delta
from simulations.benchmarks._measuring import claim

BATCH, NOISE_MULTIPLIER, WORKERS = 64, 1.0, 2
TARGETS: dict[Accountant, float] = {"rdp": 1.0, "pld": 60.0}
SAMPLES: dict[Accountant, int] = {"rdp": 100, "pld": 20}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of one accountant, and the relative excess of its bounds in a sample."""

    seconds: float
    one_by_one: float
    median_excess: float
    largest_excess: float


def make_clients(num_clients: int, seed: int) -> tuple[list[SubsampledGaussian], list[float]]:
    """The histories and deltas of that many clients."""
    generator = np.random.default_rng(seed)
    sizes = np.exp(generator.uniform(np.log(100), np.log(100_000), num_clients)).astype(int)
    counts = generator.integers(50, 101, num_clients)
    events = [
        SubsampledGaussian(noise_multiplier=NOISE_MULTIPLIER, sampling_probability=BATCH / size, count=count)
        for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
    ]
    return events, [default_delta(size) for size in sizes.tolist()]


def measure(events: list[SubsampledGaussian], deltas: list[float], accountant: Accountant) -> Measured:
    """Account for all clients at once, then for the first few one by one; their order is random."""
    started = time.perf_counter()
    bounds = epsilons(events, deltas, accountant, workers=WORKERS)
    seconds = time.perf_counter() - started
    sample = min(SAMPLES[accountant], len(events))
    started = time.perf_counter()
    exact = [epsilon_of([events[k]], deltas[k], accountant).epsilon for k in range(sample)]
    one_by_one = (time.perf_counter() - started) * len(events) / sample
    excess = bounds[:sample] / exact - 1
    return Measured(
        seconds=seconds,
        one_by_one=one_by_one,
        median_excess=float(np.median(excess)),
        largest_excess=float(excess.max()),
    )


def main() -> None:
    """Print a table and then a JSON line for each claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    events, deltas = make_clients(arguments.clients, arguments.seed)
    measured = {accountant: measure(events, deltas, accountant) for accountant in TARGETS}
    print("accountant  seconds  one by one  median excess  largest excess")
    for accountant, row in measured.items():
        print(
            f"{accountant:10}  {row.seconds:7.2f}  {row.one_by_one:10.0f}  {row.median_excess:13.3%}  "
            f"{row.largest_excess:14.3%}"
        )
    for accountant, row in measured.items():
        how = f"{accountant}, {WORKERS} processes" if accountant == "pld" else accountant
        text = f"epsilon of {arguments.clients} clients with histories of their own by {how}"
        claim(text, at_most=TARGETS[accountant], seconds=row.seconds)


if __name__ == "__main__":
    main()

"""A run on a busy machine: its time beside processes that never rest, over its fair share of the machine.

    python -m simulations.benchmarks.busy_machine [--loops 0 1 2 4] [--repeats 5] [--setting KEY=VALUE ...]

The run is `fedpriv run` of the embedded corpus, without comparison and baselines, in a process of its own. With n busy
loops beside the t threads of a run, fair scheduling of c cores gives it min(t, t c / (t + n)) of them. Its fair share
is the processor time of the run that had the machine for itself, by these cores. The ratio is that of the slowest run;
figures mean something where nothing else is at work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from simulations.benchmarks._measuring import claim, fedpriv_run

TARGET = 1.5


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """So many processes that never rest."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(settings: Sequence[str]) -> dict[str, float]:
    """Seconds that a run takes, and of processor time."""
    with tempfile.TemporaryDirectory() as folder:
        return fedpriv_run(f"{folder}/run", ["comparison=false", "baselines=false", *settings])


def fair_cores(loops: int, threads: int) -> float:
    """Cores that fair scheduling gives as many threads beside so many busy loops."""
    cores = len(os.sched_getaffinity(0))
    return min(threads, cores * threads / max(cores, threads + loops))


def main() -> None:
    """Print a JSON line for each number of busy loops."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--setting", nargs="*", default=[], metavar="KEY=VALUE", help="of the run")
    arguments = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    processor = measure(arguments.setting)["processor"]
    for loops in arguments.loops:
        with busy_loops(loops):
            seconds = [measure(arguments.setting)["seconds"] for _ in range(arguments.repeats)]
        share = processor / fair_cores(loops, threads)
        ratio = max(seconds) / share
        text = f"a run beside {loops} busy loops / its fair share, the slowest of {len(seconds)}"
        claim(text, at_most=TARGET, ratio=ratio, seconds=seconds, fair_share=share, processor_seconds=processor)


if __name__ == "__main__":
    main()

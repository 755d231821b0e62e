"""`fedpriv dedup run` on the MiniLM variants of one federation: how long it takes, and whether a kill costs anything.

    python -m simulations.benchmarks.dedup_resume [--variants 8] [--kills 10] [--run RUN]

A federation on the embedded corpus leaves the last upload of every client and its global model. The command stores them
once in one go. Then it stores them in other folders, where it is sent SIGKILL at random instants and begun again each
time. Every store must in the end be equal to the first one byte for byte, be sound after each kill, and never get less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedpriv.errors import InputError, StoreError
from fedpriv.models.variants.store import Store
from simulations.benchmarks._measuring import claim

TARGET_SECONDS = 180.0


def make_run(folder: Path, num_variants: int) -> Path:
    """The folder of a federation that leaves this many variants."""
    settings = {
        "data": "embedded",
        "partition": "iid",
        "num_clients": num_variants - 1,
        "layers": "last-1",
        "rounds": 4,
        "target_epsilon": 4.0,
        "comparison": False,
        "dedup_utility_bound": 0.02,
    }
    options = [part for key, value in settings.items() for part in ("-c", f"{key}={json.dumps(value)}")]
    run = folder / "run"
    subprocess.run(
        [sys.executable, "-m", "simulations", "run", *options, "--out", str(run)], check=True, capture_output=True
    )
    return run


def command(run: Path, store: Path) -> list[str]:
    """The command line that stores the variants of a run."""
    main = [sys.executable, "-c", "from fedpriv.cli.main import main; main()"]
    return [*main, "dedup", "run", str(run / "variants"), str(store), "--fairness", "outcome"]


def seconds_of(run: Path, store: Path) -> tuple[float, str]:
    """How long it takes in one go, and what it shows on stderr."""
    began = time.perf_counter()
    done = subprocess.run(command(run, store), check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stderr


def killed_after(run: Path, store: Path, seconds: float) -> bool:
    """Whether a process of its own was still at it when it was killed."""
    with subprocess.Popen(command(run, store), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


def stored(store: Path) -> list[str]:
    """The models of a store that a killed process left, which may not have come to be one; it must be sound."""
    try:
        with Store(store, read_only=True) as opened:
            if problems := opened.verify():
                raise StoreError(problems[0])
            return opened.names
    except InputError:
        return []


def content(store: Path) -> dict[str, bytes]:
    """All files of a store by their paths in it."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def main() -> None:
    """Print a line for each kill, and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--run", type=Path, help="a run with variants, in place of a federation made for this")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = (arguments.run or make_run(Path(folder), arguments.variants)).absolute()
        num_variants = sum(1 for _ in (run / "variants").glob("*/variant.json"))
        seconds, shown = seconds_of(run, Path(folder) / "whole")
        print(
            f"in one go: {seconds:.1f} s for {num_variants} variants; its progress ends with: {shown.splitlines()[-1]}"
        )
        whole, kills, equal = content(Path(folder) / "whole"), 0, True
        for number in itertools.count():
            store, before = Path(folder) / f"parts-{number}", set[str]()
            while kills < arguments.kills and killed_after(run, store, instant := generator.uniform(0, seconds)):
                kills += 1
                now = set(stored(store))
                print(f"kill {kills}, after {instant:.1f} s: {len(now)} of {num_variants} stored", flush=True)
                equal &= before <= now
                before = now
            if kills == arguments.kills:
                break
            equal &= content(store) == whole
        seconds_of(run, store)
        equal &= content(store) == whole
    claim(f"dedup run on {num_variants} MiniLM variants", at_most=TARGET_SECONDS, seconds=seconds)
    claim(f"killed {kills} times at random instants, every store ends as in one go", at_least=1.0, ratio=float(equal))


if __name__ == "__main__":
    main()

"""The tools of the benchmarks. They need the standard library alone, so that a peer's Python can import them too."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as `fedpriv` does


def claim(
    text: str, *, at_least: float | None = None, at_most: float | None = None, holds: bool = True, **figures: Any
) -> None:
    """Print a claim as a JSON line.

    Args:
        text: its words.
        at_least, at_most: the target of the first figure, if it has one.
        holds: whether all else that is claimed does.
        figures: by their units.
    """
    figure = next(iter(figures.values()))
    met = holds and (at_least is None or figure >= at_least) and (at_most is None or figure <= at_most)
    target = at_most if at_least is None else at_least
    print(json.dumps({"claim": text, **figures, "target": target, "met": met}), flush=True)


def seconds_of(run: Callable[..., object], *given: object) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    run(*given)
    return time.perf_counter() - started


def alternate(arms: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """{arm: seconds of each turn}, the arms taking turns after a first that warms up."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, run in arms.items():
            taken = seconds_of(run)
            if turn:
                times[name].append(taken)
    return times


def fresh_process(
    benchmark: str, *options: object, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON line that a process of its own prints last, and its `seconds` from start to end unless it gives its own.

    Raises:
        SystemExit: it failed; with the end of what it complained of.
    """
    words = [python, "-m", f"simulations.benchmarks.{benchmark}", *map(str, options)]
    started = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: failed\n{done.stderr[-2000:]}")
    return {"seconds": time.perf_counter() - started, **json.loads(done.stdout.splitlines()[-1])}


# At its end a command says what it held at most.
_COMMAND = (
    "import atexit; from simulations.benchmarks._measuring import resident; "
    'atexit.register(lambda: print(resident("VmHWM"))); from fedpriv.cli.main import main; main()'
)


def fedpriv_run(out: Path | str, settings: Iterable[str]) -> dict[str, float]:
    """The seconds of `fedpriv run` from start to end, `processor` seconds, and the `peak` of its resident bytes.

    Args:
        settings: `KEY=VALUE` of its configuration.

    Raises:
        SystemExit: it failed; with the end of what it complained of.
    """
    given = [part for setting in settings for part in ("-c", setting)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = [sys.executable, "-c", _COMMAND, "run", "--out", str(out), *given]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fedpriv run {' '.join(given)}: failed\n{done.stderr[-2000:]}")
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor": processor, "peak": int(done.stdout.splitlines()[-1])}


def resident(mark: str = "VmRSS") -> int:
    """Resident bytes of this process, now or (`VmHWM`) at their peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(mark))
    return 1024 * int(line.split()[1])

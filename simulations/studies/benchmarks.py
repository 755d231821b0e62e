"""Keeps the figures of every benchmark, a line of a file each, and makes the page of them.

    python -m simulations.studies.benchmarks run [NAME [ARGUMENTS ...]]
    python -m simulations.studies.benchmarks tables

`run` runs one benchmark, with its arguments, or every one with its defaults, each in a process of its own, and appends
a line: its command, what it printed, the claims, machine, versions, commit and date. `tables` writes the page from the
newest line of each command. Nothing else should be at work meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.runs import environment
from simulations.studies.harness import Line, append, fill, lines, software, table

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def main() -> None:
    """Run benchmarks, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("run", "tables"))
    parser.add_argument("benchmark", nargs=argparse.REMAINDER, metavar="NAME [ARGUMENTS ...]", help=", ".join(NAMES))
    parser.add_argument("--lines", type=Path, default=Path("results/benchmarks.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("results/benchmarks.md"))
    arguments = parser.parse_args()
    if arguments.step == "tables":
        write_page(arguments.page, newest(lines(arguments.lines)))
        return
    if arguments.benchmark and arguments.benchmark[0] not in NAMES:
        parser.error(f"{arguments.benchmark[0]}: must be a benchmark; --lines and --page stand before `run`")
    for name, *given in [arguments.benchmark] if arguments.benchmark else [[name] for name in NAMES]:
        append(arguments.lines, measured(name, given))


def measured(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The line of a benchmark, which is run now; what it prints is shown as it comes.

    Raises:
        InputError: it failed, or made no claim.
    """
    command, began = ["-m", f"simulations.benchmarks.{name}", *arguments], time.perf_counter()
    printed: list[str] = []
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line.rstrip("\n"))
    claims = [json.loads(line) for line in printed if line.startswith('{"claim"')]
    if process.returncode or not claims:
        raise InputError(f"{name}: exit code {process.returncode}, {len(claims)} claims; nothing is kept of it")
    return {
        "name": name,
        "command": f"python {' '.join(command)}",
        "claims": claims,
        "output": [line for line in printed if not line.startswith('{"claim"')],
        "seconds": time.perf_counter() - began,
        "date": datetime.now(UTC).date().isoformat(),
        "software": software(environment()),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """The processor, its cores that this process may use, the memory in GiB, and the threads if they were bounded."""
    model = platform.machine()
    if Path("/proc/cpuinfo").is_file():
        named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {"processor": model, "cores": len(os.sched_getaffinity(0)), "gib": round(memory)}
    threads = os.environ.get("OMP_NUM_THREADS")
    return found if threads is None else {**found, "threads": int(threads)}


def newest(found: Iterable[Line]) -> list[Line]:
    """The last line of each command, by name."""
    return sorted({line["command"]: line for line in found}.values(), key=lambda line: line["command"])


def write_page(page: Path, found: Sequence[Line]) -> None:
    """Write the claims with a verdict, or all if none has one, between the page's markers; lines keep the rest.

    Where the page has markers with a benchmark's name, the table that it printed stands between them.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    printed = {line["name"]: "\n".join(row for row in line["output"] if row.startswith("|")) for line in found}
    own = {name: rows for name, rows in printed.items() if f"<!-- {name}:begin -->" in text}
    fill(page, {"summary": _summary(found), **own})


def _summary(found: Sequence[Line]) -> str:
    rows = []
    for line in found:
        shown = f"`{' '.join([line['name'], *line['command'].split()[3:]])}`"
        judged = [claim for claim in line["claims"] if None not in (claim.get("target"), claim.get("met", True))]
        for number, claim in enumerate(judged or line["claims"]):
            figure, target = _figure_and_target(claim)
            verdict = "**missed**: " if claim.get("met") is False else ""
            rows.append((shown if number == 0 else "", claim["claim"], figure, verdict + target))
    missing = ", ".join(f"`{name}`" for name in NAMES if name not in {line["name"] for line in found})
    left = f"\n\nWithout a line yet: {missing}." if missing else ""
    return f"{table(('benchmark', 'claim', 'figure', 'target'), rows)}\n\n{_origins(found)}{left}"


def _origins(found: Sequence[Line]) -> str:
    """Where and when the lines were made; of all places but the commonest, also which."""
    places = Counter(_place(line) for line in found)
    told = []
    for number, (place, _) in enumerate(places.most_common()):
        here = [line for line in found if _place(line) == place]
        dates = sorted({line["date"] for line in here})
        when = dates[0] if len(dates) < 2 else f"{dates[0]} to {dates[-1]}"
        names = dict.fromkeys(f"`{line['name']}`" for line in here)
        told.append(f"{place}, {when}" + (f": {', '.join(names)}" if number else ""))
    return f"{'. '.join(told)}. Each line of benchmarks.jsonl has its commit."


def _place(line: Line) -> str:
    """The machine, and the version that decides most of its times."""
    on = line["machine"]
    threads = f", OMP_NUM_THREADS={on['threads']}" if "threads" in on else ""
    return f"{on['processor']}, {on['cores']} cores, {on['gib']} GiB, torch {line['software']['torch']}{threads}"


def _figure_and_target(claim: Line) -> tuple[str, str]:
    """The figure of a claim with its unit, and its target; empty where there is none."""
    unit = next((name for name in ("ratio", "seconds", "mebibytes", "value") if name in claim), None)
    if unit is None:
        return str(claim.get("skipped", "")), ""
    shown = "" if unit in ("ratio", "value") else f" {unit}"
    target = claim.get("target")
    figure = f"{claim[unit]:.3g}" if abs(claim[unit]) < 1000 else f"{claim[unit]:,.0f}"
    return f"{figure}{shown}", "" if target is None else f"{target:,g}{shown}"


if __name__ == "__main__":
    main()

"""A round of a deployed federation on this machine: its seconds, whose processor time it takes, and the memory.

    python -m simulations.benchmarks.deployed_round [--nodes 3 ...] [--rounds 8] [--setting K=V ...]
    python -m simulations.benchmarks.deployed_round --own-records [TIMES] [--reply-seconds T]

A SuperLink with TLS and node authentication and its nodes, made by the kits as two institutions would, share the
synthetic corpus and fine-tune MiniLM by the default recipe. With `--own-records` each node has its share in a file of
its own, and replies leave at public times; a T of a millisecond shows what they take by themselves. A round ends when
its row is in rounds.csv, so checkpoint and charges are part of it; its seconds are the median over the rounds after the
first. Processor seconds are read from /proc, with those of children that have ended. Memory counts pages that processes
share once.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fedpriv.config import ON_NODES
from fedpriv.learning.adapters import BUNDLED_ENCODER
from fedpriv.learning.data import hospital
from simulations.benchmarks._measuring import claim
from simulations.sites import DeployedFederation, Service, wait_until

# {number of nodes: seconds}
TARGETS = {3: 2.0, 20: 8.0}
# Where three nodes train A and B: 1.5 times what they took at a33a8d7d, where records shared passes.
_WITH_FACTORS = 6.45
# The most that a start may take, for each node: vaults read their records one after another.
_START_SECONDS = 100.0

# Kinds of processes by what their command lines hold; the first that is found counts.
_KINDS = {
    "flwr-clientapp": "ClientApp",
    "multiprocessing.forkserver": "ClientApp",
    "flower-superexec": "SuperExec",
    "import superexec": "SuperExec",
    "approved_supernode": "SuperNode",
    "flwr_serverapp()": "ServerApp",
    "guarded_superlink": "SuperLink",
    "fedpriv.holder.vault": "vault",
    "clients.deploy": "kit",
    "server.deploy": "kit",
}

Spent = Counter[tuple[str, str]]
"""{(service, kind of process): processor seconds}"""


@dataclass(frozen=True, kw_only=True)
class DeployedRounds:
    """The rounds of a federation.

    Attributes:
        lengths: seconds of each.
        spent: processor seconds of those after the first.
        mebibytes: {service: resident memory after the last}.
    """

    lengths: list[float]
    spent: Spent
    mebibytes: Counter[str]


def run(
    num_nodes: int, rounds: int, settings: list[str], folder: Path, *, own_records: int, reply_seconds: float | None
) -> DeployedRounds:
    """Start a federation, and measure its rounds."""
    out = folder / "run"
    values = {"partition": "iid", "num_clients": num_nodes, "rounds": rounds, "out": str(out)}
    values |= {key: json.loads(value) for key, _, value in (setting.partition("=") for setting in settings)}
    kept: dict[str, Any] = {}
    if own_records:
        kept = {"holdings": holdings(folder, num_nodes, own_records), "model": BUNDLED_ENCODER}
        kept["settings"] = "" if reply_seconds is None else f"reply_seconds = {reply_seconds}\n"
        test = write_records(folder / "test.csv", hospital.generate()[1])
        values |= {"data": ON_NODES, "test_data": str(test), "labels": ",".join(hospital.DEPARTMENTS)}
    with contextlib.ExitStack() as running:
        federation = DeployedFederation(folder / "federation", num_nodes=num_nodes, **kept)
        running.callback(federation.stop)
        service = federation.start_run("run", values)
        running.callback(service.kill)
        ends: list[float] = []
        before: Spent = Counter()
        for number in range(rounds + 1):
            wait_for_round(number, out, service, seconds=_START_SECONDS * num_nodes)
            ends.append(time.monotonic())
            if number == 1:
                before = spent(federation, service)
        after, mebibytes = spent(federation, service), memory(federation, service)
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    during = Counter({key: seconds - before[key] for key, seconds in after.items()})
    return DeployedRounds(lengths=lengths, spent=during, mebibytes=mebibytes)


def holdings(folder: Path, num_nodes: int, times: int) -> dict[int, list[str]]:
    """{client: options of `init`} of nodes that share the synthetic corpus, each with a file of its own."""
    train, _ = hospital.generate()
    columns = ["--labels", ",".join(hospital.DEPARTMENTS), "--budget-epsilon", "1000"]
    return {
        client: ["--data", str(write_records(folder / f"{client}.csv", train[client::num_nodes], times)), *columns]
        for client in range(num_nodes)
    }


def write_records(path: Path, messages: Sequence[hospital.Message], times: int = 1) -> Path:
    """A table of messages, each so many times in its text."""
    with path.open("w", newline="") as file:
        rows = [(" ".join(times * message.text.split()), message.department) for message in messages]
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def wait_for_round(number: int, out: Path, run_: Service, seconds: float) -> None:
    """Wait until a run's table holds this round, at most so long.

    Raises:
        TimeoutError: it takes too long.
        RuntimeError: the run ended before.
    """
    wait_until(
        lambda: num_rows(out) > number or run_.process.poll() is not None, f"round {number}", seconds, every=0.05
    )
    if num_rows(out) <= number:
        raise RuntimeError(f"the run ended before round {number}\n{run_.text()[-3000:]}")


def num_rows(out: Path) -> int:
    """How many rounds a run's table holds, with round 0."""
    table = out / "rounds.csv"
    return table.read_text().count("\n") - 1 if table.is_file() else 0


def spent(federation: DeployedFederation, run_: Service) -> Spent:
    """Processor seconds of every process so far, with those of its children that have ended; of all nodes together."""
    found: Spent = Counter()
    for name, service in {**federation.services, "run": run_}.items():
        for kind, process in family(psutil.Process(service.process.pid), "kit"):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[_of(name), kind] += times.user + times.system
                found[_of(name), _started_by(kind)] += times.children_user + times.children_system
    return found


def memory(federation: DeployedFederation, run_: Service) -> Counter[str]:
    """Proportional resident memory of every service with all that it started, in mebibytes; of all nodes together."""
    found: Counter[str] = Counter()
    for name, service in {**federation.services, "run": run_}.items():
        for _, process in family(psutil.Process(service.process.pid), "kit"):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found[_of(name)] += process.memory_full_info().pss / 2**20
    return found


def _of(service: str) -> str:
    """All nodes are one."""
    return "nodes" if service.startswith("node") else service


def family(process: psutil.Process, parents: str) -> Iterator[tuple[str, psutil.Process]]:
    """A process and all that it started, with their kinds; one without a name of its own is of its parent's."""
    try:
        line = " ".join(process.cmdline())
        kind = next((kind for text, kind in _KINDS.items() if text in line), parents)
    except psutil.ZombieProcess:  # it has ended, and nobody has asked how
        kind = _started_by(parents)
    except psutil.NoSuchProcess:
        return
    children = process.children()
    yield kind, process
    for child in children:
        yield from family(child, kind)


def _started_by(kind: str) -> str:
    return "ClientApp" if kind == "SuperExec" else kind


def main() -> None:
    """Print tables and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3], help="a federation of each number is measured")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--setting", nargs="*", default=[], help="key=value of the run's configuration, value in JSON")
    parser.add_argument(
        "--own-records", type=int, nargs="?", const=1, default=0, help="nodes with files of their own; texts so often"
    )
    parser.add_argument("--reply-seconds", type=float, help="of such nodes; by default derived")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds = {arguments.rounds}: must be at least 2, since the first one is left out")
    for num_nodes in arguments.nodes:
        measured(num_nodes, arguments)


def measured(num_nodes: int, arguments: argparse.Namespace) -> None:
    """Print the claim of a federation of so many nodes, and what it is made of."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(
            num_nodes,
            arguments.rounds,
            arguments.setting,
            Path(folder),
            own_records=arguments.own_records,
            reply_seconds=arguments.reply_seconds,
        )
    print(f"{num_nodes} nodes, seconds a round:", " ".join(f"{length:.2f}" for length in found.lengths))
    num_rounds = arguments.rounds - 1
    for (service, kind), seconds in sorted(found.spent.items()):
        print(f"{service:>10} {kind:>10}: {seconds / num_rounds:6.2f} processor seconds a round")
    print(f"{'all':>21}: {found.spent.total() / num_rounds:6.2f} processor seconds a round")
    print("resident MiB:", ", ".join(f"{name} {size:.0f}" for name, size in sorted(found.mebibytes.items())))
    median = statistics.median(found.lengths[1:])
    text = f"a deployed round, {num_nodes} nodes on loopback, MiniLM: seconds in the median after the first"
    trains_factors = any(setting.startswith("recipe=") for setting in arguments.setting)
    claim(text, at_most=_WITH_FACTORS if trains_factors else TARGETS.get(num_nodes), seconds=median)


if __name__ == "__main__":
    main()

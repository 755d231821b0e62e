"""Runs that are killed at random instants and resumed until they are done; `test_resume.py` starts them.

Each kind of run is held against one that nobody killed, and its ledgers against what was sent. Most of a run's time is
computing, so instants that are even over time would hardly ever fall into a charge or a checkpoint: a kill aims at a
random instant of the phase that was hit least so far, one of them being the run as a whole.
"""

import functools
import json
import math
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file

from fedpriv.config import RunConfig, parse
from fedpriv.holder.vault import _charging
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.ledger.entries import CHARGED, RELEASED, Entry
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import path_of, reading
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._status import status_of
from fedpriv.runs._writer import RunWriter
from server import checkpoint, registry
from server.bookkeeping import Books
from server.observer import LogObserver
from server.strategy import RuleStrategy
from simulations.engines import federation
from simulations.engines.grid import LocalGrid
from tests.integration.killed_run import forked, tapped

WHOLE_RUN = "the whole run"
# What a run spends its time with; storing is a node's, where it keeps a ledger.
PHASES = {
    "charging": [(Books, "charge"), (_charging, "charge")],
    "computing": [(federation, "execute_one_by_one"), (federation, "execute_stacked")],
    "storing the reply": [(_charging, "store_reply")],
    "aggregating": [(RuleStrategy, "_close_round")],
    "writing tables": [(RunWriter, "add"), (RunWriter, "_write_tables")],
    "writing the checkpoint": [(checkpoint, "write")],
    "saving the results": [(registry, "keep")],
}
# A phase lasts a millisecond or more; where one is missed so often, something else is wrong.
MOST_ATTEMPTS = 12


@dataclass
class Life:
    """What a process told of itself until it ended or was killed: what it sent, and which phases it was in."""

    sent: list[list] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    phases: list[tuple[str, float]] = field(default_factory=list)
    durations: dict[str, list[float]] = field(default_factory=dict)
    killed: bool = False

    def hear(self, kind: str, *rest: Any) -> None:
        """Take in a line."""
        if kind == "sent":
            self.sent.append([*rest])
        elif kind == "error":
            self.errors.append(rest[0])
        elif kind == "enter":
            self.phases.append(rest)
            self.durations.setdefault(rest[0], [])
        else:
            phase, began = self.phases.pop()
            self.durations[phase].append(rest[1] - began)

    @property
    def phase(self) -> str:
        """In which it died."""
        return self.phases[-1][0] if self.phases else WHOLE_RUN


@dataclass(frozen=True)
class Aim:
    """To kill so many seconds after a phase began for so manieth a time."""

    phase: str
    time: int
    delay: float


def tell(wire: int, *line: Any) -> None:
    os.write(wire, (json.dumps(line) + "\n").encode())


def told_of(wire: int, phase: str, task: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which tells the parent when it begins and ends."""

    @functools.wraps(task)
    def told(*arguments: Any, **named: Any) -> Any:
        tell(wire, "enter", phase, time.monotonic())
        try:
            return task(*arguments, **named)
        finally:
            tell(wire, "leave", phase, time.monotonic())

    return told


def live(task: Callable[[int], None], aim: Aim | None) -> Life:
    """A child's life: to its end, or until it is killed as aimed."""
    child, lines = forked(lambda wire: told_of(wire, WHOLE_RUN, task)(wire))
    life, begun = Life(), 0
    with lines as file:
        for line in map(json.loads, file):
            # What the grid's tap tells has no kind.
            life.hear(*(line if line[0] in ("enter", "leave", "error") else ["sent", *line]))
            if aim and line[:2] == ["enter", aim.phase]:
                begun += 1
                if begun == aim.time:
                    time.sleep(aim.delay)
                    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    life.killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return life


def has_checkpoint(folder: Path) -> bool:
    return any((folder / "run" / "checkpoint").glob("round-*[0-9]"))


def run_or_resume(config: RunConfig, folder: Path, wire: int) -> None:
    """What a user would do after a crash: resume, or begin anew where there was no checkpoint yet."""
    for phase, places in PHASES.items():
        for owner, name in places:
            setattr(owner, name, told_of(wire, phase, getattr(owner, name)))
    federation.LocalGrid = tapped(LocalGrid, wire)
    out = folder / "run"
    values = {**vars(config), "out": str(out)}
    if has_checkpoint(folder):
        values["resume"] = str(out)
    else:
        shutil.rmtree(out, ignore_errors=True)
    federation.run(parse(values), LogObserver())


def table(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / "run" / name).drop(columns="seconds")


def node_ledgers(config: RunConfig) -> dict[str, Path]:
    """The ledger of each client by its number, where nodes keep one of their own."""
    accounts = workbench(config).accounts if config.ledger else []
    return {str(client): path_of(Path(config.ledger), account) for client, account in enumerate(accounts)}


def ledgers_of(config: RunConfig, folder: Path) -> list[Path]:
    """The server's, and those of the nodes."""
    server = Path(config.ledger) if config.ledger else folder / "run" / "ledger.sqlite"
    return [path for path in (server, *node_ledgers(config).values()) if path.exists()]


def opened(path: Path) -> list[Entry]:
    """The entries of a ledger that the next writer can open, which checks its chain and head."""
    with Ledger(path):
        pass
    with reading(path) as db:
        return list(db.entries())


def charged_and_released(path: Path) -> tuple[list, list]:
    written = opened(path)
    return tuple([(e.client, e.round, e.reply) for e in written if e.phase == phase] for phase in (CHARGED, RELEASED))


class Witness:
    """Holds what a kill leaves against what was there before."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._digests: dict[Path, list[str]] = {}
        self.sent: list[list] = []

    def check(self, life: Life) -> None:
        """Ledgers open and lost nothing, whatever was sent is charged, and the folder says how to go on."""
        assert not life.errors, life.errors
        self.sent += life.sent
        kept = has_checkpoint(self._folder)
        if not kept and not self._config.ledger:
            self._digests, self.sent = {}, []  # its folder, with the ledger in it, is given up for a new run
            return
        owners = {path: client for client, path in node_ledgers(self._config).items()}
        for path in ledgers_of(self._config, self._folder):
            written = opened(path)
            before, now = self._digests.get(path, []), [entry.digest for entry in written]
            assert now[: len(before)] == before, f"{path}: an entry is lost"
            self._digests[path] = now
            for client in {owners[path]} if path in owners else {str(line[0]) for line in self.sent}:
                charged = Counter(e.round for e in written if e.phase == CHARGED and e.client == client)
                releases = {(line[1], line[2]) for line in self.sent if str(line[0]) == client}
                assert Counter(round_ for round_, _ in releases) <= charged, f"{path}: a release was not charged"
        if life.killed and kept and not (self._folder / "run" / "summary.json").exists():
            found = status_of(RunFolder(self._folder / "run", now=math.inf))
            assert found.state == "interrupted"
            assert found.resume_command


def check(config: RunConfig, folder: Path, reference: Path, lines: list[list]) -> None:
    """A run that is done: as the uninterrupted one where it is seeded, and paid for in any case."""
    charged, released = charged_and_released(ledgers_of(config, folder)[0])
    opened(folder / "run" / "ledger.sqlite")
    sent = {(str(line[0]), line[1], line[2]) for line in lines}
    whole = (config.clients_per_round or 3) * config.rounds
    if config.simulate or config.ledger:
        assert len(charged) == len(released) == whole, "a charge for bytes that were paid for"
    else:
        assert len(charged) >= whole
    for client, path in node_ledgers(config).items():
        paid, stored = charged_and_released(path)
        assert len(paid) == len(stored) == config.rounds
        replies = {(round_, reply) for _, round_, reply in stored}
        # What a silent client stored is in no sum, so the server's ledger has no digest of it.
        summed = {(each[1], each[2]) for each in released if each[0] == client and each[2]}
        assert summed <= replies if config.aggregation == "cmfl" else summed == replies
        assert replies == {(each[1], each[2]) for each in sent if each[0] == client}
    if config.simulate:
        for name in ("rounds.csv", "clients.csv"):
            pd.testing.assert_frame_equal(table(folder, name), table(reference, name), check_exact=True)
        for variant in ("global", "client-2") if config.keeps_uploads_of(config.num_clients) else ("global",):
            file = Path("run") / "variants" / variant / "adapter_model.safetensors"
            one, other = load_file(folder / file), load_file(reference / file)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), f"{variant} differs"
    rounds = table(folder, "rounds.csv")["round"].tolist()
    assert rounds == list(range(config.rounds + 1))
    assert not [*(folder / "run").rglob("*.tmp")]


class Hunt:
    """Chooses when to kill, by how long the phases of an uninterrupted run lasted and which of them were hit.

    Args:
        durations: {phase: seconds, each time it was entered}.
        rounds: of a run.
    """

    def __init__(self, durations: dict[str, list[float]], rounds: int) -> None:
        self.hits = dict.fromkeys(durations, 0)
        self._durations, self._rounds = durations, rounds
        self._missed: Counter[str] = Counter()

    def aim(self, done: int) -> Aim | None:
        """At a phase that is still to come in a run with so many rounds done, and was hit least; None lets it end."""
        left = {phase: len(each) * (self._rounds - done) // self._rounds for phase, each in self._durations.items()}
        left["saving the results"] = left[WHOLE_RUN] = 1
        phase = min((phase for phase in left if left[phase]), key=lambda phase: (self.hits[phase], random.random()))
        if done == self._rounds and self.hits[phase] > min(self.hits.values()):
            return None
        longest = random.choice(self._durations[phase])
        share = (self._rounds - done + 1) / (self._rounds + 1) if phase == WHOLE_RUN else 1.0
        # A parent that wakes late on a busy machine misses a short phase: then it aims at its beginning.
        delay = random.uniform(0, share * longest) / (1 + self._missed[phase])
        return Aim(phase, random.randint(1, left[phase]), delay)

    def hit(self, aim: Aim | None, phase: str) -> None:
        """Count a kill by the phase in which it really fell."""
        self.hits[phase] += 1
        if aim and aim.phase not in (phase, WHOLE_RUN):
            self._missed[aim.phase] += 1


def resumed(config: RunConfig, place: Path, kills: int) -> dict[str, int]:
    """{phase: kills that hit it}, of runs of one configuration until so many hit, and every phase at least once."""
    random.seed(0)
    # Children find loaded what a run needs, and in this process's caches what its rounds cost.
    federation.run(parse({**vars(config), "ledger": "", "out": str(place / "first")}), LogObserver())

    def with_ledger(folder: Path) -> RunConfig:
        ledger = str(folder / "ledger.sqlite") if config.ledger else ""
        return parse({**vars(config), "ledger": ledger})

    reference = place / "reference"
    reference.mkdir()
    whole = live(partial(run_or_resume, with_ledger(reference), reference), None)
    assert not whole.errors, whole.errors
    hunt, attempts, finished = Hunt(whole.durations, config.rounds), 0, 0
    while sum(hunt.hits.values()) < kills or not all(hunt.hits.values()):
        folder = place / f"run-{finished}"
        folder.mkdir()
        configured = with_ledger(folder)
        witness = Witness(configured, folder)
        while not (folder / "run" / "summary.json").exists():
            attempts += 1
            assert attempts < MOST_ATTEMPTS * max(kills, len(hunt.hits)), f"phases hit: {hunt.hits}"
            done = len(table(folder, "rounds.csv")) - 1 if has_checkpoint(folder) else 0
            aim = hunt.aim(done)
            life = live(partial(run_or_resume, configured, folder), aim)
            witness.check(life)
            if life.killed and not (folder / "run" / "summary.json").exists():
                hunt.hit(aim, life.phase)
        check(configured, folder, reference, witness.sent)
        finished += 1
    return hunt.hits

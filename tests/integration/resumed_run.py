"""Runs that are killed at random instants and resumed until they are done; `test_resume.py` starts it.

Each kind of run is held against one that nobody killed, and its ledgers against what was sent.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file

from fedpriv.accounting.entries import CHARGED, RELEASED, entries
from fedpriv.accounting.ledger import reading, verify_with_head
from fedpriv.config import RunConfig, parse
from fedpriv.training.workbench import workbench
from server.coordinator import LogObserver
from simulations.engines import federation
from simulations.engines.grid import LocalGrid
from tests.integration.killed_run import killed_after, tapped

LONGEST = 1.5  # seconds until a kill; a whole run takes about as long


def run_or_resume(config: RunConfig, folder: Path, wire: int) -> None:
    """What a user would do after a crash: resume, or begin anew where there was no checkpoint yet."""
    federation.LocalGrid = tapped(LocalGrid, wire)
    out = folder / "run"
    values = {**vars(config), "out": str(out)}
    if any((out / "checkpoint").glob("round-*[0-9]")):
        values["resume"] = str(out)
    else:
        shutil.rmtree(out, ignore_errors=True)
    federation.run(parse(values), LogObserver())


def table(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / "run" / name).drop(columns="seconds")


def charged_and_released(path: Path) -> tuple[list, list]:
    with reading(path) as db:
        verify_with_head(db, path)
        written = list(entries(db))
    return tuple([(e.client, e.round, e.reply) for e in written if e.phase == phase] for phase in (CHARGED, RELEASED))


def check(config: RunConfig, folder: Path, reference: Path, lines: list[list]) -> None:
    """A run that is done: as the uninterrupted one where it is seeded, and paid for in any case."""
    own = folder / "run" / "ledger.sqlite"
    charged, released = charged_and_released(own if not config.ledger else Path(config.ledger))
    sent = {(str(line[0]), line[1], line[2]) for line in lines}
    for client in {each[0] for each in charged}:
        paid = [each for each in charged if each[0] == client]
        assert len(paid) >= len({each for each in sent if each[0] == client}), "a release was not charged"
    whole = 3 * config.rounds
    if config.simulate or config.ledger:
        assert len(charged) == len(released) == whole, "a charge for bytes that were paid for"
    else:
        assert len(charged) >= whole
    if config.ledger:
        for client in range(3):
            paid, stored = charged_and_released(Path(f"{config.ledger}.nodes") / f"{client}.sqlite")
            assert len(paid) == len(stored) == config.rounds
            replies = {(round_, reply) for _, round_, reply in stored}
            assert replies == {(each[1], each[2]) for each in released if each[0] == str(client)}
            assert replies == {(each[1], each[2]) for each in sent if each[0] == str(client)}
    if config.simulate:
        for name in ("rounds.csv", "clients.csv"):
            pd.testing.assert_frame_equal(table(folder, name), table(reference, name), check_exact=True)
        for variant in ("global", "client-2"):
            file = Path("run") / "variants" / variant / "adapter_model.safetensors"
            one, other = load_file(folder / file), load_file(reference / file)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), f"{variant} differs"
    rounds = table(folder, "rounds.csv")["round"].tolist()
    assert rounds == list(range(config.rounds + 1))


def one_kind(config: RunConfig, place: Path, kills: int) -> dict[str, int]:
    """Runs of one configuration until so many kills hit."""
    place.mkdir()
    hits = finished = 0

    def with_ledger(folder: Path) -> RunConfig:
        ledger = str(folder / "ledger.sqlite") if config.ledger else ""
        return parse({**vars(config), "ledger": ledger})

    reference = place / "reference"
    reference.mkdir()
    killed_after(None, partial(run_or_resume, with_ledger(reference), reference))
    while hits < kills:
        folder = place / f"run-{finished}"
        folder.mkdir()
        lines: list[list] = []
        while not (folder / "run" / "summary.json").exists():
            new = killed_after(random.uniform(0, LONGEST), partial(run_or_resume, with_ledger(folder), folder))
            errors = [line[1] for line in new if line[0] == "error"]
            assert not errors, errors
            lines += new
            hits += not (folder / "run" / "summary.json").exists()
            if not any((folder / "run" / "checkpoint").glob("round-*[0-9]")) and not config.ledger:
                lines = []  # its folder, with the ledger in it, is given up for a new run
        check(with_ledger(folder), folder, reference, lines)
        finished += 1
    return {"kills": hits, "runs": finished}


def main() -> None:
    """Arguments: folder, configurations by kind as JSON, kills of each kind, seed. Prints one JSON line."""
    folder, kinds, kills = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    random.seed(int(sys.argv[4]))
    torch.set_num_threads(1)
    result = {}
    for kind, values in kinds.items():
        workbench(parse(values))
        result[kind] = one_kind(parse(values), folder / kind, kills)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

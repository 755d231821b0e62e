"""What tests of the server share: nodes with keys, strategies with their books, and whole runs of this process."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedpriv.config import RunConfig, parse
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.training.evaluation import Evaluation
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from server.bookkeeping import Books
from server.observer import LogObserver
from server.registration import Nodes
from server.strategy import RuleStrategy
from simulations.engines import federation

ADAPTER = {"A": torch.zeros(2, 3), "B": torch.zeros(4)}


def registered(sizes: Mapping[int, int], **stated: Any) -> list[Registration]:
    """The registrations of clients that hold so many records."""
    return [Registration(client=c, num_records=n, name="", data_set=f"d{c}", **stated) for c, n in sizes.items()]


def signed(registration: Registration, key: Path, **changes: Any) -> Registration:
    """The registration with changes, as the node of this key states it."""
    stated = replace(registration, **{"identity": keys.public_line(key), **changes})
    return replace(stated, signature=keys.sign(key, stated.signed))


def nodes_of(registrations: list[Registration]) -> Nodes:
    """Nodes 100 + k of clients k."""
    return {each.client: (100 + each.client, each) for each in registrations}


def strategy_of(
    config: RunConfig, nodes: Nodes, ledger: Ledger | None = None, resumed_after: int | None = None, **options: Any
) -> RuleStrategy:
    """The real strategy over these nodes, with books of its own."""
    initial = options.setdefault("initial", ADAPTER)
    registrations = [each for _, each in nodes.values()]
    books = Books(config, "run", registrations, initial=initial, ledger=ledger, resumed_after=resumed_after)
    own = {"evaluate": lambda _: Evaluation(accuracy=0.5, loss=1.0), "on_round": lambda *_: None, **options}
    return RuleStrategy(config, nodes, books=books, run="run", **own)


def rounds_charged(ledger: Path, client: int) -> list[int]:
    """The rounds that a ledger has charged a client."""
    with reading(ledger) as db:
        return [entry.round for entry in db.entries() if entry.phase == "charged" and entry.client == str(client)]


def run(values: Mapping[str, object], out: Path, observer: LogObserver | None = None, **changes: object) -> Path:
    """The folder of a run that is carried out here."""
    federation.run(parse({**values, **changes, "out": str(out)}), observer or LogObserver())
    return out


def summary(folder: Path) -> dict[str, Any]:
    """A finished run's summary."""
    return json.loads((folder / "summary.json").read_text())


class StopsAfter(LogObserver):
    """Ends a run after this round, as Ctrl-C does."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def round_done(self, row: Any) -> None:
        super().round_done(row)
        if row.round == self._last:
            raise KeyboardInterrupt

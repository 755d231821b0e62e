"""What all runs of a sweep cost together, which bounds the cost of picking the best of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.events import Event, group
from fedpriv.data.federated import holdings
from fedpriv.ledger import entries, reader
from fedpriv.runs.files import LEDGER, read_config


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum of a sweep's ledgers, on the `local` view.

    Attributes:
        epsilon: the most that any record has spent over all runs; 0 without runs.
        delta: of that epsilon.
        num_runs: how many runs are counted, unfinished ones included.
    """

    epsilon: float
    delta: float
    num_runs: int


def total(folders: Sequence[Path]) -> Total:
    """The sum of the ledgers in the runs' folders.

    Runs in which no record changes its client are composed client by client and converted once, at each client's
    largest delta. Where runs distribute records differently, a record may belong to any client of another run: there
    the groups' largest epsilons and deltas add up (basic composition). Either way the sum bounds what each record has
    spent, in whichever runs it was set aside.

    Raises:
        LedgerError: a ledger is damaged, or lost entries or its head.
    """
    groups: defaultdict[tuple[object, ...], dict[str, tuple[list[Event], float]]] = defaultdict(dict)
    num_runs = 0
    for folder in folders:
        path = folder / LEDGER
        if not path.is_file():
            continue  # the run ended before its first charge
        num_runs += 1
        clients = groups[holdings(read_config(folder))]
        with reader.reading(path) as db:
            reader.verify_with_head(db, path)
            for data_set in entries.data_sets(db):
                events, delta = clients.get(data_set.client, ([], 0.0))
                events += [release.seen_by("local") for release in entries.releases(db, data_set.id)]
                clients[data_set.client] = (events, max(delta, data_set.delta))
    costs = [_largest(list(clients.values())) for clients in groups.values()]
    return Total(
        epsilon=sum(epsilon for epsilon, _ in costs), delta=sum(delta for _, delta in costs), num_runs=num_runs
    )


def _largest(clients: Sequence[tuple[list[Event], float]]) -> tuple[float, float]:
    """The largest epsilon and the largest delta of any client; equal histories are computed once."""
    histories = {(frozenset(group(events)), delta) for events, delta in clients}
    return (
        max((epsilon_of(events, delta).epsilon for events, delta in histories), default=0.0),
        max((delta for _, delta in histories), default=0.0),
    )

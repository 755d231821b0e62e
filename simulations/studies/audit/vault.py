"""White-box audits of the vault itself by an active coordinator, which reads uploads, or sums of them, round by round.

The coordinator keeps the model where it is, by a tiny learning rate, so that every round is a trial of the same
release. It knows all records but one, and what each adds; from a round it takes what is known, and projects the rest on
the gradient of the record in question. Two runs, with that record and without it, give the two error rates of the test
at one half, which is fixed beforehand. All is in units of sums, since a simulation without the record has one less to
divide by, where a deployed node's registered number is the same. Requests, guard, charges, sampling, noise, encoding
and sums are the product's.
"""

from __future__ import annotations

import csv
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedpriv.config import RunConfig, parse
from fedpriv.learning.adapters import Adapter
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.local_update import ClientUpdate, Execute, UpdateTask
from fedpriv.learning.training.workbench import workbench
from fedpriv.methods.audit import many_runs_schedule_epsilon
from fedpriv.privacy.accounting import epsilon_of, noise_multiplier_for
from fedpriv.privacy.accounting.law import Event
from fedpriv.privacy.accounting.views import View, aggregate_scale
from fedpriv.privacy.ledger.reader import reading
from fedpriv.runs.files import LEDGER
from simulations.engines import federation
from simulations.studies.federations import SilentObserver
from simulations.studies.harness import Line
from simulations.tiny_bert import make_tiny_bert

DELTA, CLAIM = 1e-5, 2.0
HOLDERS, RECORDS = 3, 16
# Rounds of each world: the bounds of as many honest trials are some 85 % of a claim of 2.
TRIALS = 6000
# Who reads what: uploads, or sums of three holders with as many of the others colluding; charged is one reader's share.
OBSERVERS: dict[str, int | None] = {"uploads": None, "sums, 1 colluder": 1, "sums, 2 colluders": 2}
_WORDS = ("fever", "cough", "rash", "pain", "arm", "leg", "head", "back")


class _Tap:
    """An `Execute` that keeps, of every round, the broadcast and what each holder adds to the sum, as flat vectors.

    Attributes:
        broadcasts: [values], of every round.
        added: [holders, values], of every round.
        num_records: of all holders.
    """

    def __init__(self, execute: Execute, holders: Sequence[Records]) -> None:
        self._execute, self._order = execute, [id(records) for records in holders]
        self._sizes = torch.tensor([len(records) for records in holders]).double()
        self.broadcasts: list[Tensor] = []
        self.added: list[Tensor] = []
        self.num_records = int(self._sizes.sum())

    def __call__(self, tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
        """Train the tasks of one round."""
        updates = self._execute(tasks)
        places = [self._order.index(id(task.data)) for task in tasks]
        by_place = dict(zip(places, updates, strict=True))
        uploads = torch.stack([_flat(_made(by_place[place])) for place in sorted(by_place)])
        self.broadcasts.append(_flat(tasks[0].adapter))
        self.added.append((uploads - self.broadcasts[-1]) * self._sizes[:, None])
        return updates


def _made(update: ClientUpdate | Exception) -> Adapter:
    if isinstance(update, Exception):
        raise update
    return update.adapter


def _flat(adapter: Adapter) -> Tensor:
    return torch.cat([adapter[name].double().ravel() for name in sorted(adapter)])


def _write(path: Path, *, with_record: bool) -> None:
    """Three holders' records; the last one of the first holder is the one in question, if it is there."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label", "site"))
        for holder in range(HOLDERS):
            for index in range(RECORDS):
                words = (_WORDS[(index + holder * step) % len(_WORDS)] for step in (1, 3, 5))
                if with_record or (holder, index) != (0, RECORDS - 1):
                    writer.writerow((" ".join(words), "ab"[index % 2], f"site {holder}"))


def _observed(config: RunConfig) -> _Tap:
    """A run, and all that can be seen of it."""
    bench = workbench(config)
    taps: list[_Tap] = []

    def tapped(execute: Execute) -> Execute:
        taps.append(_Tap(execute, [bench.client(holder) for holder in range(HOLDERS)]))
        return taps[0]

    federation.run(config, SilentObserver(), tapped=tapped)
    return taps[0]


def vault_run(observer: str, seed: int, trials: int = TRIALS) -> Line:
    """The lower bound on the epsilon of one release that the observer finds, with the claim for it."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    colluders = OBSERVERS[observer]
    weights = dict.fromkeys(range(HOLDERS), 1.0)
    scale = 1.0 if colluders is None else aggregate_scale(weights, 0, colluding=1)
    noise_multiplier = noise_multiplier_for(CLAIM, DELTA, sampling_probability=1.0, steps=1) / scale
    # The server and a participant are charged for; whatever more colludes is not.
    sums = {} if colluders is None else {"secure_aggregation": True, "colluding_clients": 1}
    with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
        where = Path(folder)
        shared = {
            "model": str(make_tiny_bert(where / "tiny-bert", _WORDS)), "test_data": str(where / "with.csv"),
            "client_column": "site", "labels": ["a", "b"], "recipe": "per-sample",
            "layers": "last-1", "rank": 2, "local_steps": 1, "sampling_probability": 1.0, "learning_rate": 1e-3,
            "server_optimizer": "sgd", "server_learning_rate": 1.0, "clip_norm": 0.01, "delta": DELTA,
            "min_clients": HOLDERS, "comparison": False, "baselines": False, "evaluate_every": 10**6,
            "public_data": True, "seed": seed,
        }  # fmt: skip
        known, seen = {}, {}
        for world in ("with", "without"):
            _write(where / f"{world}.csv", with_record=world == "with")
            values = {**shared, "data": str(where / f"{world}.csv")}
            plain = {"rounds": 1, "noise_multiplier": 0.0, "out": str(where / f"plain-{world}")}
            known[world] = _observed(parse({**values, **plain}))
            noised = {"rounds": trials, "noise_multiplier": noise_multiplier, "out": str(where / world)}
            seen[world] = _observed(parse({**values, **noised, **sums}))
        event = _charged(where / "with" / LEDGER, "local" if colluders is None else "aggregate")
        sums_of = {world: tap.added[0] for world, tap in known.items()}
    added = sums_of["with"][0] - sums_of["without"][0]
    positives = {world: _statistics(tap, colluders, sums_of["without"], added) > 0.5 for world, tap in seen.items()}
    counts = {
        "num_false_positives": int(positives["without"].sum()),
        "num_without": len(positives["without"]),
        "num_false_negatives": int((~positives["with"]).sum()),
        "num_with": len(positives["with"]),
    }
    return {
        "kind": "vault",
        "observer": observer,
        "seed": seed,
        "charged": epsilon_of([event], DELTA).epsilon,
        "found": many_runs_schedule_epsilon([event], DELTA, **counts),
        **counts,
    }


def _charged(ledger: Path, view: View) -> Event:
    """The event on the view of every release of a run, by its ledger, which must have charged all alike."""
    with reading(ledger) as db:
        events = {release.seen_by(view) for data_set in db.data_sets() for release in db.releases(data_set.id)}
    (event,) = events  # merged, since they are equal
    return event.with_count(1)


def _statistics(tap: _Tap, colluders: int | None, known: Tensor, added: Tensor) -> Tensor:
    """[rounds] the part of what was seen along the record's gradient: 1 in the mean if the record is there, else 0."""
    broadcasts, uploads = torch.stack(tap.broadcasts), torch.stack(tap.added)
    if colluders is None:
        return (uploads[:, 0] - known[0]) @ added / (added @ added)
    # The last round's sum shows in no further broadcast.
    sums = (broadcasts[1:] - broadcasts[:-1]) * tap.num_records
    honest = HOLDERS - colluders
    seen = sums - uploads[:-1, honest:].sum(dim=1) - known[:honest].sum(dim=0)
    return seen @ added / (added @ added)

"""The cells of the study: one federation each, in the order in which they are run, with one line of results."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedpriv.config import RunConfig, parse
from fedpriv.runs import environment
from fedpriv.training.workbench import workbench
from simulations.engines import federation
from simulations.studies.utility import corpora
from simulations.studies.utility.cells import DELTA, SEEDS
from simulations.studies.utility.features import FeatureStore
from simulations.studies.utility.run import SilentObserver, run_missing

LOCAL, AGGREGATE, CENTRAL = "local", "aggregate", "central"
ARMS = (LOCAL, AGGREGATE, CENTRAL)
HEAD, DEFAULT = "head", "default"
EPSILONS = (2.0, 1.0, 8.0)
CORPORA = ("embedded", "SST-2 6,000 iid", "MedQuAD by source")
MORE_SEEDS = tuple(range(len(SEEDS), 10))
COLLUDING = (1, 2, 3)

# A test after every round would take most of the time; one format for all, as `auto` may choose anew each time.
_COMMON: Mapping[str, Any] = {
    "delta": DELTA,
    "comparison": False,
    "baselines": False,
    "simulate": True,
    "evaluate_every": 1000,
    "base_dtype": "float32",
}
METHODS: Mapping[str, Mapping[str, Any]] = {HEAD: {"train": "head", "prefix_cache": False}, DEFAULT: {}}

# Of a run's summary and of what produced it.
_KEPT = (
    "accuracy", "accuracy_standard_error", "majority_accuracy", "epsilon_local_max", "epsilon_aggregate_max",
    "delta_max", "num_clients", "num_rounds", "seconds",
)  # fmt: skip
_SOFTWARE = ("fedpriv", "python", "torch", "flwr")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One federation.

    Attributes:
        corpus: by name, of the study of utility.
        arm: `local`, where the server sees every upload; `aggregate`, where it sees sums of all clients' uploads; or
            `central`, one client that holds all records.
        epsilon: of every client against what the arm's observer sees.
        seed: of the split, the clients' records and the noise.
        method: a key of `METHODS`.
        colluding: clients that are assumed to collude with the server, in `aggregate`.
    """

    corpus: str
    arm: str
    epsilon: float
    seed: int = 0
    method: str = HEAD
    colluding: int = 0

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return "/".join(map(str, (self.corpus, self.method, self.arm, f"{self.epsilon:g}", self.colluding, self.seed)))


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[Cell]:
    """All cells, each once, the most telling first."""
    embedded, sst2, medquad = CORPORA
    yield from _compared(embedded, EPSILONS, seeds)
    yield from _compared(sst2, EPSILONS, seeds)
    yield from _compared(embedded, EPSILONS[:1], MORE_SEEDS)
    for colluding, seed in product(COLLUDING, seeds):
        yield Cell(corpus=embedded, arm=AGGREGATE, epsilon=2.0, seed=seed, colluding=colluding)
    yield from _compared(medquad, EPSILONS[:1], seeds)
    yield from _compared(embedded, EPSILONS[:1], seeds, DEFAULT)
    yield from _compared(medquad, EPSILONS[1:], seeds)


def _compared(corpus: str, epsilons: Sequence[float], seeds: Sequence[int], method: str = HEAD) -> Iterator[Cell]:
    for epsilon, seed, arm in product(epsilons, seeds, ARMS):
        yield Cell(corpus=corpus, arm=arm, epsilon=epsilon, seed=seed, method=method)


def run_all(runs: Path, out: Path, data: Path, chosen: Sequence[Cell], *, until: float | None = None) -> None:
    """Run every cell that has no line yet.

    Args:
        data: folder of the public files; corpora whose files it lacks are skipped with a message.
        runs, out, chosen, until: as for `run_missing`.
    """
    run_missing(runs, out, chosen, lambda cell, store: run_cell(cell, out, data, store), until=until)


def run_cell(cell: Cell, out: Path, data: Path, store: FeatureStore) -> dict[str, Any]:
    """The line of a cell.

    Raises:
        InputError: the data folder lacks the corpus.
    """
    folder, observer = Path(tempfile.mkdtemp(prefix="fedpriv-secure-aggregation-")), SilentObserver()
    try:
        config = configuration(cell, out / "data", data, folder / "run")
        store.serve(workbench(config).model, config)
        federation.run(config, observer)
    finally:
        shutil.rmtree(folder)
    software = {name: version for name, version in environment().items() if name in _SOFTWARE}
    kept = {name: observer.summary[name] for name in _KEPT}
    return {"key": cell.key, "cell": asdict(cell), **kept, **observer.noise, "software": software}


def configuration(cell: Cell, written: Path, data: Path, out: Path) -> RunConfig:
    """The configuration of a cell; arguments as in the study of utility.

    Raises:
        InputError: the data folder lacks the corpus.
    """
    pooled = cell.arm == CENTRAL
    where = corpora.keys(cell.corpus, cell.seed, data=data, folder=written, validation=False, pooled=pooled)
    values = {**_COMMON, **where, **METHODS[cell.method], "target_epsilon": cell.epsilon, "seed": cell.seed}
    values["out"] = str(out)
    if cell.arm == AGGREGATE:
        num_clients = len(workbench(parse(values)).data.clients)
        values |= {"secure_aggregation": True, "min_clients": num_clients, "colluding_clients": cell.colluding}
    return parse(values)

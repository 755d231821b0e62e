"""The worth of secure aggregation: accuracy at equal epsilon, and the cost of colluders.

    python -m simulations.studies.secure_aggregation run --data FOLDER [--minutes M]
    python -m simulations.studies.secure_aggregation tables

Secure sums are compared with uploads that the server sees, and with one holder of all records. `run` runs one
federation for each cell and keeps a line of each; cells that have one are not run again. `tables` writes the tables of
results/secure_aggregation.md and draws its plot. The data folder holds sst2_train.csv.gz, sst2_dev.csv.gz and
medquad.csv.gz; cells whose files it lacks are skipped. Noise is seeded, and masks are left out, since they cancel
exactly. Cells train MiniLM for 40 rounds. The cost of colluders is computed for equal clients and the discrete
mechanism, at sampling probability 0.256, 30 steps and 28,000 values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from fedpriv.config import RunConfig, parse
from fedpriv.learning.training.workbench import workbench
from simulations.studies import _colluders as colluders
from simulations.studies import corpora
from simulations.studies._utility_cells import DELTA, SEEDS
from simulations.studies.federations import run_federations
from simulations.studies.harness import (
    Estimate,
    Results,
    bare,
    difference,
    errors,
    fill,
    parser,
    shown,
    table,
    with_target,
)

LOCAL, AGGREGATE, CENTRAL = "local", "aggregate", "central"
ARMS = (LOCAL, AGGREGATE, CENTRAL)
HEAD, DEFAULT = "head", "default"
EPSILONS = (2.0, 1.0, 8.0)
CORPORA = ("embedded", "SST-2 6,000 iid", "MedQuAD by source")
MORE_SEEDS = tuple(range(len(SEEDS), 10))
COLLUDING = (1, 2, 3)

# A test after every round would take most of the time; one format for all, as `auto` may choose differently each time.
_COMMON: Mapping[str, Any] = {
    "delta": DELTA, "comparison": False, "baselines": False, "simulate": True, "evaluate_every": 1000,
    "base_dtype": "float32",
}  # fmt: skip
METHODS: Mapping[str, Mapping[str, Any]] = {HEAD: {"train": "head", "prefix_cache": False}, DEFAULT: {}}
ALL_SEEDS = (*SEEDS, *MORE_SEEDS)
LEAST_ACCURACY = 0.79


@dataclass(frozen=True, kw_only=True)
class SumCell:
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


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[SumCell]:
    """All cells, each once, the most telling first."""
    embedded, sst2, medquad = CORPORA
    yield from _compared(embedded, EPSILONS, seeds)
    yield from _compared(sst2, EPSILONS, seeds)
    yield from _compared(embedded, EPSILONS[:1], MORE_SEEDS)
    for colluding, seed in product(COLLUDING, seeds):
        yield SumCell(corpus=embedded, arm=AGGREGATE, epsilon=2.0, seed=seed, colluding=colluding)
    yield from _compared(medquad, EPSILONS[:1], seeds)
    yield from _compared(embedded, EPSILONS[:1], seeds, DEFAULT)
    yield from _compared(medquad, EPSILONS[1:], seeds)


def _compared(corpus: str, epsilons: Sequence[float], seeds: Sequence[int], method: str = HEAD) -> Iterator[SumCell]:
    for epsilon, seed, arm in product(epsilons, seeds, ARMS):
        yield SumCell(corpus=corpus, arm=arm, epsilon=epsilon, seed=seed, method=method)


def run_all(runs: Path, out: Path, data: Path, chosen: Sequence[SumCell], **which: Any) -> None:
    """Run every cell that has no line yet; arguments as for `run_federations`."""
    run_federations(runs, out, data, chosen, configuration, **which)


def configuration(cell: SumCell, written: Path, data: Path, out: Path) -> RunConfig:
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


_EMBEDDED = SumCell(corpus=CORPORA[0], arm=AGGREGATE, epsilon=2.0)


def write(page: Path, runs: Path, plot: Path) -> None:
    """Write the page's tables, and draw the plot.

    Args:
        page: whose tables are made again.
        runs: the lines of this study.
        plot: to draw.
    """
    found = Results.read(runs)
    blocks = {
        "accuracies": accuracies(found),
        "assumed": assumed(found),
        "colluders": by_colluders(),
    }
    fill(page, blocks)
    print(missing(found))
    colluders.plot(plot)


def _by_seed(
    found: Results, cell: SumCell, seeds: Sequence[int] = SEEDS, *, figure: str = "accuracy"
) -> dict[int, float]:
    return found.by_seed(cell, seeds, figure=figure)


def accuracies(found: Results) -> str:
    """Accuracy of the three arms, with those asked on the embedded corpus at epsilon 2, and the sum's local epsilon."""
    headers = ("corpus", "epsilon", *ARMS, "aggregate less local", "less central", "local epsilon of aggregate")
    shown_cells = [SumCell(corpus=each, arm=AGGREGATE, epsilon=e) for each, e in product(CORPORA, sorted(EPSILONS))]
    shown_cells.insert(2, replace(_EMBEDDED, method=DEFAULT))
    arms = [[_estimates(found, replace(cell, arm=arm)) for arm in ARMS] for cell in shown_cells]
    rows = [_row(found, cell) for cell, known in zip(shown_cells, arms, strict=True) if any(known)]
    return f"{table(headers, rows)}\n\n{errors(each for known in arms for each in known)}"


def _estimates(found: Results, cell: SumCell) -> Estimate | None:
    return Estimate.of(_by_seed(found, cell, ALL_SEEDS).values())


def _row(found: Results, cell: SumCell) -> Sequence[str]:
    local, summed, central = (_by_seed(found, replace(cell, arm=arm), ALL_SEEDS) for arm in ARMS)
    gain, gap = difference(summed, local), difference(summed, central)
    accuracies = [bare(Estimate.of(arm.values())) for arm in (local, summed, central)]
    compared = [shown(each, sign=True) for each in (gain, gap)]
    if (cell.corpus, cell.epsilon) == (_EMBEDDED.corpus, _EMBEDDED.epsilon):
        accuracies[1] += f" ({'' if met_accuracy(summed) else '**not** '}>= {LEAST_ACCURACY})"
        compared = [
            with_target(gain, "> 0", lambda each: each.mean > 0),
            with_target(gap, ">= 0", lambda each: each.mean >= -(each.standard_error or 0.0)),
        ]
    name = cell.corpus if cell.method == HEAD else f"{cell.corpus}, {cell.method} recipe"
    alone = _average(_by_seed(found, cell, ALL_SEEDS, figure="epsilon_local_max"), "{:.2f}")
    return name, f"{cell.epsilon:g}", *accuracies, *compared, alone


def met_accuracy(summed: Mapping[int, float]) -> bool:
    """Whether the mean accuracy of sums is what was asked."""
    found = Estimate.of(summed.values())
    return found is not None and found.mean >= LEAST_ACCURACY


def _noise_over_central(found: Results, cell: SumCell) -> dict[int, float]:
    """{seed: sqrt(K) z_k / z}: the sum's noise a step, over that of central DP-SGD; equal weights."""
    own, clients = (_by_seed(found, cell, figure=figure) for figure in ("noise_multiplier", "num_clients"))
    central = _by_seed(found, replace(cell, arm=CENTRAL, colluding=0), figure="noise_multiplier")
    return {seed: sqrt(clients[seed]) * own[seed] / central[seed] for seed in own.keys() & central.keys()}


def assumed(found: Results) -> str:
    """Accuracy where so many of five clients may collude and every client's upload is needed."""
    told = []
    for colluding in (0, *COLLUDING):
        cell = replace(_EMBEDDED, colluding=colluding)
        if accuracy := Estimate.of(_by_seed(found, cell).values()):
            over = _average(_noise_over_central(found, cell), "{:.3f}")
            alone = _average(_by_seed(found, cell, figure="epsilon_local_max"), "{:.2f}")
            told.append((str(colluding) if colluding else "none counted", over, accuracy.text(), alone))
    return table(("colluders c", "noise over central", "accuracy", "local epsilon"), told)


def missing(found: Results) -> str:
    """How many of the planned cells have no line."""
    return found.missing(cells(), lambda cell: (cell.corpus, cell.method, f"epsilon {cell.epsilon:g}"))


def by_colluders(counts: Sequence[int] = (5, 100)) -> str:
    """Epsilon by colluders and threshold with the noise for none, and the noise that epsilon 2 needs.

    Args:
        counts: K of each federation.
    """
    headers = ("K", "t", "c", "epsilon with the noise for c = 0, t = K", "noise over central for epsilon 2")
    return table(headers, (row for num_clients in counts for row in _sums(num_clients)))


def _sums(num_clients: int) -> Iterator[Sequence[str]]:
    noise = colluders.noise_for(colluders.Sum(clients=num_clients, threshold=num_clients, colluding=0))
    for each in colluders.sums(num_clients):
        needed = colluders.noise_for(each)
        over = needed * sqrt(num_clients) / colluders.central_noise()
        epsilon = colluders.epsilon_in(each, noise).epsilon
        counts = (str(count) for count in (num_clients, each.threshold, each.colluding))
        yield *counts, f"{epsilon:.2f}", f"{over:.3f}"
    alone = colluders.epsilon_alone(num_clients, noise)
    bound = " (upper bound)" if alone.upper_bound_only else ""
    yield str(num_clients), "", "all others", f"{alone.epsilon:.1f}{bound}", ""


def _average(values: Mapping[int, float], form: str) -> str:
    return form.format(sum(values.values()) / len(values)) if values else ""


def main() -> None:
    """Do one step of the study."""
    own = parser(__doc__, "secure_aggregation")
    own.add_argument("--plot", type=Path, default=Path("results/secure-aggregation-colluders.png"))
    arguments = own.parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs, arguments.plot)
        return
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    run_all(arguments.runs, arguments.out, arguments.data, list(cells()), until=arguments.until, only=arguments.only)


if __name__ == "__main__":
    main()

"""The tables of results/secure_aggregation.md, from the lines of the cells and from the accounting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

from simulations.studies.dedup.cells import lines
from simulations.studies.secure_aggregation import colluders
from simulations.studies.secure_aggregation.cells import (
    AGGREGATE,
    ARMS,
    CENTRAL,
    COLLUDING,
    CORPORA,
    DEFAULT,
    EPSILONS,
    LOCAL,
    MORE_SEEDS,
    Cell,
    cells,
)
from simulations.studies.utility.cells import BASELINES, SEEDS
from simulations.studies.utility.results import Estimate, Results, difference

Lines = Mapping[str, Mapping[str, Any]]
"""{key: line} of all cells that were run."""

ALL_SEEDS = (*SEEDS, *MORE_SEEDS)
LEAST_ACCURACY = 0.79

_EMBEDDED = Cell(corpus=CORPORA[0], arm=AGGREGATE, epsilon=2.0)


def show(runs: Path, utility: Path, plot: Path) -> None:
    """Print every table, and draw the plot.

    Args:
        runs: the lines of this study.
        utility: those of the study of utility, which has figures without privacy.
        plot: to write.
    """
    found = {line["key"]: line for line in lines(runs)}
    for table in (claims(found), accuracies(found), outside(found, Results.read(utility)), assumed(found)):
        print(table, end="\n\n")
    for table in (missing(found), quoted(), by_colluders()):
        print(table, end="\n\n")
    colluders.plot(plot)


def by_seed(found: Lines, cell: Cell, seeds: Iterable[int] = SEEDS, *, figure: str = "accuracy") -> dict[int, float]:
    """{seed: the figure} of the seeds with which the cell was run."""
    keys = {seed: replace(cell, seed=seed).key for seed in seeds}
    return {seed: float(found[key][figure]) for seed, key in keys.items() if key in found}


def claims(found: Lines) -> str:
    """The accuracies asked of the embedded corpus at epsilon 2, and those measured."""
    return _table(("embedded, epsilon 2", "asked", "measured", "met"), _claims(found))


def _claims(found: Lines) -> Iterator[Sequence[str]]:
    for name, cell, seeds in (
        ("the head", _EMBEDDED, SEEDS),
        ("the head, ten seeds", _EMBEDDED, ALL_SEEDS),
        ("the default recipe", replace(_EMBEDDED, method=DEFAULT), SEEDS),
    ):
        local, aggregate, central = (by_seed(found, replace(cell, arm=arm), seeds) for arm in ARMS)
        accuracy, gap, gain = Estimate.of([*aggregate.values()]), *_gaps(local, aggregate, central)
        yield (
            f"{name}: aggregate",
            f">= {LEAST_ACCURACY}",
            _text(accuracy),
            _verdict(accuracy, lambda each: each.mean >= LEAST_ACCURACY),
        )
        within = _verdict(gap, lambda each: each.mean >= -(each.standard_error or 0.0))
        asked = ">= 0, less a standard error"
        yield f"{name}: aggregate less central", asked, _text(gap, sign=True), within
        yield f"{name}: aggregate less local", "> 0", _text(gain, sign=True), _verdict(gain, lambda each: each.mean > 0)


def _gaps(
    local: dict[int, float], aggregate: dict[int, float], central: dict[int, float]
) -> tuple[Estimate | None, Estimate | None]:
    """The sum less central, and less local."""
    return difference(aggregate, central), difference(aggregate, local)


def accuracies(found: Lines) -> str:
    """Accuracy of the three arms; what the local view says of the sum's; and its noise over central's."""
    headers = (
        "corpus", "epsilon", *ARMS, "aggregate less central", "aggregate less local", "test set", "noise over central",
        "local epsilon of aggregate",
    )  # fmt: skip
    return _table(headers, (row for corpus in CORPORA for row in _rows(found, corpus)))


def _rows(found: Lines, corpus: str) -> Iterator[Sequence[str]]:
    for epsilon in sorted(EPSILONS):
        cell = Cell(corpus=corpus, arm=AGGREGATE, epsilon=epsilon)
        arms = [by_seed(found, replace(cell, arm=arm)) for arm in ARMS]
        if not any(arms):
            continue
        yield (
            corpus,
            f"{epsilon:g}",
            *(_text(Estimate.of([*arm.values()])) for arm in arms),
            *(_text(gap, sign=True) for gap in _gaps(arms[0], arms[1], arms[2])),
            _average(by_seed(found, cell, figure="accuracy_standard_error"), "± {:.3f}"),
            _average(_noise_over_central(found, cell), "{:.4f}"),
            _average(by_seed(found, cell, figure="epsilon_local_max"), "{:.2f}"),
        )


def _noise_over_central(found: Lines, cell: Cell) -> dict[int, float]:
    """{seed: sqrt(K) z_k / z}: the sum's noise a step, over that of central DP-SGD; equal weights."""
    own, clients = (by_seed(found, cell, figure=figure) for figure in ("noise_multiplier", "num_clients"))
    central = by_seed(found, replace(cell, arm=CENTRAL, colluding=0), figure="noise_multiplier")
    return {seed: sqrt(clients[seed]) * own[seed] / central[seed] for seed in own.keys() & central.keys()}


def outside(found: Lines, utility: Results) -> str:
    """Accuracies for comparison: of the largest class, and of a linear probe without privacy."""
    rows = []
    for corpus in CORPORA:
        largest = by_seed(found, Cell(corpus=corpus, arm=LOCAL, epsilon=2.0), figure="majority_accuracy")
        probe = utility.estimate(corpus, BASELINES, None)
        rows.append((corpus, _text(Estimate.of([*largest.values()])), _text(probe)))
    return _table(("corpus", "largest class", "linear probe without privacy"), rows)


def assumed(found: Lines) -> str:
    """Accuracy where so many of five clients may collude and every client's upload is needed."""
    central = by_seed(found, replace(_EMBEDDED, arm=CENTRAL))
    rows = []
    for colluding in (0, *COLLUDING):
        cell = replace(_EMBEDDED, colluding=colluding)
        accuracy = by_seed(found, cell)
        if accuracy:
            rows.append(
                (
                    str(colluding) if colluding else "none counted",
                    _average(_noise_over_central(found, cell), "{:.3f}"),
                    _text(Estimate.of([*accuracy.values()])),
                    _text(difference(accuracy, central), sign=True),
                    _average(by_seed(found, cell, figure="epsilon_local_max"), "{:.2f}"),
                )
            )
    return _table(("colluders c", "noise over central", "accuracy", "less central", "local epsilon"), rows)


def missing(found: Lines) -> str:
    """How many of the planned cells have no line."""
    planned = Counter(_kind(cell) for cell in cells())
    done = Counter(_kind(cell) for cell in cells() if cell.key in found)
    rows = [(*kind, f"{count - done[kind]} of {count}") for kind, count in planned.items() if done[kind] < count]
    return _table(("corpus", "trains", "epsilon", "runs that are missing"), rows) if rows else "Every cell was run."


def _kind(cell: Cell) -> tuple[str, str, str]:
    return cell.corpus, cell.method, f"{cell.epsilon:g}"


def quoted() -> str:
    """Epsilon of five clients with z = 0.548 each."""
    rows = [(name, f"{epsilon:.2f}") for name, epsilon in colluders.quoted().items()]
    return _table(("five clients, z = 0.548", "epsilon"), rows)


def by_colluders(counts: Sequence[int] = colluders.NUM_CLIENTS) -> str:
    """Epsilon by colluders and threshold with the noise for none, and the noise that epsilon 2 needs.

    Args:
        counts: K of each federation.
    """
    headers = (
        "K",
        "t",
        "c",
        "epsilon with z of c = 0, t = K",
        "z for epsilon 2",
        "noise over central",
        "sqrt(K / (t - max(c, 1)))",
    )
    return _table(headers, (row for num_clients in counts for row in _sums(num_clients)))


def _sums(num_clients: int) -> Iterator[Sequence[str]]:
    noise = colluders.noise_for(colluders.Sum(clients=num_clients, threshold=num_clients, colluding=0))
    for each in colluders.sums(num_clients):
        needed = colluders.noise_for(each)
        over = needed * sqrt(num_clients) / colluders.central_noise()
        epsilon = colluders.epsilon_in(each, noise).epsilon
        counts = (str(count) for count in (num_clients, each.threshold, each.colluding))
        yield *counts, f"{epsilon:.2f}", f"{needed:.3f}", f"{over:.3f}", f"{each.noise_over_central:.3f}"
    alone = colluders.epsilon_alone(num_clients, noise)
    bound = " (upper bound)" if alone.upper_bound_only else ""
    yield str(num_clients), "", "all others", f"{alone.epsilon:.1f}{bound}", "", "", ""


def _average(values: Mapping[int, float], form: str) -> str:
    return form.format(sum(values.values()) / len(values)) if values else ""


def _text(found: Estimate | None, *, sign: bool = False) -> str:
    return found.text(sign=sign) if found else "not run"


def _verdict(found: Estimate | None, holds: Callable[[Estimate], bool]) -> str:
    return "not run" if found is None else "yes" if holds(found) else "**no**"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers), *body])

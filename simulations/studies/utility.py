"""The accuracy of private models, compared with what a user would do without a federation: results/utility.md.

    python -m simulations.studies.utility run|tables [--data FOLDER] [--runs results/utility.jsonl]

`run` runs one federation for each cell of the study and keeps a line of each; cells that have one are not run again.
`tables` writes results/utility.md from the lines, whose `seconds` are those of busy machines; those whose `software`
names a `gpu` ran there in float32. The data folder holds sst2_train.csv.gz, sst2_dev.csv.gz, medquad.csv.gz and
adult.csv.gz; corpora that it lacks are skipped. Several processes may add to one file of runs if their corpora differ;
each has a folder of its own for `--out`.

A seed decides the split, the clients' records and the noise. The method `overlap` compares the test records with those
of training. The grid compares seven rates, 1/8 to 8 times the rule's, on a fifth of the training records. Three local
steps are taken in each of 13 rounds after the start, at the rule's rate for 39 steps. The budgets have five seeds,
`--only '*/head/*' --seeds 0,1,2,3,4`, and a test after every round is the method `head, tested every round`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from fedpriv.learning.adapters import BUNDLED_ENCODER, MPNET
from simulations.studies._utility_cells import (
    AUTO,
    BASELINES,
    BUDGET_CORPORA,
    BUDGETS,
    CURVE,
    EPSILONS,
    FACTORS,
    INGREDIENTS,
    NAMED,
    OVERLAP,
    PLAIN_LORA,
    PLAIN_WEIGHTS,
    PROBES,
    RATES,
    RECIPE,
    SEEDS,
    SIZES,
    UNNAMED,
    UtilityCell,
    cells,
    run_all,
)
from simulations.studies.corpora import CORPORA
from simulations.studies.harness import Estimate, Results, bare, difference, errors, fill, parser, shown, table

# (view, epsilon) of LoRA with all rows of SST-2.
_WITH_LORA = (("local", 8.0), ("sum", 8.0), ("sum", 2.0))

# One corpus, dealt in two ways.
_EVEN, _SKEWED = "SST-2 6,000 iid", "SST-2 6,000 Dirichlet"

# (method, encoder) of the table of corpora.
_SHOWN = [(method, BUNDLED_ENCODER) for method in ("head", RECIPE, AUTO, PROBES)] + [("head", MPNET)]

# Of the table of budgets, which shows smaller differences than the others.
_BUDGET_SEEDS = 5

# From much privacy to none.
_ORDER = sorted(EPSILONS, key=lambda epsilon: epsilon or float("inf"))


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    results = Results.read(runs)
    blocks = {
        "targets": _judged(_targets(results)),
        "overlaps": _overlaps(results),
        "corpora": _corpora(results),
        "many": _many(results),
        "budgets": _budgets(results),
        "ingredients": _ingredients(results),
    }
    fill(page, blocks)
    print(results.missing(cells(), _kind))


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """One difference with a target.

    Attributes:
        kind: of the claim; claims of one kind are a row and follow each other.
        place: the corpus, epsilon and view, for which it is made.
        least: the target.
        found: the difference.
        errors: so many of its standard errors are forgiven; a single seed has none.
    """

    kind: str
    place: str
    least: float
    found: Estimate
    errors: int = 0

    @property
    def met(self) -> bool:
        """Whether it reaches the target."""
        return self.found.mean + self.errors * (self.found.standard_error or 0.0) >= self.least


def _judged(claims: Iterable[_Claim]) -> str:
    """A row for each kind of claim, with the difference that is smallest."""
    rows = []
    for kind, each in groupby(claims, key=attrgetter("kind")):
        chosen = list(each)
        least, num_met = min(chosen, key=lambda claim: claim.found.mean), sum(claim.met for claim in chosen)
        met = f"{num_met} of {len(chosen)}" if num_met == len(chosen) else f"**{num_met} of {len(chosen)}**"
        rows.append((kind, f">= {least.least:g}", met, least.found.text(sign=True), least.place))
    return table(("claim", "target", "met", "least", "where"), rows)


def _targets(results: Results) -> Iterator[_Claim]:
    for method, other, least in (("head", PROBES, 0.0), (RECIPE, "head", 0.0), (AUTO, "head", -0.002)):
        for name, epsilon, view in product((*NAMED, *UNNAMED), _ORDER, ("local", "sum")):
            if found := difference(*(_by_seed(results, name, each, epsilon, view) for each in (method, other))):
                place = f"{name}, epsilon {_epsilon(epsilon)}, {view}"
                yield _Claim(kind=f"{method} less {other}", place=place, least=least, found=found, errors=1)
    for name in UNNAMED:
        if found := _gap_to_probe(results, name):
            yield _Claim(kind="head less probe", place=f"{name}, epsilon 8, local", least=-0.015, found=found)
    for name, epsilon in product(NAMED, (1.0, 2.0, 8.0)):
        if found := gap_of_rule(results, name, epsilon):
            kind, place = "the rule's learning rate less the best of seven", f"{name}, epsilon {epsilon:g}"
            yield _Claim(kind=kind, place=place, least=-0.01, found=found)


def _corpora(results: Results) -> str:
    """Accuracies by corpus, method, view and epsilon, and those without privacy."""
    settings = list(product(("local", "sum"), (2.0, 8.0)))
    corpora = [name for name in (*NAMED, *UNNAMED) if name != _SKEWED]
    rows, known = [], list[Estimate | None]()
    for name, (method, encoder) in product(corpora, _SHOWN):
        found = [_estimate(results, name, method, epsilon, view, encoder=encoder) for view, epsilon in settings]
        if any(found):
            rows.append((name, _with(method, encoder), *map(bare, found)))
            known += found
    headers = ("corpus", "method", *(f"{view}, epsilon {epsilon:g}" for view, epsilon in settings))
    outside = []
    for name in corpora:
        figures = ("accuracy", "tfidf_accuracy", "majority_accuracy")
        found = [_estimate(results, name, BASELINES, None, encoder=MPNET)]
        found += [_estimate(results, name, BASELINES, None, figure=figure) for figure in figures]
        if any(found):
            outside.append((name, *map(bare, found)))
            known += found
    names = ("without privacy", _with("linear probe", MPNET), "linear probe", "TF-IDF", "largest class")
    return "\n\n".join((table(headers, rows), table(names, outside), f"{errors(known)} {_skewed(results)}"))


def _with(method: str, encoder: str) -> str:
    return method if encoder == BUNDLED_ENCODER else f"{method}, {encoder}"


def _skewed(results: Results) -> str:
    """How far accuracies with a Dirichlet partition are from those with an even one, and the only ones that suffer."""
    apart = []
    for method, epsilon, view in product(("head", RECIPE, AUTO), (2.0, 8.0), ("local", "sum")):
        one, other = (_estimate(results, name, method, epsilon, view) for name in (_SKEWED, _EVEN))
        if one and other:
            apart.append(abs(one.mean - other.mean))
    probes = (f"{shown(_estimate(results, _SKEWED, PROBES, epsilon))} at epsilon {epsilon:g}" for epsilon in (2.0, 8.0))
    most = f"at most {max(apart):.3f} either way, but {PROBES} reach {' and '.join(probes)}" if apart else "not run"
    return f"{_SKEWED} less iid: {most}."


def _budgets(results: Results) -> str:
    """The head's accuracy by its budget, and each step up from one budget to the next at which it falls for certain."""
    rows, falls, ends = [], [], list[tuple[str, Estimate]]()
    for name, view in product(BUDGET_CORPORA, ("local", "sum")):
        # Without noise nobody needs a sum.
        views = ["local" if epsilon is None else view for epsilon in BUDGETS]
        found = [_by_seed(results, name, "head", e, v) for e, v in zip(BUDGETS, views, strict=True)]
        for epsilon, (less, more) in zip(BUDGETS[1:], pairwise(found), strict=True):
            step = difference(more, less)
            if step and step.mean + 2 * (step.standard_error or 0.0) < 0:
                falls.append(f"{name}, {view}, {_epsilon(epsilon)}: {step.text(sign=True, usual=_BUDGET_SEEDS)}")
        if view == "local":
            rows.append((name, *(bare(Estimate.of(each.values()), usual=_BUDGET_SEEDS) for each in found)))
        if end := _end(results, name, view):
            ends.append((f"{name}, {view}", end))
    parts = [f"Falls beyond two standard errors, of both views: {'; '.join(falls) or 'none'}."]
    if ends:
        place, worst = min(ends, key=lambda each: each[1].mean)
        told = worst.text(sign=True, usual=_BUDGET_SEEDS)
        parts.append(f"Last less best round at epsilon 8: at worst {told}, {place}.")
    return f"{table(('local epsilon', *map(_epsilon, BUDGETS)), rows)}\n\n{' '.join(parts)}"


def _end(results: Results, name: str, view: str) -> Estimate | None:
    """The last round of the mean curve of accuracies at epsilon 8, less its best round."""
    curves = results.by_seed(UtilityCell(corpus=name, method=CURVE, epsilon=8.0, view=view), figure="accuracies")
    if not curves:
        return None
    best = max(range(len(curves[min(curves)])), key=lambda round_: sum(curve[round_] for curve in curves.values()))
    return Estimate.of([curve[-1] - curve[best] for curve in curves.values()])


def _many(results: Results) -> str:
    """The head alone and LoRA, by the number of records."""
    rows, known = [], list[Estimate | None]()
    sizes = sorted((_EVEN, *SIZES), key=lambda name: CORPORA[name].most or 0)
    for name, view, epsilon in [(name, "sum", 8.0) for name in sizes] + [(NAMED[-1], *each) for each in _WITH_LORA]:
        head, auto = (_by_seed(results, name, method, epsilon, view) for method in ("head", AUTO))
        found = [Estimate.of(each.values()) for each in (head, auto)]
        if all(found):
            known += found
            rows.append((name, view, f"{epsilon:g}", *map(bare, found), shown(difference(auto, head), sign=True)))
    plain = {method: _estimate(results, NAMED[-1], method, None) for method in (PLAIN_LORA, PLAIN_WEIGHTS)}
    public = ", ".join(f"{method} {found.text()}" for method, found in plain.items() if found)
    told = f"\n\n{errors(known)} Not private, all rows: {public or 'not run'}." if rows else ""
    return table(("records", "view", "epsilon", "head", AUTO, f"{AUTO} less head"), rows) + told


def _overlaps(results: Results) -> str:
    """The share of each corpus's test records that its training records tell, and how many are left."""
    rows = []
    for name in [*NAMED[:1], *NAMED[3:], *UNNAMED]:
        figures = ("num_test", "num_left", "num_train", "within", "equal", "near")
        found = [_estimate(results, name, OVERLAP, None, figure=figure) for figure in figures]
        if all(found):
            rows.append((name, *(f"{each.mean:,.0f}" for each in found[:3] if each), *map(bare, found[3:])))
    return table(("corpus", "test records", "left", "training records", "within", "equal", "near"), rows)


def _ingredients(results: Results) -> str:
    whole = _by_seed(results, NAMED[0], "head", 2.0)
    found = {method: difference(_by_seed(results, NAMED[0], method, 2.0), whole) for method in INGREDIENTS}
    return table(("", "less the whole"), [(method, shown(each, sign=True)) for method, each in found.items() if each])


def gap_of_rule(results: Results, name: str, epsilon: float) -> Estimate | None:
    """The rule's accuracy less that of the rate with the best mean, over the seeds that all rates were run with."""
    found = {method: _by_seed(results, name, method, epsilon) for method in RATES}
    seeds = set.intersection(*(set(each) for each in found.values()))
    if not seeds:
        return None
    best = max(found, key=lambda method: sum(found[method][seed] for seed in seeds))
    rule = next(method for method, factor in zip(RATES, FACTORS, strict=True) if factor == 1.0)
    return Estimate.of([found[rule][seed] - found[best][seed] for seed in sorted(seeds)])


def _gap_to_probe(results: Results, name: str) -> Estimate | None:
    return difference(_by_seed(results, name, "head", 8.0), _by_seed(results, name, BASELINES, None))


def _kind(cell: UtilityCell) -> tuple[str, ...]:
    other = () if cell.encoder == BUNDLED_ENCODER else (cell.encoder,)
    return "grid of rates" if cell.method in RATES else cell.method, cell.view, *other


def _epsilon(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _by_seed(
    results: Results,
    corpus: str,
    method: str,
    epsilon: float | None,
    view: str = "local",
    *,
    figure: str = "accuracy",
    encoder: str = BUNDLED_ENCODER,
) -> dict[int, float]:
    cell = UtilityCell(corpus=corpus, method=method, epsilon=epsilon, view=view, encoder=encoder)
    return results.by_seed(cell, figure=figure)


def _estimate(*which: Any, **more: Any) -> Estimate | None:
    return Estimate.of(_by_seed(*which, **more).values())


def main() -> None:
    """Do one step of the study."""
    own = parser(__doc__, "utility")
    own.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=SEEDS)
    arguments = own.parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
        return
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    which = {"until": arguments.until, "only": arguments.only}
    run_all(arguments.runs, arguments.out, arguments.data, list(cells(arguments.seeds)), **which)


if __name__ == "__main__":
    main()

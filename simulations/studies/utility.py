"""The accuracy of private models, compared with what a user would do without a federation: results/utility.md.

    python -m simulations.studies.utility run|tables [--data FOLDER] [--runs results/utility.jsonl] [--finished RUN ...]

`run` runs one federation for each cell of the study and keeps a line of each; cells that have one are not run again.
With `--finished` it runs none and keeps a line of each of these folders, which `fedpriv run` has written. `tables`
writes results/utility.md from the lines, whose `seconds` are those of busy machines; those whose `software` names a
`gpu` ran there in float32. The data folder holds sst2_train.csv.gz, sst2_dev.csv.gz, medquad.csv.gz and adult.csv.gz;
corpora that it lacks are skipped. Several processes may add to one file of runs if their corpora differ; each has a
folder of its own for `--out`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from operator import attrgetter
from pathlib import Path

import torch

from simulations.studies._utility_cells import (
    AUTO,
    BASELINES,
    BUDGET_CORPORA,
    BUDGETS,
    CENTRAL,
    CURVE,
    EPSILONS,
    FACTORS,
    INGREDIENTS,
    NAMED,
    NARROW,
    PLAIN_LORA,
    PLAIN_WEIGHTS,
    PROBES,
    RATES,
    RECIPE,
    SECURE,
    SEEDS,
    SIZES,
    UNNAMED,
    UtilityCell,
    cells,
    keep_finished,
    run_all,
)
from simulations.studies.corpora import CORPORA
from simulations.studies.harness import Estimate, Results, difference, fill, listed, parser, shown, table

# (view, epsilon, accuracy) that LoRA must reach with all rows of SST-2.
_WITH_LORA = (("local", 8.0, 0.870), ("sum", 8.0, 0.885), ("sum", 2.0, 0.870))

# What a run has spent on its view; more than its target where it was interrupted and rounds were charged again.
_SPENT = {"local": "epsilon_local_max", "sum": "epsilon_aggregate_max"}

_RATES_AT = (1.0, 2.0, 8.0)

# Of the table of budgets, which shows smaller differences than the others.
_BUDGET_SEEDS = 5

# From much privacy to none.
_ORDER = sorted(EPSILONS, key=lambda epsilon: epsilon or float("inf"))


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    results = Results.read(runs)
    blocks = {
        "targets": _judged(_targets(results)),
        "corpora": _corpora(results),
        "many": _many(results),
        "budgets": _budgets(results),
        "ingredients": _ingredients(results),
        "rates": _rates(results),
        "unnamed": _unnamed(results),
        "missing": results.missing(cells(), _kind, ("method", "view", "missing runs")),
    }
    fill(page, blocks)


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """One figure with a target.

    Attributes:
        kind: of the claim; claims of one kind are a row, and follow each other.
        place: the method, or the corpus, epsilon and view, for which it is made.
        least: the target; of a difference at most 0.
        found: the figure; None if it was not measured.
        met: whether the figure reaches the target.
        strictly: whether it must exceed the target.
        spent: ", at epsilon E" where runs have spent more than was asked.
    """

    kind: str
    place: str
    least: float
    found: Estimate | None
    met: bool
    strictly: bool = False
    spent: str = ""

    @property
    def target(self) -> str:
        """In words."""
        return f"{'>' if self.strictly else '>='} {self.least:g}"

    @property
    def shown(self) -> str:
        """The figure, with its sign if it is a difference."""
        return shown(self.found, sign=self.least <= 0) + self.spent


def _judged(claims: Iterable[_Claim]) -> str:
    """A row for each kind of claim, with the smallest figure of all its places, and every claim that is missed."""
    rows, missed = [], list[str]()
    for kind, each in groupby(claims, key=attrgetter("kind")):
        chosen = list(each)
        known = {claim.place: claim.found.mean for claim in chosen if claim.found}
        smallest = min(chosen, key=lambda claim: known.get(claim.place, float("inf")))
        failed = [claim for claim in chosen if claim.found and not claim.met]
        met = f"{len(known) - len(failed)} of {len(known)}" if known else "not run"
        shown_met = f"**{met}**" if failed else met
        rows.append((kind, smallest.target, shown_met, smallest.shown, smallest.place))
        missed += [f"- {kind}, {claim.place}: {claim.shown}" for claim in failed]
    judged = table(("claim", "target", "met", "smallest", "where"), rows)
    return "\n\n".join([judged, *(["Missed:\n\n" + "\n".join(missed)] if missed else [])])


def _targets(results: Results) -> Iterator[_Claim]:
    for name in NAMED:
        for epsilon, target in CORPORA[name].targets:
            for method in ("head", RECIPE):
                kind = f"{name}, local epsilon {epsilon:g}: head and recipe"
                yield _at_least(kind, method, target, _estimate(results, name, method, epsilon))
    yield from _comparisons(results)
    for (view, epsilon, target), method in product(_WITH_LORA, (AUTO, SECURE)):
        found = _estimate(results, NAMED[-1], method, epsilon, view)
        spent = _by_seed(results, NAMED[-1], method, epsilon, view, figure=_SPENT[view]).values()
        beyond = f", at epsilon {max(spent):.2f}" if spent and max(spent) > epsilon else ""
        yield _at_least(f"{NAMED[-1]}, {view}, epsilon {epsilon:g}: {method}", "", target, found, spent=beyond)
    for name in SIZES:
        found = difference(*(_by_seed(results, name, method, 8.0, "sum") for method in (AUTO, "head")))
        kind, met = f"{AUTO} less head, in the sum, epsilon 8", found is not None and found.mean > 0
        yield _Claim(kind=kind, place=name, least=0.0, found=found, met=met, strictly=True)
    for name, epsilon in product(NAMED, (1.0, 2.0, 8.0)):
        if found := gap_of_rule(results, name, epsilon):
            kind = "the rule's learning rate less the best of seven"
            yield _at_least(kind, f"{name}, epsilon {epsilon:g}", -0.01, found)
    for method, name in product(("head", RECIPE), UNNAMED):
        yield _at_least(f"{method} less linear probe, epsilon 8", name, -0.03, _gap_to_probe(results, name, method))


def _at_least(kind: str, place: str, least: float, found: Estimate | None, *, spent: str = "") -> _Claim:
    met = found is not None and found.mean >= least
    return _Claim(kind=kind, place=place, least=least, found=found, met=met, spent=spent)


def _comparisons(results: Results) -> Iterator[_Claim]:
    """Claims that one method is not worse than another."""
    settings = list(product((*NAMED, *UNNAMED), _ORDER, ("local", "sum")))
    for method, other, least in (("head", PROBES, 0.0), (RECIPE, "head", 0.0), (AUTO, "head", -0.002)):
        kind, compared = f"{method} less {other}", []
        for name, epsilon, view in settings:
            pair = [_by_seed(results, name, each, epsilon, view) for each in (method, other)]
            if found := difference(pair[0], pair[1]):
                compared.append((f"{name}, epsilon {_epsilon(epsilon)}, {view}", found))
        if method == RECIPE and (pooled := _pooled(results, RECIPE)):
            compared.append(("all runs of both", pooled))
        for place, found in compared:
            # Within one standard error of the difference, which a single seed has none of.
            met = found.mean + (found.standard_error or 0.0) >= least
            yield _Claim(kind=kind, place=place, least=least, found=found, met=met)


def _pooled(results: Results, method: str) -> Estimate | None:
    """The method less the head alone over all runs of both, which say more of a small difference than three seeds."""
    pairs = [
        (_by_seed(results, name, method, epsilon, view), _by_seed(results, name, "head", epsilon, view))
        for name, epsilon, view in product(CORPORA, _ORDER, ("local", "sum"))
    ]
    return Estimate.of([ones[seed] - others[seed] for ones, others in pairs for seed in ones.keys() & others.keys()])


def _corpora(results: Results) -> str:
    """Accuracies by corpus, method, view and epsilon, and those without privacy."""
    settings = list(product(("local", "sum"), (2.0, 8.0)))
    rows = []
    for name, method in product(NAMED, ("head", RECIPE, AUTO, "paper", PROBES, CENTRAL)):
        found = [_estimate(results, name, method, epsilon, view) for view, epsilon in settings]
        if any(found):
            rows.append((name, method, *(shown(each) if each else "" for each in found)))
    headers = ("corpus", "method", *(f"{view}, epsilon {epsilon:g}" for view, epsilon in settings))
    figures = ("accuracy", "tfidf_accuracy", "majority_accuracy")
    outside = [
        (
            name,
            shown(_estimate(results, name, "head", None)),
            *(shown(_estimate(results, name, BASELINES, None, figure=figure)) for figure in figures),
        )
        for name in NAMED
    ]
    names = ("corpus", "head, no noise", "linear probe", "TF-IDF", "largest class")
    return f"{table(headers, rows)}\n\nWithout privacy:\n\n{table(names, outside)}"


def _budgets(results: Results) -> str:
    """The head's accuracy by its budget, and each step up from one budget to the next at which it falls for certain."""
    rows = []
    for name, view in product(BUDGET_CORPORA, ("local", "sum")):
        # Without noise nobody needs a sum.
        views = ["local" if epsilon is None else view for epsilon in BUDGETS]
        found = [_by_seed(results, name, "head", e, v) for e, v in zip(BUDGETS, views, strict=True)]
        steps = [difference(more, less) for less, more in pairwise(found)]
        falls = [
            f"{_epsilon(epsilon)}: {step.text(sign=True, usual=_BUDGET_SEEDS)}"
            for epsilon, step in zip(BUDGETS[1:], steps, strict=True)
            if step and step.mean + 2 * (step.standard_error or 0.0) < 0
        ]
        verdict_of_row = ", ".join(falls) or ("nowhere" if all(steps) else "not run")
        accuracies = (_mean(Estimate.of(each.values())) for each in found)
        end = shown(_end(results, name, view), sign=True, usual=_BUDGET_SEEDS)
        rows.append((name, view, *accuracies, verdict_of_row, end))
    headers = ("corpus", "view", *map(_epsilon, BUDGETS), "falls beyond two standard errors at", "last less best round")
    return table(headers, rows)


def _mean(found: Estimate | None) -> str:
    """Without its error, which differences from one budget to the next share."""
    if found is None:
        return "not run"
    return f"{found.mean:.3f}" + (f" ({found.num_runs} runs)" if found.num_runs != _BUDGET_SEEDS else "")


def _end(results: Results, name: str, view: str) -> Estimate | None:
    """The last round of the mean curve of accuracies at epsilon 8, less its best round."""
    curves = results.by_seed(UtilityCell(corpus=name, method=CURVE, epsilon=8.0, view=view), figure="accuracies")
    if not curves:
        return None
    best = max(range(len(curves[min(curves)])), key=lambda round_: sum(curve[round_] for curve in curves.values()))
    return Estimate.of([curve[-1] - curve[best] for curve in curves.values()])


def _many(results: Results) -> str:
    """The head alone and LoRA, by the number of records."""
    rows = []
    settings = [(name, "sum", 8.0) for name in SIZES] + [(NAMED[-1], view, epsilon) for view, epsilon, _ in _WITH_LORA]
    for name, view, epsilon in settings:
        head, auto, narrow = (_by_seed(results, name, method, epsilon, view) for method in ("head", AUTO, NARROW))
        found = (shown(Estimate.of(each.values())) for each in (head, auto))
        gains = (shown(difference(each, head), sign=True) for each in (auto, narrow))
        rows.append((name, view, f"{epsilon:g}", *found, *gains))
    headers = ("records", "view", "epsilon", "head", AUTO, f"{AUTO} less head", f"{NARROW} less head")
    plain = {method: _estimate(results, NAMED[-1], method, None) for method in (PLAIN_LORA, PLAIN_WEIGHTS)}
    known = [f"{method} {found.text()}" for method, found in plain.items() if found]
    return table(headers, rows) + f"\n\n{NAMED[-1]}, not private: {', '.join(known) or 'not run'}."


def _ingredients(results: Results) -> str:
    whole = _by_seed(results, NAMED[0], "head", 2.0)
    rows = [("the whole recipe, head alone", shown(Estimate.of(list(whole.values()))), "")]
    for method in INGREDIENTS:
        found = _by_seed(results, NAMED[0], method, 2.0)
        if found:
            rows.append((method, shown(Estimate.of(list(found.values()))), shown(difference(found, whole), sign=True)))
    return table(("", "accuracy", "less the whole"), rows)


def _rates(results: Results) -> str:
    """By how much the rule's rate stays below the best of all, and which multiple of it that is."""
    rows = [(name, *(_rate(results, name, epsilon) for epsilon in _RATES_AT)) for name in NAMED]
    return table(("corpus", *(f"epsilon {epsilon:g}" for epsilon in _RATES_AT)), (row for row in rows if any(row[1:])))


def _rate(results: Results, name: str, epsilon: float) -> str:
    found = [_estimate(results, name, method, epsilon) for method in RATES]
    known = [(each.mean, factor) for each, factor in zip(found, FACTORS, strict=True) if each]
    return f"{shown(gap_of_rule(results, name, epsilon), sign=True)}, x {max(known)[1]:g}" if known else ""


def gap_of_rule(results: Results, name: str, epsilon: float) -> Estimate | None:
    """The rule's accuracy less that of the rate with the best mean, over the seeds that all rates were run with."""
    found = {method: _by_seed(results, name, method, epsilon) for method in RATES}
    seeds = set.intersection(*(set(each) for each in found.values()))
    if not seeds:
        return None
    best = max(found, key=lambda method: sum(found[method][seed] for seed in seeds))
    rule = next(method for method, factor in zip(RATES, FACTORS, strict=True) if factor == 1.0)
    return Estimate.of([found[rule][seed] - found[best][seed] for seed in sorted(seeds)])


def _unnamed(results: Results) -> str:
    rows = [
        (
            name,
            shown(_estimate(results, name, "head", 8.0)),
            shown(_estimate(results, name, RECIPE, 8.0)),
            *(
                shown(_estimate(results, name, BASELINES, None, figure=figure))
                for figure in ("accuracy", "tfidf_accuracy", "majority_accuracy")
            ),
            shown(_gap_to_probe(results, name, "head"), sign=True),
        )
        for name in UNNAMED
    ]
    headers = ("corpus", "head", "recipe", "probe", "TF-IDF", "largest class", "head less probe")
    return table(headers, rows)


def _gap_to_probe(results: Results, name: str, method: str) -> Estimate | None:
    return difference(_by_seed(results, name, method, 8.0), _by_seed(results, name, BASELINES, None))


def _kind(cell: UtilityCell) -> tuple[str, str]:
    return "grid of rates" if cell.method in RATES else cell.method, cell.view


def _epsilon(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _by_seed(
    results: Results, corpus: str, method: str, epsilon: float | None, view: str = "local", *, figure: str = "accuracy"
) -> dict[int, float]:
    cell = UtilityCell(corpus=corpus, method=method, epsilon=epsilon, view=view)
    return results.by_seed(cell, figure=figure)


def _estimate(
    results: Results, corpus: str, method: str, epsilon: float | None, view: str = "local", *, figure: str = "accuracy"
) -> Estimate | None:
    return Estimate.of(_by_seed(results, corpus, method, epsilon, view, figure=figure).values())


def main() -> None:
    """Do one step of the study."""
    own = parser(__doc__, "utility")
    own.add_argument("--corpora", type=listed(";"), default=list(CORPORA), help="names, separated by ;")
    own.add_argument("--methods", type=listed(";"), default=[], help="by name, separated by ;; default all")
    own.add_argument("--epsilons", type=listed(","), default=[], help="or none; default all")
    own.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=SEEDS)
    own.add_argument("--views", type=listed(","), default=["local", "sum"])
    own.add_argument("--finished", type=Path, nargs="+", metavar="RUN", help="folders of runs that are done")
    arguments = own.parse_args()
    if unknown := [name for name in arguments.corpora if name not in CORPORA]:
        own.error(f"corpora = {unknown[0]}: known are {', '.join(CORPORA)}")
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
        return
    if arguments.finished:
        keep_finished(arguments.runs, arguments.finished)
        return
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    chosen = [
        cell
        for cell in cells(arguments.seeds)
        if cell.corpus in arguments.corpora
        and cell.method in (arguments.methods or [cell.method])
        and cell.shown_epsilon in (arguments.epsilons or [cell.shown_epsilon])
        and cell.view in arguments.views
    ]
    run_all(arguments.runs, arguments.out, arguments.data, chosen, until=arguments.until)


if __name__ == "__main__":
    main()

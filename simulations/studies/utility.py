"""The accuracy of private models, compared with what a user would do without a federation: results/utility.md.

    python -m simulations.studies.utility run|tables [--data FOLDER] [--runs results/utility.jsonl] [--finished RUN ...]

`run` runs one federation for each cell of the study and keeps a line of each; cells that have one are not run again.
With `--finished` it runs none and keeps a line of each of these folders, which `fedpriv run` has written. `tables`
writes results/utility.md from the lines. The data folder holds sst2_train.csv.gz, sst2_dev.csv.gz,
medquad.csv.gz and adult.csv.gz; corpora that it lacks are skipped. Several processes may add to one file of runs if
their corpora differ; each has a folder of its own for `--out`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
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
from simulations.studies.harness import Estimate, Results, difference, fill, listed, parser, shown, table, verdict

# (view, epsilon, accuracy) that LoRA must reach with all rows of SST-2.
_WITH_LORA = (("local", 8.0, 0.870), ("sum", 8.0, 0.885), ("sum", 2.0, 0.870))

# What a run has spent on its view; more than its target where it was interrupted and rounds were charged again.
_SPENT = {"local": "epsilon_local_max", "sum": "epsilon_aggregate_max"}

# From much privacy to none.
_ORDER = sorted(EPSILONS, key=lambda epsilon: epsilon or float("inf"))


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    results = Results.read(runs)
    blocks = {
        "targets": table(("claim", "target", "measured", "met"), _targets(results)),
        "corpora": "\n\n".join(_corpus(results, name) for name in NAMED),
        "many": _many(results),
        "budgets": _budgets(results),
        "ingredients": _ingredients(results),
        "rates": _rates(results),
        "unnamed": _unnamed(results),
        "missing": results.missing(cells(), _kind, ("corpus", "method", "view", "missing runs")),
    }
    fill(page, blocks)


def _targets(results: Results) -> Iterator[Sequence[str]]:
    for name in NAMED:
        for epsilon, target in CORPORA[name].targets:
            for method in ("head", RECIPE):
                found = _estimate(results, name, method, epsilon)
                claim = f"{name}, local epsilon {epsilon:g}, {method}"
                yield claim, f"{target:g}", shown(found), verdict(found and found.mean >= target)
    for claim, least, found in _comparisons(results):
        if found:  # within one standard error of the difference, which a single seed has none of
            met = found.mean + (found.standard_error or 0.0) >= least
            yield claim, f">= {least:g}", found.text(sign=True), verdict(met)
    for (view, epsilon, target), method in product(_WITH_LORA, (AUTO, SECURE)):
        found = _estimate(results, NAMED[-1], method, epsilon, view)
        claim = f"{NAMED[-1]}, {view}, epsilon {epsilon:g}: {method}"
        spent = _by_seed(results, NAMED[-1], method, epsilon, view, figure=_SPENT[view]).values()
        beyond = f", at epsilon {max(spent):.2f}" if spent and max(spent) > epsilon else ""
        yield claim, f">= {target:g}", shown(found) + beyond, verdict(found and found.mean >= target)
    for name in SIZES:
        found = difference(*(_by_seed(results, name, method, 8.0, "sum") for method in (AUTO, "head")))
        claim = f"{name}, sum, epsilon 8: {AUTO} less head"
        yield claim, "> 0", shown(found, sign=True), verdict(found and found.mean > 0)
    for name in NAMED:
        for epsilon in (1.0, 2.0, 8.0):
            if found := gap_of_rule(results, name, epsilon):
                claim = f"{name}, epsilon {epsilon:g}: the rule's learning rate less the best of seven"
                yield claim, ">= -0.01", found.text(sign=True), verdict(found.mean >= -0.01)
    for name in UNNAMED:
        for method in ("head", RECIPE):
            found = _gap_to_probe(results, name, method)
            claim = f"{name}, epsilon 8, {method} against the probe"
            yield claim, ">= -0.03", shown(found, sign=True), verdict(found and found.mean >= -0.03)


def _comparisons(results: Results) -> Iterator[tuple[str, float, Estimate | None]]:
    """Claims that one method is not worse than another, the least difference, and that measured."""
    for name in (*NAMED, *UNNAMED):
        for epsilon, view in product(_ORDER, ("local", "sum")):
            head = _by_seed(results, name, "head", epsilon, view)
            claim = f"{name}, epsilon {_epsilon(epsilon)}, {view}: "
            probes = _by_seed(results, name, PROBES, epsilon, view)
            yield f"{claim}head less averaged probes", 0.0, difference(head, probes)
            for method, least in ((RECIPE, 0.0), (AUTO, -0.002)):
                found = difference(_by_seed(results, name, method, epsilon, view), head)
                yield f"{claim}{method} less head", least, found
    yield "all runs of both: recipe less head", 0.0, _pooled(results, RECIPE)


def _pooled(results: Results, method: str) -> Estimate | None:
    """The method less the head alone over all runs of both, which say more of a small difference than three seeds."""
    pairs = [
        (_by_seed(results, name, method, epsilon, view), _by_seed(results, name, "head", epsilon, view))
        for name, epsilon, view in product(CORPORA, _ORDER, ("local", "sum"))
    ]
    return Estimate.of([ones[seed] - others[seed] for ones, others in pairs for seed in ones.keys() & others.keys()])


def _corpus(results: Results, name: str) -> str:
    rows = []
    views = {"local": ("head", RECIPE, AUTO, "paper", PROBES, CENTRAL), "sum": ("head", RECIPE, AUTO)}
    for view, methods in views.items():
        for method in methods:
            found = [_estimate(results, name, method, epsilon, view) for epsilon in _ORDER]
            if any(found):
                rows.append((method, "in the sum" if view == "sum" else view, *map(shown, found)))
    headers = ("method", "view", *(f"epsilon {_epsilon(epsilon)}" for epsilon in _ORDER))
    return f"## {name}\n\n{table(headers, rows)}\n\n{_baselines(results, name)}"


def _baselines(results: Results, name: str) -> str:
    figures = {"linear probe": "accuracy", "TF-IDF": "tfidf_accuracy", "largest class": "majority_accuracy"}
    found = {title: _estimate(results, name, BASELINES, None, figure=key) for title, key in figures.items()}
    known = [f"{title} {estimate.text()}" for title, estimate in found.items() if estimate]
    return f"Without privacy, on the pooled records: {', '.join(known)}." if known else "Baselines: not run."


def _budgets(results: Results) -> str:
    """The head's accuracy by its budget, and each step up from one budget to the next at which it falls for certain."""
    rows = []
    for name, view in product(BUDGET_CORPORA, ("local", "sum")):
        # Without noise nobody needs a sum.
        views = ["local" if epsilon is None else view for epsilon in BUDGETS]
        found = [_by_seed(results, name, "head", e, v) for e, v in zip(BUDGETS, views, strict=True)]
        steps = [difference(more, less) for less, more in pairwise(found)]
        falls = [
            f"{_epsilon(epsilon)}: {step.text(sign=True)}"
            for epsilon, step in zip(BUDGETS[1:], steps, strict=True)
            if step and step.mean + 2 * (step.standard_error or 0.0) < 0
        ]
        verdict_of_row = ", ".join(falls) or ("nowhere" if all(steps) else "not run")
        rows.append((name, view, *(shown(Estimate.of(each.values())) for each in found), verdict_of_row))
    budgets = table(("corpus", "view", *map(_epsilon, BUDGETS), "falls beyond two standard errors at"), rows)
    headers = ("corpus", "view, epsilon 8", "best round", "its mean accuracy", "the last round less that")
    return f"{budgets}\n\n{table(headers, _ends(results))}"


def _ends(results: Results) -> Iterator[Sequence[str]]:
    """How far each mean curve of accuracies ends below its best round."""
    for name, view in product(BUDGET_CORPORA, ("local", "sum")):
        cell = UtilityCell(corpus=name, method=CURVE, epsilon=8.0, view=view)
        curves = results.by_seed(cell, figure="accuracies")
        if not curves:
            yield name, view, "not run", "", ""
            continue
        best = max(range(len(curves[min(curves)])), key=lambda round_: sum(curve[round_] for curve in curves.values()))
        last = Estimate.of([curve[-1] - curve[best] for curve in curves.values()])
        mean = Estimate.of([curve[best] for curve in curves.values()])
        yield name, view, str(best), shown(mean), shown(last, sign=True)


def _many(results: Results) -> str:
    """The head alone and LoRA, by the number of records."""
    rows = []
    settings = [(name, "sum", 8.0) for name in SIZES] + [(NAMED[-1], view, epsilon) for view, epsilon, _ in _WITH_LORA]
    for name, view, epsilon in settings:
        head, *others = (_by_seed(results, name, method, epsilon, view) for method in ("head", AUTO, NARROW))
        less_head = [shown(difference(other, head), sign=True) for other in others]
        found = [shown(Estimate.of(each.values())) for each in (head, *others)]
        rows.append((name, view, f"{epsilon:g}", found[0], found[1], less_head[0], found[2], less_head[1]))
    headers = ("records", "view", "epsilon", "head", AUTO, "less head", NARROW, "less head")
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
    rows = []
    for name in NAMED:
        for epsilon in (1.0, 2.0, 8.0):
            found = [_estimate(results, name, method, epsilon) for method in RATES]
            if any(found):
                gap = gap_of_rule(results, name, epsilon)
                rows.append((name, f"{epsilon:g}", *map(shown, found), shown(gap, sign=True)))
    return table(("corpus", "epsilon", *(f"x {factor:g}" for factor in FACTORS), "rule less best"), rows)


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


def _kind(cell: UtilityCell) -> tuple[str, str, str]:
    return cell.corpus, "grid of rates" if cell.method in RATES else cell.method, cell.view


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

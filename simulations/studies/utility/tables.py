"""The page of the study: every table is made from the lines of its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from simulations.studies.utility.cells import (
    AUTO,
    BASELINES,
    CENTRAL,
    EPSILONS,
    FACTORS,
    INGREDIENTS,
    INNER,
    INNER_OF_TWO,
    NAMED,
    PROBES,
    RATES,
    RECIPE,
    UNNAMED,
    Cell,
    cells,
)
from simulations.studies.utility.corpora import CORPORA
from simulations.studies.utility.results import Estimate, Results, difference

# From much privacy to none.
_ORDER = sorted(EPSILONS, key=lambda epsilon: epsilon or float("inf"))

INTRODUCTION = """\
# What private models are worth

Beside what a user would do without a federation: a linear probe and TF-IDF on the pooled records, without privacy;
differential privacy on the pooled records of a central holder; and probes that every client trains alone with all of
its budget, averaged.

    python -m simulations.studies.utility run --data FOLDER
    python -m simulations.studies.utility tables

Every run is a line of [utility.jsonl](utility.jsonl), with its epsilons, noise and learning rate; its seconds are those
of a busy machine. MiniLM, delta 1e-5, five clients unless stated otherwise, every figure the mean over three seeds with
its standard error over seeds. One marked "one seed" has no such error: the accuracy itself then has one of 0.005
(SST-2) to 0.013 (embedded) from the number of test records. Embedded and SST-2 are tested on the same records with
every seed, so their standard errors leave out which records these are. Differences are taken seed by seed; one method
counts as not worse than another if it is not lower by more than one standard error of these. By the same noise and
split, that is far less than the accuracies' own errors. Cells that are missing are listed at the end.

A seed decides the split, which client has which record, and the noise. Each cell is a whole federation with noise,
ledger and accounting as in any run; noise comes from a seed, so that it can be repeated. The frozen base's features of
a record are computed once for all cells, since they depend on its tokens alone.

- *Corpora.* embedded: 4,000 messages of five hospitals, 1,000 others for testing. SST-2: the first 6,000 rows of
  `sst2_train` after a shuffle by the seed, or all 60,614; tested on the 6,735 of `sst2_dev`. MedQuAD by source: the
  eight types of question of `simulations/configs/medquad.toml`, nine sites, a fifth of all rows set aside for testing.
- *local*: epsilon against whoever sees a client's uploads. *in the sum*: against whoever sees only the sum of all
  (`secure_aggregation`, every client needed), so each client adds less noise.
- *head*: `train = "head"`. *recipe*: the default, which trains A, B and head. *auto*: `train = "auto"`. *auto, R
  alone*: the same with `aggregation = "fed-sb"`, rank 16 and alpha 64; *R of two layers* with `layers = "last-2"`
  besides. *paper*: `recipe = "dp-lora-paper"`.
- *central*: the head with one client that holds everything. *averaged probes*: 40 full-batch steps of every client's
  own head with noise for all of its epsilon, and one average weighted by N_k; their learning rate is the rule's for one
  client of the average size.
- *linear probe*: logistic regression on the pooled records' features, as the private head reads them but standardised;
  *TF-IDF*: the same on words and pairs of words; both with the penalty that cross-validation on the training records
  prefers, and on at most 20,000 records.
- Test sets chose nothing in this study: what compares in order to choose, the grid of learning rates, is tested on a
  fifth of the training records, set aside. But the prototypes behind the recipe's constants saw the test records of
  embedded, SST-2 and MedQuAD ([docs/recipes.md](../docs/recipes.md)); the corpora further below are free of that.
"""


def write(page: Path, runs: Path) -> None:
    """Write the page from the lines in the study's file of runs."""
    results = Results.read(runs)
    parts = [
        INTRODUCTION,
        "## Targets\n\n" + _table(("claim", "target", "measured", "met"), _targets(results)),
        *(_corpus(results, name) for name in NAMED),
        _ingredients(results),
        _rates(results),
        _unnamed(results),
        _missing(results),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(part.rstrip() + "\n" for part in parts))


def _targets(results: Results) -> Iterator[Sequence[str]]:
    for name in NAMED:
        for epsilon, target in CORPORA[name].targets:
            for method in ("head", RECIPE):
                found = results.estimate(name, method, epsilon)
                claim = f"{name}, local epsilon {epsilon:g}, {method}"
                yield claim, f"{target:g}", _text(found), _verdict(found and found.mean >= target)
    for claim, found in _comparisons(results):
        if found:  # within one standard error of the difference, which a single seed has none of
            met = found.mean + (found.standard_error or 0.0) >= 0
            yield claim, ">= 0", found.text(sign=True), _verdict(met)
    largest = NAMED[-1]
    found = difference(results.by_seed(largest, INNER_OF_TWO, 8.0), results.by_seed(largest, "head", 8.0))
    claim = f"{largest}, epsilon 8: LoRA ({INNER_OF_TWO}) less head"
    yield claim, ">= 0.01", _text(found, sign=True), _verdict(found and found.mean >= 0.01)
    for name in NAMED:
        for epsilon in (1.0, 2.0, 8.0):
            if found := gap_of_rule(results, name, epsilon):
                claim = f"{name}, epsilon {epsilon:g}: the rule's learning rate less the best of seven"
                yield claim, ">= -0.01", found.text(sign=True), _verdict(found.mean >= -0.01)
    for name in UNNAMED:
        for method in ("head", RECIPE):
            found = _gap_to_probe(results, name, method)
            claim = f"{name}, epsilon 8, {method} against the probe"
            yield claim, ">= -0.03", _text(found, sign=True), _verdict(found and found.mean >= -0.03)


def _comparisons(results: Results) -> Iterator[tuple[str, Estimate | None]]:
    """Claims that one method is not worse than another, and the difference."""
    for name in NAMED:
        for epsilon, view in product(_ORDER, ("local", "sum")):
            head = results.by_seed(name, "head", epsilon, view)
            claim = f"{name}, epsilon {_epsilon(epsilon)}, {view}: "
            yield claim + "head less averaged probes", difference(head, results.by_seed(name, PROBES, epsilon, view))
            for method in (RECIPE, AUTO, INNER, INNER_OF_TWO):
                found = difference(results.by_seed(name, method, epsilon, view), head)
                yield f"{claim}{method} less head", found
    yield "all runs of both: recipe less head", _pooled(results, RECIPE)


def _pooled(results: Results, method: str) -> Estimate | None:
    """The method less the head alone over all runs of both, which say more of a small difference than three seeds."""
    pairs = [
        (results.by_seed(name, method, epsilon, view), results.by_seed(name, "head", epsilon, view))
        for name, epsilon, view in product(CORPORA, _ORDER, ("local", "sum"))
    ]
    return Estimate.of([ones[seed] - others[seed] for ones, others in pairs for seed in ones.keys() & others.keys()])


def _corpus(results: Results, name: str) -> str:
    rows = []
    views = {"local": ("head", RECIPE, AUTO, INNER, INNER_OF_TWO, "paper", PROBES, CENTRAL), "sum": ("head", RECIPE)}
    for view, methods in views.items():
        for method in methods:
            found = [results.estimate(name, method, epsilon, view) for epsilon in _ORDER]
            if any(found):
                rows.append((method, "in the sum" if view == "sum" else view, *map(_text, found)))
    headers = ("method", "view", *(f"epsilon {_epsilon(epsilon)}" for epsilon in _ORDER))
    return f"## {name}\n\n{_table(headers, rows)}\n\n{_baselines(results, name)}"


def _baselines(results: Results, name: str) -> str:
    figures = {"linear probe": "accuracy", "TF-IDF": "tfidf_accuracy", "largest class": "majority_accuracy"}
    found = {title: results.estimate(name, BASELINES, None, figure=key) for title, key in figures.items()}
    known = [f"{title} {estimate.text()}" for title, estimate in found.items() if estimate]
    return f"Without privacy, on the pooled records: {', '.join(known)}." if known else "Baselines: not run."


def _ingredients(results: Results) -> str:
    whole = results.by_seed(NAMED[0], "head", 2.0)
    rows = [("the whole recipe, head alone", _text(Estimate.of(list(whole.values()))), "")]
    for method in INGREDIENTS:
        found = results.by_seed(NAMED[0], method, 2.0)
        if found:
            rows.append((method, _text(Estimate.of(list(found.values()))), _text(difference(found, whole), sign=True)))
    return (
        "## What each ingredient brings\n\nEmbedded, local epsilon 2, the head alone; differences seed by seed. The "
        "three local steps are taken in 13 rounds after the start, at the rule's rate for 39 steps.\n\n"
        + _table(("", "accuracy", "less the whole"), rows)
    )


def _rates(results: Results) -> str:
    rows = []
    for name in NAMED:
        for epsilon in (1.0, 2.0, 8.0):
            found = [results.estimate(name, method, epsilon) for method in RATES]
            if any(found):
                gap = gap_of_rule(results, name, epsilon)
                rows.append((name, f"{epsilon:g}", *map(_text, found), _text(gap, sign=True)))
    return (
        "## The learning-rate rule against a grid\n\nThe head alone, local view. Tested on a fifth of the training "
        "records. The last column is the rule's accuracy less the best of the seven means.\n\n"
        + _table(("corpus", "epsilon", *(f"x {factor:g}" for factor in FACTORS), "rule less best"), rows)
    )


def gap_of_rule(results: Results, name: str, epsilon: float) -> Estimate | None:
    """The rule's accuracy less that of the rate with the best mean, over the seeds that all rates were run with."""
    found = {method: results.by_seed(name, method, epsilon) for method in RATES}
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
            _text(results.estimate(name, "head", 8.0)),
            _text(results.estimate(name, RECIPE, 8.0)),
            *(
                _text(results.estimate(name, BASELINES, None, figure=figure))
                for figure in ("accuracy", "tfidf_accuracy", "majority_accuracy")
            ),
            _text(_gap_to_probe(results, name, "head"), sign=True),
        )
        for name in UNNAMED
    ]
    headers = ("corpus", "head", "recipe", "probe", "TF-IDF", "largest class", "head less probe")
    return (
        "## Corpora that chose nothing\n\nEpsilon 8, local, five clients iid, 6,000 rows by the seed of which a fifth "
        "is for testing. No constant of the recipe was chosen with them in view.\n\n" + _table(headers, rows)
    )


def _gap_to_probe(results: Results, name: str, method: str) -> Estimate | None:
    return difference(results.by_seed(name, method, 8.0), results.by_seed(name, BASELINES, None))


def _missing(results: Results) -> str:
    """How many of the runs that the study plans it does not have."""
    planned = Counter(_kind(cell) for cell in cells())
    done = Counter(_kind(cell) for cell in cells() if cell in results)
    rows = [(*kind, f"{count - done[kind]} of {count}") for kind, count in planned.items() if done[kind] < count]
    if not rows:
        return ""
    return "## What was not run\n\n" + _table(("corpus", "method", "view", "missing runs"), rows)


def _kind(cell: Cell) -> tuple[str, str, str]:
    return cell.corpus, "grid of rates" if cell.method in RATES else cell.method, cell.view


def _epsilon(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _text(found: Estimate | None, *, sign: bool = False) -> str:
    return found.text(sign=sign) if found else "not run"


def _verdict(met: bool | Estimate | None) -> str:
    return "not run" if met is None else "yes" if met else "**no**"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    if not body:
        return "Not run."
    return "\n".join(["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers), *body])

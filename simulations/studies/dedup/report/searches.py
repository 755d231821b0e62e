"""The searches on public validation (Tables 2, 4 and 5), model by model (Figure 4), and by bases (Figures 6 and 9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean

from simulations.studies.dedup.cells import MCTS_ITERATIONS
from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.results import (
    ROUNDING,
    DedupResults,
    accuracies,
    bounds,
    by_target,
    count,
    found,
    lost_on_test,
    own_ratio,
    section,
    span,
    targets,
    with_papers,
)
from simulations.studies.harness import Line, table

TABLE, BASES = "algorithms", "bases"
STRATEGIES = ("single", "multi", "cross")
RELAXED = ("A2", "A3", "B1", "B2", "B3")
OWN = ("C1", "C2", "C3", "C4")
SINGLY = ("A1", "A2", "A3", "A4", "A5")
"""The scenarios whose models are shown one by one."""

_IN_TABLE = ("greedy-20", "drd", "dred")
SHOWN_SINGLY = ("dedup-20", "mistique-20", *_IN_TABLE)
ORIGINAL, RETRAIN = "original", "retrain"

# Of section 5.2.2: C.R. and rise of the epsilons over those of one base.
_PAPER = {"multi": ("1 to 1.7", "1.0 to 3.5"), "cross": ("1 to 1.8", "1.7 to 4.3")}


def shown(results: DedupResults, among: Sequence[str]) -> list[str]:
    """The searches that a table has; of two numbers of blocks per validation the smaller one."""
    return [name for name in results.rows(TABLE, among) if not name.endswith("-30")]


def eight(results: DedupResults) -> str:
    """Every search over A1 to A5 and B1 to B3, with Table 2: means, sums and the largest drop."""
    here = results.having(TABLE, paper.EIGHT)
    if not here:
        return ""
    rows = []
    for name in shown(results, here):
        cells = [cell for scenario in here for cell in results.cells(scenario, TABLE, name)]
        known = [scenario for scenario in here if results.cells(scenario, TABLE, name)]
        papers = [paper.SEARCHES[name][scenario] for scenario in known] if name in paper.SEARCHES else []
        rows.append((f"`{name}`", _over(cells, papers), _in_bytes(cells), *lost_on_test(cells)))
    scenarios = count(len(here), "scenario")
    return section(
        "Search algorithms on public validation (Table 2)",
        f"Over {scenarios}: mean C.R. %, all validations (the paper's); targets that lost more than they may on the "
        "test records, which no search has seen.",
        table(_PUBLICLY, rows),
        "`-20`: blocks per validation. `drd` and `dred` choose L by the library's rule, and with `-published` stop as "
        f"the authors' code does. `mcts` ends after {MCTS_ITERATIONS} iterations. `all or nothing` replaces a whole "
        "model or nothing.",
        " ".join(_published(results, here, name) for name in ("drd", "dred")).strip(),
    )


def _over(cells: Sequence[Line], papers: Sequence[paper.Found]) -> str:
    """Mean C.R. % and the sum of validations, and the paper's after them in brackets."""
    ours = (100 * mean(run["block_ratio"] for run in cells), sum(run["num_validations"] for run in cells))
    theirs = (mean(ratio for ratio, _ in papers), sum(num for _, num in papers)) if papers else None
    return with_papers(ours, theirs)


def _published(results: DedupResults, here: Sequence[str], name: str) -> str:
    """The effect of the stopping rules in the authors' code; empty if they have not run."""
    pairs = [
        (theirs, ours)
        for scenario in here
        for theirs in [found(results.cells(scenario, TABLE, f"{name}-published"))]
        for ours in [found(results.cells(scenario, TABLE, name))]
        if theirs and ours
    ]
    if not pairs:
        return ""
    num = mean(theirs[1] / max(ours[1], 1) for theirs, ours in pairs)
    points = mean(theirs[0] - ours[0] for theirs, ours in pairs)
    return (
        f"`{name}-published` takes {num:.2f} times the validations of `{name}`, and its C.R. is {points:+.1f} points "
        "from it."
    )


_PUBLICLY = ("", "C.R. %, validations (the paper's)", "C.R. in bytes %", "mean drop, test", "beyond the bound, test")


def _in_bytes(cells: Sequence[Line]) -> str:
    """C.R. in bytes %, the mean."""
    return f"{100 * mean(run['bytes_ratio'] for run in cells):.1f}"


def fifty(results: DedupResults) -> str:
    """Every search on the fifty models, with Table 4."""
    rows = []
    for name in (each for each in shown(results, ["fifty"]) if each in paper.FIFTY):
        cells = results.cells("fifty", TABLE, name)
        ours = with_papers(found(cells), paper.FIFTY.get(name))
        rows.append((f"`{name}`", ours, lost_on_test(cells)[1]))
    if not rows:
        return ""
    num_models = len(results.table("fifty", TABLE)[0]["outcomes"])
    headers = (*_PUBLICLY[:2], _PUBLICLY[-1])
    return section(f"{num_models} models in one store (Table 4)", table(headers, rows), _untouched(results))


def _untouched(results: DedupResults) -> str:
    """Why models are no targets; two architectures here learn from the same images, the paper's from different ones."""
    reasons = Counter(outcome["untouched"] for outcome in results.table("fifty", TABLE)[0]["outcomes"])
    named = [f"{num} {reason}" for reason, num in reasons.items() if reason]
    return f"Not targets: {'; '.join(named)}." if named else ""


def heterogeneous(results: DedupResults) -> str:
    """Every search on the models of two architectures in one store, with Table 5."""
    runs = results.table("hetero", TABLE)
    if not runs:
        return ""
    givers = dict.fromkeys(f"`{base}`" for run in runs for outcome in targets(run) for base in outcome["bases"])
    rows = []
    for name in shown(results, ["hetero"]):
        run = results.cells("hetero", TABLE, name)[0]
        papers = paper.HETEROGENEOUS[name][-1] if name in paper.HETEROGENEOUS else None
        ratios = span((own_ratio(outcome) for outcome in targets(run)), 1)
        rows.append((f"`{name}`", with_papers(found([run]), papers), ratios, _within(run), *lost_on_test([run])))
    headers = (*_PUBLICLY[:2], "of single targets", "within both bounds", *_PUBLICLY[-2:])
    return section(
        "Different architectures in one store (Table 5)",
        f"Bases: {', '.join(givers)}. Within both bounds: epsilon, and accuracy on the validation records.",
        table(headers, rows),
    )


def _within(run: Line) -> str:
    """How many targets kept both of their bounds on the records of validation."""
    limits = bounds(run)
    lost = {name: before - after for name, (before, after) in run["accuracy"].get("validation", {}).items()}
    kept = [
        outcome["epsilon_after"] <= outcome["epsilon_before"] + limits[outcome["name"]][0] + ROUNDING
        and lost.get(outcome["name"], 0.0) <= limits[outcome["name"]][1] + ROUNDING
        for outcome in targets(run)
        if outcome["name"] in limits
    ]
    return f"{sum(kept)} of {len(kept)}"


def accuracies_on_test(results: DedupResults, scenario: str) -> Mapping[str, Mapping[str, float]]:
    """{search, `original` or `retrain`: {target: accuracy on test records}}; those that have not run are missing."""
    cells = {name: results.cells(scenario, TABLE, name) for name in SHOWN_SINGLY}
    measured = {name: accuracies(each, "test", after=True) for name, each in cells.items()}
    before = [accuracies(each, "test", after=False) for each in cells.values()]
    anew = {line["name"]: line["accuracy"]["test"] for line in results.retrained if line["scenario"] == scenario}
    all_of_them = {
        ORIGINAL: {name: value for each in before for name, value in each.items()},
        **measured,
        RETRAIN: anew,
    }
    return {name: values for name, values in all_of_them.items() if values}


def individual(results: DedupResults) -> str:
    """Accuracy and C.R. of the single models, as means, and ranges, over each scenario's targets."""
    here = [scenario for scenario in SINGLY if accuracies_on_test(results, scenario)]
    if not here:
        return ""
    measured = {scenario: accuracies_on_test(results, scenario) for scenario in here}
    rows = []
    for name in (ORIGINAL, *_IN_TABLE, RETRAIN):
        cells = []
        for scenario in here:
            values = measured[scenario].get(name, {})
            ratios = span(by_target(results.cells(scenario, TABLE, name)).values(), 0)
            cells.append((f"{mean(values.values()):.3f}" if values else "") + (f", {ratios}" if ratios else ""))
        rows.append((f"`{name}`", *cells))
    return section(
        "Single models (Figure 4)",
        "Mean accuracy of the targets on the test records, and their C.R. %. `retrain` is a model trained again with "
        "the epsilon that `drd` leaves the target, and not deduplicated.",
        table(("", *here), rows),
    )


def rise(run: Line) -> float:
    """By how much the epsilons of all variants rose together."""
    return float(sum(outcome["epsilon_after"] - outcome["epsilon_before"] for outcome in run["outcomes"]))


def relaxed(results: DedupResults) -> str:
    """Base selection with bounds that leave a choice, and what the text says of Figure 6."""
    rows = _rows(results, RELAXED)
    if not rows:
        return ""
    said = [sentence for name, theirs in _PAPER.items() if (sentence := _said(results, name, *theirs))]
    return section(
        "Base selection, `dred`, epsilon bounds relaxed to the sum of the first three epsilons (Figure 6)",
        _BASES,
        table(_HEADERS, rows),
        f"{'; '.join(said)}. The rise is compared where that of `single` is not zero." if said else "",
    )


def _said(results: DedupResults, strategy: str, papers_ratio: str, papers_rise: str) -> str:
    """C.R. and rise over those of `single`, as ranges over the scenarios; empty without cells."""
    pairs = [
        (run, single)
        for scenario in RELAXED
        for run in results.cells(scenario, BASES, strategy)
        for single in results.cells(scenario, BASES, "single")
    ]
    if not pairs:
        return ""
    ratios = span((run["block_ratio"] / single["block_ratio"] for run, single in pairs), 1)
    rises = span((rise(run) / rise(single) for run, single in pairs if rise(single) > 0), 1)
    return (
        f"`{strategy}`: C.R. {ratios} times that of `single` (the paper's: {papers_ratio}), rise of the epsilons "
        f"{rises + ' times' if rises else 'not comparable'} ({papers_rise})"
    )


def own(results: DedupResults) -> str:
    """Base selection on the subsets C1 to C4, with their own bounds."""
    rows = _rows(results, OWN)
    if not rows:
        return ""
    return section(
        "Base selection, `dred`, C1 to C4 with their own bounds (Figure 9)",
        _BASES,
        table(_HEADERS, rows),
    )


_BASES = "C.R. %, total rise of epsilons; number of targets."
_HEADERS = ("", "bound", *(f"`{strategy}`" for strategy in STRATEGIES))


def _rows(results: DedupResults, scenarios: Sequence[str]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for scenario in scenarios:
        found = {name: results.cells(scenario, BASES, name) for name in STRATEGIES}
        limits = [each[0]["cell"]["epsilon_bound"] for each in found.values() if each]
        if limits:
            bound = "own" if limits[0] is None else f"{limits[0]:g}"
            rows.append((scenario, bound, *(_strategy(cells) for cells in found.values())))
    return rows


def _strategy(cells: Sequence[Line]) -> str:
    """One way to choose bases in a scenario; empty if it has not run."""
    return "; ".join(f"{100 * run['block_ratio']:.1f}, {rise(run):.2f}; {len(targets(run))}" for run in cells)

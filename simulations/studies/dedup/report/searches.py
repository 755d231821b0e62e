"""The searches on public validation (Tables 2, 4 and 5), model by model (Figure 4), and by bases (Figures 6 and 9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean

from scipy.stats import binomtest

from fedpriv.models.dedup.validation import CONFIDENCE
from simulations.studies.dedup.cells import BY_RULE, MCTS_ITERATIONS
from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.results import (
    ROUNDING,
    DedupResults,
    accuracies,
    beyond,
    bounds,
    by_both,
    by_target,
    count,
    lost_on_test,
    section,
    span,
    targets,
    with_papers,
)
from simulations.studies.harness import Line, table

TABLE, BASES, CANDIDATES = "algorithms", "bases", "base"
STRATEGIES = ("single", "multi", "cross")
RELAXED = ("A2", "A3", "B1", "B2", "B3")
OWN = ("C1", "C2", "C3", "C4")
SINGLY = ("A1", "A2", "A3", "A4", "A5")
"""The scenarios whose models are shown one by one."""

SHOWN_SINGLY = ("dedup-20", "mistique-20", "greedy-20", "drd", "dred")
ORIGINAL, RETRAIN = "original", "retrain"

# Of section 5.2.2: C.R. and rise of the epsilons over those of one base.
_PAPER = {"multi": ("1 to 1.7", "1.0 to 3.5"), "cross": ("1 to 1.8", "1.7 to 4.3")}


def shown(results: DedupResults, among: Sequence[str]) -> list[str]:
    """The searches that a table has; of two numbers of blocks per validation the smaller one."""
    return [name for name in results.rows(TABLE, among) if not name.endswith("-30")]


def compared(results: DedupResults) -> str:
    """Every search over A1 to A5 and B1 to B3, on the fifty models and on two architectures: Tables 2, 4 and 5."""
    groups = [here for among in (paper.EIGHT, ("fifty",), ("hetero",)) if (here := results.having(TABLE, among))]
    names = dict.fromkeys(name for here in groups for name in shown(results, here))
    if not names:
        return ""
    rows = [(f"`{name}`", *(cell for here in groups for cell in _judged(results, here, name))) for name in names]
    titles = (here[0] if len(here) == 1 else count(len(here), "scenario") for here in groups)
    headers = [column for title in titles for column in (title, "beyond")]
    of_all = [[cell for name in names for each in here for cell in results.cells(each, TABLE, name)] for here in groups]
    rows.append(("all searches", *(cell for cells in of_all for cell in ("", lost_on_test(cells)[1]))))
    return section(
        "Search algorithms on public validation (Tables 2, 4 and 5)",
        "Mean C.R. %, all validations (the paper's). *Beyond*: targets that lost more than they may on the test "
        "records, which no search has seen.",
        table(("", *headers), rows),
        "`-20`: blocks per validation. `drd` and `dred` choose L by the library's rule, and with `-published` stop as "
        f"the authors' code does. `mcts` ends after {MCTS_ITERATIONS} iterations. `all or nothing` replaces a whole "
        "model or nothing.",
        _in_all([cell for cells in of_all for cell in cells]),
        _within(results.table("hetero", TABLE)),
    )


def by_scenario(results: DedupResults) -> str:
    """Table 2, cell by cell: by a proof, by the paper's rule, and the paper's."""
    tables, names = (TABLE, TABLE + BY_RULE), results.rows(TABLE + BY_RULE, paper.EIGHT)
    if not names:
        return ""
    both = [
        results.cells(scenario, each, name)
        for name in names
        for scenario in results.having(TABLE + BY_RULE, paper.EIGHT)
        if results.cells(scenario, TABLE + BY_RULE, name)
        for each in tables
    ]
    proven, by_rule = (lost_on_test([run for cells in both[first::2] for run in cells])[1] for first in (0, 1))
    papers = {(name, each): (paper.of_search(name, each) or (None,))[0] for name in names for each in paper.EIGHT}
    rows = [
        (f"`{name}`", *(by_both(results, each, TABLE, name, papers[name, each]) for each in paper.EIGHT))
        for name in names
    ]
    return section(
        "Table 2, scenario by scenario",
        "C.R. % by a proof / by the paper's rule, which proves nothing (the paper's).",
        table(("", *paper.EIGHT), rows),
        f"Where both were run, {by_rule} targets lose more than they may on the test records by the paper's rule, and "
        f"{proven} by a proof.",
    )


def _judged(results: DedupResults, here: Sequence[str], name: str) -> tuple[str, str]:
    """A search over the scenarios that have it, next to the paper's, and its targets beyond their bounds."""
    known = [scenario for scenario in here if results.cells(scenario, TABLE, name)]
    cells = [cell for scenario in known for cell in results.cells(scenario, TABLE, name)]
    papers = [found for scenario in known if (found := paper.of_search(name, scenario))]
    return (_over(cells, papers), lost_on_test(cells)[1]) if cells else ("", "")


def _in_all(cells: Iterable[Line]) -> str:
    """The targets of all searches that lost more than they may on the test records, and whether 5 % explain so many."""
    pairs = [beyond(cell, "test") for cell in cells]
    num, of = (sum(each) for each in zip(*pairs, strict=True))
    chance = binomtest(num, of, 1 - CONFIDENCE, alternative="greater").pvalue if of else 1.0
    share, admitted = 100 * num / max(of, 1), 100 * (1 - CONFIDENCE)
    return (
        f"All searches together leave {num} of {count(of, 'target')} ({share:.1f} %) beyond the bound on test records. "
        f"The proofs admit {admitted:.0f} %; were targets independent, so many or more would have a probability of "
        f"{chance:.2g}."
    )


def _over(cells: Sequence[Line], papers: Sequence[paper.Found]) -> str:
    """Mean C.R. % and the sum of validations, and the paper's after them in brackets."""
    ours = (100 * mean(run["block_ratio"] for run in cells), sum(run["num_validations"] for run in cells))
    theirs = (mean(ratio for ratio, _ in papers), sum(num for _, num in papers)) if papers else None
    return with_papers(ours, theirs)


def _within(runs: Sequence[Line]) -> str:
    """How many targets of two architectures kept both of their bounds on the records of validation."""
    kept = [each for run in runs for each in _kept(run)]
    told = "targets of hetero keep both bounds: epsilon, and accuracy on the validation records."
    return f"{sum(kept)} of {len(kept)} {told}" if kept else ""


def _kept(run: Line) -> list[bool]:
    limits = bounds(run)
    lost = {name: before - after for name, (before, after) in run["accuracy"].get("validation", {}).items()}
    return [
        outcome["epsilon_after"] <= outcome["epsilon_before"] + limits[outcome["name"]][0] + ROUNDING
        and lost.get(outcome["name"], 0.0) <= limits[outcome["name"]][1] + ROUNDING
        for outcome in targets(run)
        if outcome["name"] in limits
    ]


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
    for name in (ORIGINAL, "drd", RETRAIN):
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


def by_bases(results: DedupResults) -> str:
    """The three ways to choose bases, and what the text says of Figure 6."""
    return (
        section(
            "Base selection, `dred` (Figures 6 and 9)",
            "C.R. and rise of the epsilons over those of `single`; the rise where that of `single` is not zero.",
            "\n".join(_compared(results)),
            _by_candidate(results),
        )
        if results.having(BASES)
        else ""
    )


def _compared(results: DedupResults) -> Iterator[str]:
    relaxed = "Epsilon bounds relaxed to the sum of the first three epsilons (Figure 6)"
    unprinted: dict[str, tuple[str, str]] = {}
    by_rule = f"The same by the paper's rule, {', '.join(results.having(BASES + BY_RULE, RELAXED))} alone"
    for told, scenarios, place, papers in (
        (relaxed, RELAXED, BASES, _PAPER),
        (by_rule, RELAXED, BASES + BY_RULE, unprinted),
        ("C1 to C4 with their own bounds (Figure 9)", OWN, BASES, unprinted),
    ):
        said = [_said(results, scenarios, place, name, *papers.get(name, ("", ""))) for name in _PAPER]
        if any(said):
            yield f"- {told}: {'; '.join(filter(None, said))}."


def _by_candidate(results: DedupResults) -> str:
    """Figure 9: every candidate alone as the base of all, and what base selection finds among the models."""
    rows = []
    for name in results.having(CANDIDATES, OWN):
        names = dict.fromkeys(cell["cell"]["row"] for cell in results.table(name, CANDIDATES))
        rows += [(name, f"`{each}`", by_both(results, name, CANDIDATES, each)) for each in names]
        rows.append((name, "one of its own", by_both(results, name, BASES, "single")))
    headers = ("Figure 9", "base of all others", "C.R. % by a proof / by the paper's rule")
    return table(headers, rows) if rows else ""


def _said(
    results: DedupResults, scenarios: Sequence[str], place: str, strategy: str, ratio: str = "", rises_by: str = ""
) -> str:
    """C.R. and rise over those of `single`, as ranges over the scenarios, and the paper's; empty without cells."""
    pairs = [
        (run, single)
        for scenario in scenarios
        for run in results.cells(scenario, place, strategy)
        for single in results.cells(scenario, place, "single")
    ]
    if not pairs:
        return ""
    ratios = span((run["block_ratio"] / single["block_ratio"] for run, single in pairs), 1)
    rises = span((rise(run) / rise(single) for run, single in pairs if rise(single) > 0), 1)
    papers = (f" (the paper's: {ratio})", f" ({rises_by})") if ratio else ("", "")
    return f"`{strategy}`: C.R. {ratios}{papers[0]}, rise {rises or 'not comparable'}{papers[1]}"

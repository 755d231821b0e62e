"""Which models give blocks to which: Figures 6 and 9."""

from __future__ import annotations

from collections.abc import Sequence

from simulations.studies.dedup.report.markdown import number, section, span, table
from simulations.studies.dedup.report.results import DedupResults, Line, largest_drop, targets

TABLE = "bases"
STRATEGIES = ("single", "multi", "cross")
RELAXED = ("A2", "A3", "B1", "B2", "B3")
OWN = ("C1", "C2", "C3", "C4")

# Of section 5.2.2: C.R. and rise of the epsilons over those of one base.
_PAPER = {"multi": ("1 to 1.7", "1.0 to 3.5"), "cross": ("1 to 1.8", "1.7 to 4.3")}


def rise(run: Line) -> float:
    """By how much the epsilons of all variants rose together."""
    return float(sum(outcome["epsilon_after"] - outcome["epsilon_before"] for outcome in run["outcomes"]))


def relaxed(results: DedupResults) -> str:
    """Base selection with bounds that leave a choice, beside what the text says of Figure 6."""
    rows = _rows(results, RELAXED)
    if not rows:
        return ""
    said = [sentence for name, theirs in _PAPER.items() if (sentence := _said(results, name, *theirs))]
    return section(
        "Base selection, `dred`, epsilon bounds relaxed to the sum of the first three epsilons (Figure 6)",
        table(_HEADERS, rows),
        f"{'; '.join(said)}. The rise is compared where that of `single` is not zero." if said else "",
    )


def _said(results: DedupResults, strategy: str, papers_ratio: str, papers_rise: str) -> str:
    """C.R. and rise over those of `single`, as ranges over the scenarios; empty without cells."""
    pairs = [
        (run, single)
        for scenario in RELAXED
        for run in results.cells(scenario, TABLE, strategy)
        for single in results.cells(scenario, TABLE, "single")
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
        table(_HEADERS, rows),
        "Of the paper's plots, only the comparison of one base with several is redrawn; the others force bases that "
        "base selection would not choose.",
    )


_HEADERS = (
    "", "strategy", "bound", "targets", "C.R. %", "validations", "largest drop", "total rise of epsilons",
)  # fmt: skip


def _rows(results: DedupResults, scenarios: Sequence[str]) -> list[Sequence[object]]:
    return [
        (
            scenario,
            f"`{strategy}`",
            "own" if run["cell"]["epsilon_bound"] is None else f"{run['cell']['epsilon_bound']:g}",
            len(targets(run)),
            f"{100 * run['block_ratio']:.1f}",
            run["num_validations"],
            number(largest_drop([run]), 4),
            f"{rise(run):.2f}",
        )
        for scenario in scenarios
        for strategy in STRATEGIES
        for run in results.cells(scenario, TABLE, strategy)
    ]

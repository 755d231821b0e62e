"""The MiniLM cluster, and private validation: Table 3."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from simulations.studies.dedup.cells import CUTOFF, IN_STEPS
from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.results import (
    DedupResults,
    accuracies,
    beyond,
    by_target,
    found,
    largest_drop,
    lost_on_test,
    members,
    number,
    section,
    targets,
    with_papers,
)
from simulations.studies.harness import Line, table

PUBLIC, PRIVATE = "algorithms", "private validation"
SEARCH = "dred"
"""The public search that stands beside private validation."""


def minilm(results: DedupResults) -> str:
    """The MiniLM cluster: what each search does to its targets."""
    names: dict[str, list[str]] = {}  # searches with the same figures share a line
    for place, suffix in ((PUBLIC, ""), (PRIVATE, ", private")):
        for name in results.rows(place, ["minilm"]):
            if not name.endswith("-30") and (cells := results.cells("minilm", place, name)):
                names.setdefault(_minilm_figures(cells), []).append(f"`{name}`{suffix}")
    if not names:
        return ""
    return section(
        "A pretrained transformer: the MiniLM cluster",
        "Means over targets, and over the seeds of private validation, on test records.",
        "\n".join(f"- {', '.join(alike)}: {figures}." for figures, alike in names.items()),
    )


def _minilm_figures(cells: Sequence[Line]) -> str:
    before, after = (accuracies(cells, "test", after=after).values() for after in (False, True))
    rises = [outcome["epsilon_after"] - outcome["epsilon_before"] for run in cells for outcome in targets(run)]
    if not before or not rises:
        return "nothing measured"
    drop, ratios = number(largest_drop(cells, "test"), 4), by_target(cells).values()
    return (
        f"C.R. {100 * mean(run['block_ratio'] for run in cells):.1f} %, the best target keeps {min(ratios):.2f} % of "
        f"its blocks, accuracy {mean(before):.4f} before and {mean(after):.4f} after, largest drop {drop}, beyond the "
        f"bound {lost_on_test(cells)[1]}, largest rise of epsilon {max(rises):.2f}"
    )


def private(results: DedupResults) -> str:
    """Table 3: what can be proven on private records, in the scenarios where that is anything."""
    here = results.having(PRIVATE)
    if not here:
        return ""
    cells = {scenario: results.cells(scenario, PRIVATE, IN_STEPS) for scenario in here}
    proven = [scenario for scenario in here if any(targets(run) for run in cells[scenario])]
    nothing = ", ".join(scenario for scenario in here if scenario not in proven)
    headers = ("", "epsilon of a validation", "C.R. %, validations (the paper's)", "largest drop", "bound held")
    return section(
        "Private validation by the Sparse Vector Technique (Table 3)",
        "Means over the seeds of the noise, cut-off 1: what can be proven is taken in steps, and no search is paid "
        f"for. The paper's figures are those of `{SEARCH}` at the sum of base and target. Here validation counts "
        "towards the target's bound, and saliency is measured on public records.",
        table(headers, [_row(scenario, cells[scenario]) for scenario in proven]) if proven else "",
        f"In {nothing} so few records can prove nothing at the scenario's epsilon, and all models stay as they are."
        if nothing
        else "",
    )


def sparse(results: DedupResults) -> str:
    """Algorithm 5: Table 3 by the searches that it stands in, and Table 8."""
    here = results.having("sparse vector")
    if not here:
        return ""
    rows = [
        (f"`{row}`", *(with_papers(found(results.cells(s, "sparse vector", row)), theirs.get(s)) for s in here))
        for row, theirs in paper.SPARSE.items()
    ]
    cells = [run for name in here for run in results.table(name, "sparse vector")]
    cutoffs = [
        (c, *(with_papers(found(results.cells(s, "cutoff", c)), theirs) for s in results.having("cutoff")))
        for c, theirs in paper.CUTOFFS.items()
    ]
    return section(
        "Algorithm 5: the Sparse Vector Technique within a search (Tables 3 and 8)",
        f"C.R. %, validations (the paper's), means over the seeds of noise, cut-off {CUTOFF}, unproven. Each target "
        "spends the scenario's epsilon of a validation, less than the paper's sum of base and target.",
        table(("", *here), rows),
        f"{lost_on_test(cells)[1]} targets lose more than they may on the test records. By cut-off, `dred`:",
        table(("c", *results.having("cutoff")), cutoffs) if results.having("cutoff") else "",
    )


def _row(scenario: str, cells: Sequence[Line]) -> tuple[str, ...]:
    pairs = [beyond(run, "validation") for run in cells]
    num = sum(of for _, of in pairs)
    return (
        scenario,
        ", ".join(f"{each.validation_epsilon:g}" for each in members(scenario)),
        with_papers(found(cells), paper.PRIVATE.get(scenario)),
        number(largest_drop(cells), 3),
        f"{num - sum(beyond for beyond, _ in pairs)} of {num}",
    )

"""The MiniLM cluster, and private validation: Table 3 and Figure 7."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from simulations.studies.dedup.cells import IN_STEPS
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
BY_MODEL = ("B2", "B3")
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
    drop = number(largest_drop(cells, "test"), 4)
    return (
        f"accuracy {mean(before):.4f} before and {mean(after):.4f} after, largest drop {drop}, beyond the bound "
        f"{lost_on_test(cells)[1]}, largest rise of epsilon {max(rises):.2f}"
    )


def private(results: DedupResults) -> str:
    """The searches on private records, with Table 3."""
    here = results.having(PRIVATE)
    if not here:
        return ""
    cells = {scenario: results.cells(scenario, PRIVATE, IN_STEPS) for scenario in here}
    row = ("in steps", *(_cell(cells[each], paper.PRIVATE.get(each)) for each in here))
    epsilons = ", ".join(
        f"{name} {scenario.validation_epsilon:g}" for name in here for scenario in members(name) if name != "fifty"
    )
    seeds = ", ".join(f"{name} {len(cells[name])}" for name in here)
    return section(
        "Private validation by the Sparse Vector Technique (Table 3)",
        f"C.R. %, number of validations (the paper's `{SEARCH}`), means over the seeds of the noise ({seeds}); "
        "largest drop of all; number of targets for which the utility bound really held. Cut-off 1: what can be proven "
        "is taken in steps, and no search is paid for. Epsilon of one target's "
        f"validation: {epsilons}. The paper's is the sum of base and target; here validation counts towards the "
        "target's bound. Saliency is measured on public records, at no cost.",
        table(("", *here), [row]),
    )


def _cell(cells: Sequence[Line], papers: paper.Found | None) -> str:
    if not cells:
        return ""
    pairs = [beyond(run, "validation") for run in cells]
    num = sum(of for _, of in pairs)
    within = f"{num - sum(beyond for beyond, _ in pairs)} of {num}"
    return "; ".join((with_papers(found(cells), papers), number(largest_drop(cells), 3), within))


def change(results: DedupResults) -> list[float]:
    """Points by which private validation makes the C.R. of each target of B2 and B3 worse."""
    points = []
    for scenario in BY_MODEL:
        public = by_target(results.cells(scenario, PUBLIC, SEARCH))
        privately = by_target(results.cells(scenario, PRIVATE, IN_STEPS))
        points += [privately[target] - public[target] for target in public if target in privately]
    return points


def by_model(results: DedupResults) -> str:
    """Figure 7: what private validation changes for each model."""
    if not (points := change(results)):
        return ""
    return section(
        "Private validation, model by model (Figure 7)",
        f"Against `{SEARCH}` on public records the C.R. of a model changes by {min(points):+.1f} to {max(points):+.1f} "
        "points (means over the seeds; plus is worse). The paper says: up to 16.7 points worse, up to 3.2 better.",
    )

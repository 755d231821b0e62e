"""Private validation by the Sparse Vector Technique: Tables 3 and 8 and Figure 7."""

from __future__ import annotations

from collections.abc import Sequence

from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.markdown import beside, number, section, table
from simulations.studies.dedup.report.results import DedupResults, Line, beyond, by_target, found, largest_drop, members

TABLE = "private validation"
BY_MODEL = ("B2", "B3")
DYNAMIC = ("drd", "dred")


def private(results: DedupResults) -> str:
    """The searches on private records beside Table 3."""
    here = results.having(TABLE)
    if not here:
        return ""
    rows = []
    for name in results.rows(TABLE):
        papers = paper.PRIVATE.get(name, {})
        cells = {scenario: results.cells(scenario, TABLE, name) for scenario in here}
        rows.append((f"`{name}`", *(_cell(cells[each], papers.get(each)) for each in here)))
    epsilons = ", ".join(
        f"{name} {scenario.validation_epsilon:g}" for name in here for scenario in members(name) if name != "fifty"
    )
    nums = {name: max(len(results.cells(name, TABLE, row)) for row in results.rows(TABLE)) for name in here}
    seeds = ", ".join(f"{name} {num}" for name, num in nums.items())
    return section(
        "Private validation by the Sparse Vector Technique (Table 3)",
        f"C.R. %, number of validations (the paper's), means over the seeds of the noise ({seeds}); largest drop of "
        "all; number of targets for which the utility bound really held. Cut-off 3. Epsilon of one target's "
        f"validation: {epsilons}. The paper's is the sum of base and target; here validation counts towards the "
        "target's bound. Saliency is measured on public records, at no cost.",
        table(("", *here), rows),
    )


def _cell(cells: Sequence[Line], papers: paper.Found | None) -> str:
    if not cells:
        return ""
    pairs = [beyond(run, "validation") for run in cells]
    num = sum(of for _, of in pairs)
    within = f"{num - sum(beyond for beyond, _ in pairs)} of {num}"
    return "; ".join((beside(found(cells), papers), number(largest_drop(cells), 3), within))


def change(results: DedupResults, name: str) -> list[float]:
    """Points by which private validation makes the C.R. of each target of B2 and B3 worse, for one search."""
    points = []
    for scenario in BY_MODEL:
        public = by_target(results.cells(scenario, "algorithms", name))
        privately = by_target(results.cells(scenario, TABLE, name))
        points += [privately[target] - public[target] for target in public if target in privately]
    return points


def by_model(results: DedupResults) -> str:
    """Figure 7: what private validation changes for each model."""
    points = {name: change(results, name) for name in DYNAMIC}
    said = [f"`{name}` by {min(values):+.1f} to {max(values):+.1f} points" for name, values in points.items() if values]
    if not said:
        return ""
    return section(
        "Private validation, model by model (Figure 7)",
        f"Against public validation the C.R. of a model changes with {' and with '.join(said)} (means over the seeds; "
        "plus is worse). The paper says: up to 16.7 points worse, up to 3.2 better.",
    )


def cutoffs(results: DedupResults) -> str:
    """The cut-off on A4 beside Table 8."""
    rows = []
    for cutoff, (ratio, num, drop) in paper.CUTOFFS.items():
        cells = results.cells("A4", "cut-off", cutoff)
        if cells:
            worst = f"{number(largest_drop(cells), 4)} ({drop:.4f})"
            rows.append((cutoff, beside(found(cells), (ratio, num)), worst))
    if not rows:
        return ""
    return section(
        "Cut-off of private validation, A4, `dred` (Table 8)",
        table(("cut-off", "C.R. %, validations (the paper's)", "largest drop of any seed (the paper's)"), rows),
    )

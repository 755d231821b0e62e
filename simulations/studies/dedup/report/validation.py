"""Accuracy on records that no search has seen, and private validation: Table 3 and Figure 7."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from simulations.studies.dedup.cells import IN_STEPS
from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.paper import EIGHT
from simulations.studies.dedup.report.results import (
    DedupResults,
    accuracies,
    beyond,
    bounds,
    by_target,
    drops,
    found,
    largest_drop,
    members,
    number,
    section,
    with_papers,
)
from simulations.studies.harness import Line, table

PUBLIC, PRIVATE = "algorithms", "private validation"
BY_MODEL = ("B2", "B3")
SEARCH = "dred"
"""The public search that stands beside private validation."""


def unseen(results: DedupResults) -> str:
    """Drops on validation and test records, and how many targets exceed their bound on the latter."""
    here = results.having(PUBLIC, (*EIGHT, "minilm", "hetero"))
    if not here:
        return ""
    rows, totals = [], []
    for name in results.rows(PUBLIC, here):
        cells = {scenario: results.cells(scenario, PUBLIC, name) for scenario in here}
        rows.append((f"`{name}`", *(_drops(cells[scenario]) for scenario in here)))
        pairs = [beyond(run, "test") for each in cells.values() for run in each]
        totals.append(f"`{name}` {sum(num for num, _ in pairs)} of {sum(of for _, of in pairs)}")
    return section(
        "The drop on records that no search has seen",
        "Mean drop of the targets on the validation records, on the test records, and how many targets exceed their "
        "bound on the latter. What is proven holds for records in general, with 95 % for each target.",
        table(("", *here), rows),
        f"Over these scenarios: {', '.join(totals)}.",
    )


def _drops(cells: list[Line]) -> str:
    if not cells or not drops(cells[0], "test"):
        return ""
    num, of = beyond(cells[0], "test")
    means = [mean(values) for split in ("validation", "test") if (values := list(drops(cells[0], split).values()))]
    return ", ".join([*(f"{value:.4f}" for value in means), f"{num} of {of}"])


def minilm(results: DedupResults) -> str:
    """Each target of the MiniLM cluster, before and after, on validation and on test records."""
    rows, counts = [], []
    for place, suffix in ((PUBLIC, ""), (PRIVATE, ", private")):
        for name in results.rows(place, ["minilm"]):
            cells = results.cells("minilm", place, name)
            rows += _by_target(results, cells, f"`{name}`{suffix}")
            pairs = [beyond(run, "test") for run in cells]
            counts.append(f"`{name}`{suffix} {sum(num for num, _ in pairs)} of {sum(of for _, of in pairs)}")
    if not rows:
        return ""
    headers = (
        "", "epsilon of the target", "after", "accuracy, validation", "after", "accuracy, test", "after",
        "drop, test", "bound",
    )  # fmt: skip
    return section(
        "A pretrained transformer: the MiniLM cluster, before and after",
        "Its last two layers and head, trained under DP. Means over the seeds of private validation, where it is "
        f"private. Targets beyond their bound on the test records: {'; '.join(counts)}.",
        table(headers, rows),
    )


def _by_target(results: DedupResults, cells: list[Line], label: str) -> list[tuple[str, ...]]:
    keys = [(split, after) for split in ("validation", "test") for after in (False, True)]
    measured = {(split, after): accuracies(cells, split, after=after) for split, after in keys}
    rows = []
    for outcome in (outcome for outcome in cells[0]["outcomes"] if outcome["name"] in measured["test", False]):
        name = outcome["name"]
        shown = [f"{each[name]:.4f}" if name in each else "" for each in measured.values()]
        drop = measured["test", False][name] - measured["test", True][name]
        limit = bounds(cells[0]).get(name)
        rows.append(
            (label, f"{outcome['epsilon_before']:.3g}", f"{outcome['epsilon_after']:.3g}", *shown, f"{drop:+.4f}",
             f"{limit[1]:g}" if limit else "")
        )  # fmt: skip
    return rows


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

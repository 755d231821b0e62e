"""Accuracy on records that no search has seen, and the cluster of MiniLM on its own."""

from __future__ import annotations

from statistics import mean

from simulations.studies.dedup.report.markdown import section, table
from simulations.studies.dedup.report.paper import EIGHT
from simulations.studies.dedup.report.results import DedupResults, Line, accuracies, beyond, bounds, drops

_TABLES = {"algorithms": "", "private validation": ", private"}


def unseen(results: DedupResults) -> str:
    """Drops on validation and test records, and how many targets exceed their bound on the latter."""
    here = results.having("algorithms", (*EIGHT, "minilm", "hetero"))
    if not here:
        return ""
    rows, totals = [], []
    for name in results.rows("algorithms", here):
        cells = {scenario: results.cells(scenario, "algorithms", name) for scenario in here}
        rows.append((f"`{name}`", *(_drops(cells[scenario]) for scenario in here)))
        pairs = [beyond(run, "test") for each in cells.values() for run in each]
        totals.append(f"`{name}` {sum(num for num, _ in pairs)} of {sum(of for _, of in pairs)}")
    return section(
        "The drop on records that no search has seen",
        "Mean drop of the targets on the validation records, on the test records, and how many targets exceed their "
        "bound on the latter. The bound is guaranteed for the validation records only.",
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
    for place, suffix in _TABLES.items():
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

"""The costs of deduplicated variants, the independent check, and running times."""

from __future__ import annotations

from collections.abc import Mapping

from simulations.studies.dedup.report.markdown import count, section, span, table
from simulations.studies.dedup.report.results import ROUNDING, DedupResults, bounds, targets

METHODS = ("basic", "accountant", "provenance")


def epsilons(results: DedupResults) -> str:
    """The largest rise of an epsilon under each composition, scenario by scenario."""
    rows, num_beyond, num, apart = [], 0, 0, 0.0
    for scenario in results.having("algorithms"):
        for run in results.cells(scenario, "algorithms", "drd"):
            chosen = targets(run)
            rises = {name: [o["epsilons"][name] - o["epsilon_before"] for o in chosen] for name in METHODS}
            limits = bounds(run)
            over = sum(
                rise > limits[outcome["name"]][0] + ROUNDING
                for outcome, rise in zip(chosen, rises["basic"], strict=True)
                if outcome["name"] in limits
            )
            apart = max([apart, *(abs(o["epsilons"]["accountant"] - o["epsilons"]["provenance"]) for o in chosen)])
            num_beyond, num = num_beyond + over, num + len(chosen)
            if chosen:
                before = span((outcome["epsilon_before"] for outcome in chosen), 2)
                largest = (f"{max(rises[name]):.3f}" for name in METHODS)
                allowed = span((limit for limit, _ in limits.values()), 2)
                rows.append((scenario, len(chosen), before, *largest, allowed, f"{over} of {len(chosen)}"))
    if not rows:
        return ""
    headers = ("", "targets", "epsilons before", *(f"`{name}`" for name in METHODS), "bound", "beyond it by `basic`")
    return section(
        "What deduplicated variants cost, `drd`",
        "Largest rise of a target's epsilon, by each composition at one delta.",
        table(headers, rows),
        f"By `basic`, which splits one delta among the models, {num_beyond} of {count(num, 'target')} would exceed "
        f"their bounds. `accountant` and `provenance` differ by at most {apart:.3f}.",
    )


def checked(results: DedupResults) -> str:
    """The result of the independent check."""
    found = results.checked
    return section(
        "Independent check",
        "`check` reassembles every variant from the store's rows, compares each block with those of the target and its "
        "bases, counts correct answers in a loop of its own, and composes the uploads named in the descriptions by "
        "dp-accounting's `PLDAccountant`. "
        + (
            f"{count(found['stores'], 'store')}, {count(found['violations'], 'violation')}; of "
            f"{count(found['private_targets'], 'target')} that were validated privately, {found['private_beyond']} "
            "exceed their utility bound, which private validation guarantees only up to its noise."
            if found
            else "It has not run yet."
        ),
    )


def times(results: DedupResults) -> str:
    """Seconds of training and of every kind of cell."""
    by_table: dict[str, tuple[int, float]] = {}
    for run in results.runs:
        num, seconds = by_table.get(run["cell"]["table"], (0, 0.0))
        by_table[run["cell"]["table"]] = num + 1, seconds + run["seconds"]
    trained = {"models": results.models.values(), "models trained anew": results.retrained}
    rows: list[tuple[object, ...]] = [
        (what, len(lines), f"{sum(line['seconds'] for line in lines):.0f}") for what, lines in trained.items() if lines
    ]
    rows += [(f"cells: {name}", num, f"{seconds:.0f}") for name, (num, seconds) in by_table.items()]
    return section(
        "Running times",
        f"Seconds of one thread each, {_total(rows):.0f} in all.",
        table(("", "number", "seconds"), rows),
        _per_validation(results),
    )


def _total(rows: list[tuple[object, ...]]) -> float:
    return sum(float(str(row[-1])) for row in rows)


def _per_validation(results: DedupResults) -> str:
    """Seconds per validation, scenario by scenario: what a search saves."""
    spent: Mapping[str, tuple[float, int]] = {
        scenario: (sum(run["seconds"] for run in runs), sum(run["num_validations"] for run in runs))
        for scenario in results.having("algorithms")
        for runs in [results.table(scenario, "algorithms")]
    }
    shown = [f"{name} {seconds / num:.2f}" for name, (seconds, num) in spent.items() if num]
    papers = "The paper names 58 to 86 s for one, on a GPU."
    return f"Seconds per validation, all else included: {', '.join(shown)}. {papers}" if shown else ""

"""Models of A1 to A5 one by one, beside their originals and models trained anew (Figure 4)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from simulations.studies.dedup.report.markdown import section, span, table
from simulations.studies.dedup.report.results import DedupResults, accuracies, by_target

SCENARIOS = ("A1", "A2", "A3", "A4", "A5")
SEARCHES = ("dedup-20", "mistique-20", "greedy-20", "drd", "dred")
ORIGINAL, RETRAIN = "original", "retrain"


def accuracies_on_test(results: DedupResults, scenario: str) -> Mapping[str, Mapping[str, float]]:
    """{search, `original` or `retrain`: {target: accuracy on test records}}; those that have not run are missing."""
    cells = {name: results.cells(scenario, "algorithms", name) for name in SEARCHES}
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
    here = [scenario for scenario in SCENARIOS if accuracies_on_test(results, scenario)]
    if not here:
        return ""
    measured = {scenario: accuracies_on_test(results, scenario) for scenario in here}
    rows = []
    for name in (ORIGINAL, *SEARCHES, RETRAIN):
        cells = []
        for scenario in here:
            values = measured[scenario].get(name, {})
            ratios = span(by_target(results.cells(scenario, "algorithms", name)).values(), 0)
            cells.append((f"{mean(values.values()):.3f}" if values else "") + (f", {ratios}" if ratios else ""))
        rows.append((f"`{name}`", *cells))
    return section(
        "Single models (Figure 4)",
        "Mean accuracy of the targets on the test records, and C.R. % of the targets. `retrain` is a model trained "
        "anew with the epsilon that `drd` leaves the target, and not deduplicated: what could be had at this epsilon.",
        table(("", *here), rows),
    )

"""The searches on public validation: Tables 2, 4 and 5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean

from fedpriv.dedup import MINHASH_STEP
from simulations.studies.dedup.cells import MCTS_ITERATIONS
from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.markdown import beside, count, number, section, table
from simulations.studies.dedup.report.results import (
    ROUNDING,
    DedupResults,
    Line,
    beyond,
    bounds,
    found,
    largest_drop,
    own_ratio,
    targets,
)

TABLE = "algorithms"


def eight(results: DedupResults) -> str:
    """Every search on A1 to A5 and B1 to B3 beside Table 2."""
    here = results.having(TABLE, paper.EIGHT)
    if not here:
        return ""
    rows, further = [], []
    for name in results.rows(TABLE, here):
        cells = {scenario: results.cells(scenario, TABLE, name) for scenario in here}
        papers = paper.SEARCHES.get(name, {})
        rows.append((f"`{name}`", *(beside(found(cells[each]), papers.get(each)) for each in here)))
        further.append((f"`{name}`", *(_further(cells[each]) for each in here)))
    return section(
        "Search algorithms on public validation (Table 2)",
        "C.R. %, number of validations (the paper's).",
        table(("", *here), rows),
        "`-20` and `-30` are blocks per validation; `drd` and `dred` choose L by the library's rule, and with "
        "`-published` stop as the authors' code does. `all or nothing` replaces a whole model by its base or leaves it "
        f"as it is. `mcts` ends after {MCTS_ITERATIONS} iterations; `mistique` treats weights as equal that round to "
        f"the same multiple of {MINHASH_STEP:g} standard deviations of a model's weights. C.R. in bytes %, and the "
        "largest drop of accuracy on the validation records:",
        table(("", *here), further),
        " ".join(_published(results, here, name) for name in ("drd", "dred")).strip(),
    )


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
        f"from it (means over {count(len(pairs), 'scenario')}; minus is better)."
    )


def _further(cells: Sequence[Line]) -> str:
    if not cells:
        return ""
    drop = number(largest_drop(cells), 4)
    return f"{100 * cells[0]['bytes_ratio']:.1f}" + (f", {drop}" if drop else "")


def fifty(results: DedupResults) -> str:
    """Every search on the fifty models beside Table 4."""
    rows = []
    for name in results.rows(TABLE, ["fifty"]):
        cells = results.cells("fifty", TABLE, name)
        rows.append((f"`{name}`", beside(found(cells), paper.FIFTY.get(name)), _further(cells), _beyond(cells[0])))
    if not rows:
        return ""
    num_models = len(results.table("fifty", TABLE)[0]["outcomes"])
    headers = (
        "",
        "C.R. %, validations (the paper's)",
        "C.R. in bytes %, largest drop",
        "beyond the bound, test records",
    )
    return section(f"{num_models} models in one store (Table 4)", table(headers, rows), _untouched(results))


def _untouched(results: DedupResults) -> str:
    """Why models are no targets; two architectures here learn from the same images, the paper's from different ones."""
    reasons = Counter(outcome["untouched"] for outcome in results.table("fifty", TABLE)[0]["outcomes"])
    named = [f"{num} {reason}" for reason, num in reasons.items() if reason]
    return f"Not targets: {'; '.join(named)}." if named else ""


def _beyond(run: Line) -> str:
    num, of = beyond(run, "test")
    return f"{num} of {of}" if of else ""


def heterogeneous(results: DedupResults) -> str:
    """Every search on the models of two architectures, target by target, and Table 5."""
    runs = results.table("hetero", TABLE)
    if not runs:
        return ""
    names = list(dict.fromkeys(outcome["name"] for run in runs for outcome in targets(run)))
    givers = dict.fromkeys(f"`{base}`" for run in runs for outcome in targets(run) for base in outcome["bases"])
    rows = []
    for name in results.rows(TABLE, ["hetero"]):
        run = results.cells("hetero", TABLE, name)[0]
        by_name = {outcome["name"]: outcome for outcome in targets(run)}
        cells = [
            f"{own_ratio(by_name[each]):.1f}, {by_name[each]['num_validations']}" if each in by_name else ""
            for each in names
        ]
        rows.append((f"`{name}`", *cells, beside(found([run]), None), f"{100 * run['bytes_ratio']:.1f}", _within(run)))
    papers = [(f"`{name}`", *(beside(each, None) for each in values)) for name, values in paper.HETEROGENEOUS.items()]
    headers = ("", *(_label(results, name) for name in names), "overall", "in bytes %", "within both bounds")
    return section(
        "Different architectures in one store (Table 5)",
        f"C.R. %, number of validations, target by target. Bases: {', '.join(givers)}. Within both bounds: epsilon, "
        "and accuracy on the validation records.",
        table(headers, rows),
        "The paper's:",
        table(("", *paper.HETEROGENEOUS_TARGETS), papers),
    )


def _label(results: DedupResults, name: str) -> str:
    model = results.models.get(name)
    return f"{model['architecture']}, {model['task']}, {model['epsilon']:.2g}" if model else name


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

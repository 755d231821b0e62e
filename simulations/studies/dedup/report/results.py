"""The study's lines, what is measured from them, and numbers as the page's cells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from fedpriv.errors import InputError
from fedpriv.files import replace_file
from simulations.studies.dedup.cells import BY_RULE
from simulations.studies.dedup.report.paper import EIGHT, Found
from simulations.studies.dedup.scenarios import FIFTY, SCENARIOS, Scenario
from simulations.studies.harness import Line, lines

NAMES = (*EIGHT, "C1", "C2", "C3", "C4", "minilm", "hetero", "fifty")
"""The scenarios in the order of the page; `fifty` is the union of several."""

# Of a difference of two shares of correct answers, as they are kept.
ROUNDING = 2e-6

CHECK = "check.json"
_FILES = {part: f"{name}.jsonl" for part, name in (
    ("models", "models"), ("runs", "runs"), ("retrained", "retrain"), ("serving", "serving"), ("pairs", "pairs")
)}  # fmt: skip
_OF_OUTCOMES = ("name", "bases", "num_blocks", "num_replaced", "epsilon_before", "epsilon_after")


@dataclass(frozen=True, kw_only=True)
class DedupResults:
    """All that the study has found so far.

    Attributes:
        models: {name: line} of training.
        runs: one line for each cell.
        retrained: one for each model that was trained again.
        serving: one for each scenario.
        pairs: one for each pair of models.
        checked: of the independent check; empty before it.
    """

    models: Mapping[str, Line]
    runs: Sequence[Line]
    retrained: Sequence[Line] = ()
    serving: Sequence[Line] = ()
    pairs: Sequence[Line] = ()
    checked: Line

    def cells(self, scenario: str, table: str, row: object) -> list[Line]:
        """The cells of one row of a table, one for each seed; none if they have not run."""
        return [run for run in self.table(scenario, table) if run["cell"]["row"] == str(row)]

    def table(self, scenario: str, table: str) -> list[Line]:
        """All cells of a scenario in one table, in the order in which they ran."""
        return [run for run in self.runs if (run["cell"]["scenario"], run["cell"]["table"]) == (scenario, table)]

    def having(self, table: str, among: Iterable[str] = NAMES) -> list[str]:
        """The scenarios that have a cell in a table, in the order of the page."""
        return [name for name in among if self.table(name, table)]

    def rows(self, table: str, among: Iterable[str] = NAMES) -> list[str]:
        """The rows that a table has in any scenario, in the order in which they ran."""
        return list(dict.fromkeys(run["cell"]["row"] for name in among for run in self.table(name, table)))


def keep(out: Path, path: Path) -> None:
    """Write what tables need of the results in the study's folder into one file of lines.

    A line takes the place of what the file held of the same; a folder of some scenarios leaves the others' lines.

    Raises:
        InputError: there are none.
    """
    found = {part: lines(out / file) for part, file in _FILES.items()}
    if not any(found.values()):
        raise InputError(f"out = {str(out)!r}: holds no results; train and run come first")
    if (out / CHECK).is_file():
        found["checked"] = [json.loads((out / CHECK).read_text())]
    for run in found["runs"]:
        names = [outcome["name"] for outcome in targets(run)]
        run["outcomes"] = [
            {key: outcome[key] for key in (*_OF_OUTCOMES, *(["epsilons"] if outcome["bases"] else []))}
            for outcome in run["outcomes"]
        ]
        run["accuracy"] = {
            split: {name: values[name] for name in names if name in values} for split, values in run["accuracy"].items()
        }
    kept = {_place(line): line for line in lines(path)}
    kept |= {_place(line): line for line in ({"part": p, **_rounded(each)} for p, of in found.items() for each in of)}
    ordered = sorted(kept.values(), key=lambda line: [*_FILES, "checked"].index(line["part"]))
    replace_file(path, "".join(json.dumps(line) + "\n" for line in ordered).encode())


def _place(line: Line) -> tuple[str, ...]:
    return line["part"], line.get("scenario", ""), line.get("name", line.get("key", ""))


def _rounded(value: Any) -> Any:
    """The value with at most six digits after the point."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


def read(path: Path) -> DedupResults:
    """The results that `keep` wrote.

    Raises:
        InputError: there are none.
    """
    found: dict[str, list[Line]] = {}
    for line in lines(path):
        found.setdefault(line["part"], []).append(line)
    if not found:
        raise InputError(f"lines = {str(path)!r}: holds no results; train and run come first")
    return DedupResults(
        models={model["name"]: model for model in found.get("models", [])},
        runs=found.get("runs", []),
        retrained=found.get("retrained", []),
        serving=found.get("serving", []),
        pairs=found.get("pairs", []),
        checked=found["checked"][0] if "checked" in found else {},
    )


def members(name: str) -> list[Scenario]:
    """The scenarios whose models are deduplicated together under a name."""
    return [SCENARIOS[each] for each in (FIFTY if name == "fifty" else (name,)) if each in SCENARIOS]


def targets(run: Line) -> list[Line]:
    """The outcomes of the variants that have bases."""
    return [outcome for outcome in run["outcomes"] if outcome["bases"]]


def bounds(run: Line) -> dict[str, tuple[float, float]]:
    """{target: by how much its epsilon may rise and its accuracy fall}, as the cell had it."""
    cell = run["cell"]
    own = {
        model.name: (scenario.epsilon_bound, scenario.utility_bound)
        for scenario in members(cell["scenario"])
        for model in scenario.models
    }
    return {
        outcome["name"]: (
            own[outcome["name"]][0] if cell["epsilon_bound"] is None else cell["epsilon_bound"],
            own[outcome["name"]][1] if cell["utility_bound"] is None else cell["utility_bound"],
        )
        for outcome in targets(run)
        if outcome["name"] in own
    }


def drops(run: Line, split: str) -> dict[str, float]:
    """{target: by how much its accuracy fell}, in [-1, 1], for targets that were measured on the split."""
    accuracy = run["accuracy"].get(split, {})
    names = [outcome["name"] for outcome in targets(run)]
    return {name: accuracy[name][0] - accuracy[name][1] for name in names if name in accuracy}


def beyond(run: Line, split: str) -> tuple[int, int]:
    """How many targets lost more than they may on a split, and of how many."""
    limits = bounds(run)
    found = [drop > limits[name][1] + ROUNDING for name, drop in drops(run, split).items() if name in limits]
    return sum(found), len(found)


def largest_drop(cells: Sequence[Line], split: str = "validation") -> float | None:
    """The largest drop of accuracy over all targets of all cells; None if there is none."""
    return max((drop for run in cells for drop in drops(run, split).values()), default=None)


def lost_on_test(cells: Sequence[Line]) -> tuple[str, str]:
    """The mean drop of all targets on the test records, and how many exceed their bound there; empty without any."""
    lost = [drop for run in cells for drop in drops(run, "test").values()]
    pairs = [beyond(run, "test") for run in cells]
    num, of = sum(num for num, _ in pairs), sum(of for _, of in pairs)
    return number(mean(lost) if lost else None, 4), f"{num} of {of}" if of else ""


def found(cells: Sequence[Line]) -> Found | None:
    """C.R. in percent and validations, the means over the cells; None without cells."""
    if not cells:
        return None
    return 100 * mean(run["block_ratio"] for run in cells), mean(run["num_validations"] for run in cells)


def by_both(results: DedupResults, scenario: str, place: str, row: object, theirs: float | None = None) -> str:
    """C.R. % by a proof / by the paper's rule (the paper's); empty where neither has run."""
    known = [found(results.cells(scenario, each, row)) for each in (place, place + BY_RULE)]
    shown = " / ".join(f"{each[0]:.1f}" if each else "not run" for each in known)
    return shown + (f" ({theirs:.1f})" if theirs is not None else "") if any(known) else ""


def own_ratio(outcome: Line) -> float:
    """A target's C.R. in percent: the share of its blocks that are no blocks of its base (section 5.1.3)."""
    return 100 * (1 - outcome["num_replaced"] / outcome["num_blocks"]) if outcome["num_blocks"] else 100.0


def by_target(cells: Sequence[Line]) -> dict[str, float]:
    """{target: its C.R. in percent}, the mean over the cells, in the order of the first."""
    ratios: dict[str, list[float]] = {}
    for run in cells:
        for outcome in targets(run):
            ratios.setdefault(outcome["name"], []).append(own_ratio(outcome))
    return {name: mean(values) for name, values in ratios.items()}


def accuracies(cells: Sequence[Line], split: str, *, after: bool) -> dict[str, float]:
    """{target: accuracy before or after}, the mean over the cells."""
    known: dict[str, list[float]] = {}
    for run in cells:
        for name in drops(run, split):
            known.setdefault(name, []).append(run["accuracy"][split][name][int(after)])
    return {name: mean(values) for name, values in known.items()}


def section(title: str, *parts: str) -> str:
    """A section of the page; parts without text are left out."""
    return "\n\n".join((f"### {title}", *(part for part in parts if part)))


def with_papers(ours: Found | None, papers: Found | None) -> str:
    """C.R. % and validations, and the paper's after them in brackets; empty where there is neither."""
    return ", ".join(_numbers(ours)) + (f" ({', '.join(_numbers(papers))})" if papers else "") if ours else ""


def _numbers(found: Found | None) -> list[str]:
    return [f"{found[0]:.1f}", f"{found[1]:.0f}"] if found else []


def number(value: float | None, digits: int) -> str:
    """A number, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def span(values: Iterable[float], digits: int) -> str:
    """The least and the largest, once if they are equal as written; empty of nothing."""
    known = sorted(values)
    ends = [f"{value:.{digits}f}" for value in (known[:1] + known[-1:])]
    return " to ".join(dict.fromkeys(ends))


def count(num: int, thing: str) -> str:
    """`1 model`, `2 models`."""
    return f"{num} {thing}" + ("" if num == 1 else "s")

"""The study's part of results/dedup.md, and the pictures next to the page.

The sections on models, costs and times are here; those of one theme are in a file each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from simulations.studies.dedup import serving
from simulations.studies.dedup.report import figures, paper, searches, settings, validation
from simulations.studies.dedup.report.results import (
    NAMES,
    ROUNDING,
    DedupResults,
    bounds,
    count,
    members,
    read,
    section,
    span,
    targets,
)
from simulations.studies.dedup.scenarios import Scenario
from simulations.studies.harness import Line, fill, table

METHODS = ("basic", "accountant", "provenance")
SHOWN = ("basic", "provenance")


def scenarios(results: DedupResults) -> str:
    """The scenarios and those of Table 1."""
    here = [name for name in NAMES if any(run["cell"]["scenario"] == name for run in results.runs)]
    own = [(name, members(name)[0]) for name in here if name != "fifty" and members(name)]
    rows = [_scenario_row(results, name, scenario) for name, scenario in own]
    headers = ("", "models", "epsilons", "epsilon bound", "utility bound")
    differing = [f"`{name}`" for name, scenario in own if name in paper.SCENARIOS and not _as_stated(name, scenario)]
    save = f", except in {', '.join(differing)}" if differing else ""
    return section(
        "Scenarios (Table 1)",
        f"Epsilons and bounds are those of the paper, where it states them{save}.",
        table(headers, rows) if rows else "",
    )


def _as_stated(name: str, scenario: Scenario) -> bool:
    """Whether epsilons and bounds are those that the paper gives."""
    papers, limits = paper.SCENARIOS[name], (scenario.epsilon_bound, scenario.utility_bound)
    equal = sorted(model.epsilon for model in scenario.models) == sorted(papers.epsilons)
    return equal and (papers.epsilon_bound is None or limits == (papers.epsilon_bound, papers.utility_bound))


def _scenario_row(results: DedupResults, name: str, scenario: Scenario) -> Sequence[object]:
    known = [results.models[model.name] for model in scenario.models if model.name in results.models]
    tasks = {each["architecture"]: dict[str, None]() for each in known}
    for each in known:
        tasks[each["architecture"]][each["task"]] = None
    stated = [model.epsilon for model in scenario.models]
    return (
        name,
        "; ".join(f"{architecture} on {', '.join(each)}" for architecture, each in tasks.items()),
        f"{len(stated)}, {min(stated):g} to {max(stated):g}",
        f"{scenario.epsilon_bound:g}",
        f"{scenario.utility_bound:g}",
    )


def learned(results: DedupResults) -> str:
    """How many models are better than their public start by two standard errors, and by how much."""
    num = sum(bool(model["beats_start"]) for model in results.models.values())
    return section(
        "Did the models learn anything?",
        f"{num} of {count(len(results.models), 'model')} beat their public start on the test records by more than two "
        f"standard errors of the paired difference; gains of accuracy are {_gains(results)}.",
    )


def _gains(results: DedupResults) -> str:
    """The least and the largest gain of each architecture."""
    gains: dict[str, list[float]] = {}
    for model in results.models.values():
        gains.setdefault(model["architecture"], []).append(model["gain"])
    return ", ".join(f"{span(each, 3)} ({name})" for name, each in sorted(gains.items()))


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
                largest = (f"{max(rises[name]):.3f}" for name in SHOWN)
                allowed = span((limit for limit, _ in limits.values()), 2)
                rows.append((scenario, *largest, allowed, f"{over} of {len(chosen)}"))
    if not rows:
        return ""
    headers = ("", *(f"`{name}`" for name in SHOWN), "bound", "beyond it by `basic`")
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
        "`check` restores every variant, counts its correct answers and composes its epsilon by code of its own: "
        + (
            f"{count(found['stores'], 'store')}, {count(found['violations'], 'violation')}; of "
            f"{count(found['private_targets'], 'target')} that were validated privately, {found['private_beyond']} "
            "exceed their utility bound, which private validation guarantees only up to its noise."
            if found
            else "It has not run yet."
        ),
    )


def times(results: DedupResults) -> str:
    """Seconds of training and of all cells, and what a search saves: seconds per validation."""
    kinds: Mapping[str, Sequence[Line]] = {
        "training": [*results.models.values(), *results.retrained],
        "deduplication": results.runs,
    }
    seconds = ", ".join(f"{sum(line['seconds'] for line in lines):.0f} of {kind}" for kind, lines in kinds.items())
    spent = {
        scenario: (sum(run["seconds"] for run in runs), sum(run["num_validations"] for run in runs))
        for scenario in results.having("algorithms")
        for runs in [results.table(scenario, "algorithms")]
    }
    shown = span((seconds / num for seconds, num in spent.values() if num), 2)
    return section(
        "Running times",
        f"Seconds of one thread each: {seconds}."
        + (f" A validation takes {shown} s, all else included; the paper names 58 to 86 s, on a GPU." if shown else ""),
    )


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        text: markdown; empty where the study has no results for it.
        figure: drawn below the text, if there is any; None where there is nothing to draw.
        file: name of the figure.
        shows: what is in it, for those who cannot see it.
    """

    text: Callable[[DedupResults], str]
    figure: Callable[[DedupResults], Figure | None] | None = None
    file: str = ""
    shows: str = ""


SECTIONS = (
    Section(scenarios),
    Section(learned),
    Section(searches.eight),
    Section(settings.claim),
    Section(settings.lengths, figures.lengths, "dedup-l.png", "Validations against C.R. for every L"),
    Section(searches.individual, figures.single_models, "dedup-figure-4.png", "C.R. and accuracy of single models"),
    Section(validation.minilm),
    Section(validation.private),
    Section(
        validation.by_model,
        figures.private_models,
        "dedup-figure-7.png",
        "Public and private validation of the models of B2 and B3",
    ),
    Section(settings.other_settings),
    Section(settings.thresholds),
    Section(
        searches.relaxed,
        figures.relaxed_bases,
        "dedup-figure-6.png",
        "C.R. and rise of epsilons by the choice of bases",
    ),
    Section(
        searches.own,
        figures.own_bases,
        "dedup-figure-9.png",
        "C.R. and rise of epsilons by the choice of bases in C1 to C4",
    ),
    Section(searches.fifty),
    Section(searches.heterogeneous),
    Section(
        serving.serving,
        figures.latency,
        "dedup-figures-5-8.png",
        "Seconds of loading and inference, from the store and from plain files",
    ),
    Section(epsilons),
    Section(checked),
    Section(times),
)


def write(page: Path, out: Path) -> None:
    """Rewrite the study's part of a page, which is made if it is missing, and the pictures next to it.

    Raises:
        InputError: there are no results, or the page lacks a marker of the part.
    """
    results, texts, pictures = read(out), list[str](), dict[str, bytes]()
    for part in SECTIONS:
        text = part.text(results)
        figure = part.figure(results) if text and part.figure else None
        if figure is not None:
            text, pictures[part.file] = f"{text}\n\n![{part.shows}]({part.file})", figures.to_png(figure)
        texts.append(text)
    fill(page, {"study": "\n\n".join(filter(None, texts))})
    for file, content in pictures.items():
        (page.parent / file).write_bytes(content)

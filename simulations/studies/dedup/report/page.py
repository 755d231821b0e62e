"""The study's part of results/dedup.md, the pictures next to the page, and the tables that are printed alone.

The sections on models, costs and times are here; those of one theme are in a file each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from simulations.studies.dedup import pairs, serving
from simulations.studies.dedup.report import figures, searches, settings, validation
from simulations.studies.dedup.report.results import ROUNDING, DedupResults, bounds, count, read, section, span, targets
from simulations.studies.harness import fill

METHODS = ("basic", "accountant", "provenance")
SHOWN = ("basic", "provenance")


def learned(results: DedupResults) -> str:
    """How many models are better than their public start by two standard errors, and by how much."""
    num = sum(bool(model["beats_start"]) for model in results.models.values())
    return (
        f"{num} of {count(len(results.models), 'model')} beat their public start on the test records by more than two "
        f"standard errors of the paired difference; gains of accuracy are {_gains(results)}."
    )


def _gains(results: DedupResults) -> str:
    """The least and the largest gain of each architecture."""
    gains: dict[str, list[float]] = {}
    for model in results.models.values():
        gains.setdefault(model["architecture"], []).append(model["gain"])
    return ", ".join(f"{span(each, 3)} ({name})" for name, each in sorted(gains.items()))


def epsilons(results: DedupResults) -> str:
    """The largest rise of an epsilon under each composition, over the scenarios."""
    largest: dict[str, list[float]] = {name: [] for name in SHOWN}
    num_beyond, num, apart = 0, 0, 0.0
    for scenario in results.having("algorithms"):
        for run in results.cells(scenario, "algorithms", "drd"):
            chosen, limits = targets(run), bounds(run)
            rises = {name: [o["epsilons"][name] - o["epsilon_before"] for o in chosen] for name in METHODS}
            num_beyond += sum(
                rise > limits[outcome["name"]][0] + ROUNDING
                for outcome, rise in zip(chosen, rises["basic"], strict=True)
                if outcome["name"] in limits
            )
            apart = max([apart, *(abs(o["epsilons"]["accountant"] - o["epsilons"]["provenance"]) for o in chosen)])
            num += len(chosen)
            for name in SHOWN:
                largest[name] += rises[name]
    if not num:
        return ""
    most = " and ".join(f"{max(rises):.3f} by `{name}`" for name, rises in largest.items())
    return section(
        "What deduplicated variants cost, `drd`",
        f"At one delta a target's epsilon rises by at most {most}. By `basic`, which splits one delta among the "
        f"models, {num_beyond} of {count(num, 'target')} would exceed their bounds. `accountant` and `provenance` "
        f"differ by at most {apart:.3f}.",
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
    Section(learned),
    Section(pairs.compared, figures.places, "dedup-figure-1.png", "The nearest block of another model, place by place"),
    Section(searches.compared),
    Section(searches.by_scenario),
    Section(searches.individual),
    Section(validation.minilm),
    Section(settings.by_length, figures.lengths, "dedup-l.png", "Validations against C.R. for every L"),
    Section(validation.private),
    Section(validation.sparse),
    Section(settings.other_settings),
    Section(settings.thresholds),
    Section(searches.by_bases),
    Section(
        serving.serving,
        figures.latency,
        "dedup-figures-5-8.png",
        "Seconds of loading and inference, from the store and from plain files",
    ),
    Section(epsilons),
    Section(checked),
)


PRINTED = (settings.lengths,)
"""Tables that the page leaves out."""


def write(page: Path, path: Path) -> None:
    """Rewrite the study's part of a page, which is made if it is missing, and the pictures next to it; print the rest.

    Args:
        page: the page.
        path: the kept lines, see `keep`.

    Raises:
        InputError: there are no results, or the page lacks a marker of the part.
    """
    results, texts, pictures = read(path), list[str](), dict[str, bytes]()
    for part in SECTIONS:
        text = part.text(results)
        figure = part.figure(results) if text and part.figure else None
        if figure is not None:
            text, pictures[part.file] = f"{text}\n\n![{part.shows}]({part.file})", figures.to_png(figure)
        texts.append(text)
    fill(page, {"study": "\n\n".join(filter(None, texts))})
    for file, content in pictures.items():
        (page.parent / file).write_bytes(content)
    print("\n\n".join(filter(None, (text(results) for text in PRINTED))))

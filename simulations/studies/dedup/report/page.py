"""The text between the two markers of results/dedup.md, and the pictures beside the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from fedpriv.errors import InputError
from simulations.studies.dedup.report import (
    ablations,
    bases,
    costs,
    figures,
    individual,
    models,
    private,
    ranges,
    searches,
    serving,
    unseen,
)
from simulations.studies.dedup.report.results import DedupResults, read

BEGIN, END = "<!-- study:begin -->", "<!-- study:end -->"


@dataclass(frozen=True, kw_only=True)
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
    Section(text=models.introduction),
    Section(text=models.scenarios),
    Section(text=models.learned),
    Section(text=searches.eight),
    Section(text=ranges.claim),
    Section(
        text=ranges.ablation, figure=figures.lengths, file="dedup-l.png", shows="Validations against C.R. for every L"
    ),
    Section(text=unseen.unseen),
    Section(
        text=individual.individual,
        figure=figures.single_models,
        file="dedup-figure-4.png",
        shows="C.R. and accuracy of single models",
    ),
    Section(text=unseen.minilm),
    Section(text=private.private),
    Section(
        text=private.by_model,
        figure=figures.private_models,
        file="dedup-figure-7.png",
        shows="Public and private validation of the models of B2 and B3",
    ),
    Section(text=private.cutoffs),
    Section(text=ablations.ablation),
    Section(text=ablations.thresholds),
    Section(
        text=bases.relaxed,
        figure=figures.relaxed_bases,
        file="dedup-figure-6.png",
        shows="C.R. and rise of epsilons by the choice of bases",
    ),
    Section(
        text=bases.own,
        figure=figures.own_bases,
        file="dedup-figure-9.png",
        shows="C.R. and rise of epsilons by the choice of bases in C1 to C4",
    ),
    Section(text=searches.fifty),
    Section(text=searches.heterogeneous),
    Section(
        text=serving.serving,
        figure=figures.latency,
        file="dedup-figures-5-8.png",
        shows="Seconds of loading and inference, from the store and from plain files",
    ),
    Section(text=costs.epsilons),
    Section(text=costs.checked),
    Section(text=costs.times),
)


def write(page: Path, out: Path) -> None:
    """Rewrite the text between the two markers of a page, which is made if it is missing, and its pictures.

    Args:
        page: markdown; the pictures are written beside it.
        out: the study's folder.

    Raises:
        InputError: the page has one marker without the other, or there are no results.
    """
    text = page.read_text() if page.is_file() else f"# Deduplicating model variants, measured\n\n{BEGIN}\n{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InputError(f"{page}: must hold {BEGIN} and after it {END}, each once")
    results = read(out)
    parts = [part for section in SECTIONS if (part := _written(section, results, page.parent))]
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}\n" + "\n\n".join(parts) + f"\n{after}")


def _written(section: Section, results: DedupResults, folder: Path) -> str:
    text = section.text(results)
    figure = section.figure(results) if text and section.figure else None
    if figure is None:
        return text
    (folder / section.file).write_bytes(figures.to_png(figure))
    return f"{text}\n\n![{section.shows}]({section.file})"

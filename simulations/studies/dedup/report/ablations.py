"""Block size, saliency, aggregation and distance (Table 6), and the bound on the utility's drop (Table 7)."""

from __future__ import annotations

from collections.abc import Sequence

from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.markdown import beside, number, section, table
from simulations.studies.dedup.report.results import DedupResults, Line, found, largest_drop


def ablation(results: DedupResults) -> str:
    """`dred` with other settings beside Table 6."""
    rows = [*_block_sizes(results)]
    for name, papers in paper.ABLATIONS.items():
        for value, theirs in papers.items():
            cells = results.cells("A1", name, value)
            if cells:
                rows.append((f"A1, {name}", f"`{value}`", *_figures(cells, theirs)))
    if not rows:
        return ""
    headers = ("", "value", "C.R. %, validations (the paper's)", "largest drop (the paper's)", "C.R. in bytes %")
    return section(
        "Other settings, `dred` on public validation (Table 6)",
        table(headers, rows),
        "The paper's blocks are larger because its models are; the middle size is the default in both. Its code takes "
        "the *least* similar block under `cosine`, ours the most similar.",
    )


def _block_sizes(results: DedupResults) -> list[Sequence[str]]:
    """The sizes by rank: the models differ in size, so equal sizes would mean unequal numbers of blocks."""
    sizes = sorted(results.rows("block size", ["A4"]), key=int)
    papers = list(paper.BLOCK_SIZES.items())
    rows: list[Sequence[str]] = []
    for place, size in enumerate(sizes):
        label, theirs = f"`{size}`", None
        if len(sizes) == len(papers):
            label, theirs = f"`{size}` ({papers[place][0]:,})", papers[place][1]
        rows.append(("A4, block size", label, *_figures(results.cells("A4", "block size", size), theirs)))
    return rows


def _figures(cells: Sequence[Line], theirs: paper.Ablation | None) -> Sequence[str]:
    worst = number(largest_drop(cells), 4) + (f" ({theirs[2]:g})" if theirs else "")
    return beside(found(cells), theirs[:2] if theirs else None), worst, f"{100 * cells[0]['bytes_ratio']:.1f}"


def thresholds(results: DedupResults) -> str:
    """C.R. by the utility bound beside Table 7, and with the order of utilities kept."""
    values = sorted({threshold for papers in paper.THRESHOLDS.values() for threshold in papers})
    rows = []
    for scenario in results.having("threshold"):
        papers = paper.THRESHOLDS.get(scenario, {})
        cells = (_ratio(results.cells(scenario, "threshold", value), papers.get(value)) for value in values)
        rows.append((scenario, *cells))
    ordered = [
        (name, *(_ratio(results.cells(name, place, "dred")) for place in ("algorithms", "ordered utilities")))
        for name in results.having("ordered utilities")
    ]
    if not rows and not ordered:
        return ""
    return section(
        "C.R. % by utility bound, `dred` (Table 7)",
        table(("", *(f"{100 * value:.1f} points" for value in values)), rows) if rows else "",
        "The paper's column for -0.5 points, which asks for a gain of accuracy, is not redrawn: here bounds are at "
        "least 0." if rows else "",
        "With the order of utilities kept, accuracy may not fall below that of the next less accurate variant on the "
        "same data, which is the library's fairness rule. Everywhere else, as in the paper's experiments, all variants "
        "of a scenario declare the same utility, so that only the bound limits the drop." if ordered else "",
        table(("", "own bound", "own bound, order of utilities kept"), ordered) if ordered else "",
    )  # fmt: skip


def _ratio(cells: Sequence[Line], theirs: float | None = None) -> str:
    ours = found(cells)
    return f"{ours[0]:.1f}" + (f" ({theirs:.1f})" if theirs is not None else "") if ours else ""

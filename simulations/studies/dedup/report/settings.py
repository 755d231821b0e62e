"""The settings: L (the library's rule, fixed lengths and Greedy-20), and Tables 6 and 7.

L is the shortest range that `drd` and `dred` try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.paper import EIGHT, Found
from simulations.studies.dedup.report.results import (
    ROUNDING,
    DedupResults,
    found,
    section,
    with_papers,
)
from simulations.studies.harness import Line, table, verdict

SEARCHES, TABLE, TUNING = "algorithms", "L", "tuning"
RULES = ("drd", "dred")
YARDSTICK = "greedy-20"
POINTS = 2.0
WANTED = 7  # of eight


@dataclass(frozen=True, kw_only=True)
class Against:
    """A search against Greedy-20 on the same scenario.

    Attributes:
        ours, greedys: C.R. in percent, and validations.
    """

    ours: Found
    greedys: Found

    @property
    def points(self) -> float:
        """By how much the C.R. is worse; negative where it is better."""
        return self.ours[0] - self.greedys[0]

    @property
    def fewer(self) -> bool:
        """Whether it takes fewer validations."""
        return self.ours[1] < self.greedys[1]

    @property
    def met(self) -> bool:
        """Fewer validations, and a C.R. at most two points worse."""
        return self.fewer and self.points <= POINTS + ROUNDING

    @property
    def verdict(self) -> str:
        """`yes`, or `no` with what failed."""
        failed = [*([] if self.fewer else ["validations"]), *(["C.R."] if self.points > POINTS + ROUNDING else [])]
        return verdict(self.met) + (f": {' and '.join(failed)}" if failed else "")


def measured(results: DedupResults, scenario: str, name: str, place: str = TABLE) -> list[Line]:
    """The cells of a search on the records of a table; with L by the rule, or none, it stands among all searches."""
    own = results.cells(scenario, place, name)
    return own if own or place != TABLE else results.cells(scenario, SEARCHES, name)


def against(results: DedupResults, scenario: str, name: str, place: str = TABLE) -> Against | None:
    """A search against Greedy-20 on the same records; None where either has not run."""
    ours, greedys = (found(measured(results, scenario, row, place)) for row in (name, YARDSTICK))
    return Against(ours=ours, greedys=greedys) if ours and greedys else None


def papers_against(scenario: str, name: str) -> Against:
    """The same in the paper's Table 2."""
    return Against(ours=paper.SEARCHES[name][scenario], greedys=paper.SEARCHES[YARDSTICK][scenario])


def claim(results: DedupResults) -> str:
    """Whether `drd` takes fewer validations than Greedy-20 at a C.R. not worse than two points, by scenario."""
    rows, verdicts = [], list[bool]()
    for scenario in EIGHT:
        here = against(results, scenario, "drd")
        if here:
            verdicts.append(here.met)
            rows.append((scenario, *_cells(here)))
    if not rows:
        return ""
    papers = sum(papers_against(scenario, "drd").met for scenario in EIGHT)
    pairs = [pair for scenario in EIGHT if (pair := against(results, scenario, "dred"))]
    headers = ("", f"validations / `{YARDSTICK}`'s", "C.R., points", "met")
    outcome = "reached" if sum(verdicts) >= WANTED else "**not reached**"
    return section(
        f"`drd`, L by its rule: fewer validations than `{YARDSTICK}`, C.R. at most {POINTS:g} points worse",
        f"On the validation records, which chose nothing: met on {sum(verdicts)} of {len(verdicts)} scenarios; the "
        f"target, {WANTED} of {len(EIGHT)}, is {outcome}. The paper's own figures (Table 2) meet it on {papers} of "
        f"{len(EIGHT)}."
        + (f" `dred` by the same rule meets it on {sum(p.met for p in pairs)} of {len(pairs)}." if pairs else ""),
        table(headers, rows),
    )


def _cells(pair: Against) -> Sequence[str]:
    return f"{pair.ours[1]:.0f} / {pair.greedys[1]:.0f}", f"{pair.points:+.1f}", pair.verdict


def lengths(results: DedupResults) -> str:
    """Every L on the records that choose settings and on those that do not."""
    names: dict[Sequence[str], list[str]] = {}  # several L may end in the same figures
    for name in dict.fromkeys((*RULES, *results.rows(TABLE, EIGHT), *results.rows(TUNING, EIGHT))):
        columns = (*_over_all(results, name, TABLE), *_over_all(results, name, TUNING))
        if name != YARDSTICK and any(columns):
            names.setdefault((_search(name), *columns), []).append(name)
    if not names:
        return ""
    rows = [(_named(alike), *columns) for (_, *columns), alike in names.items()]
    headers = (
        "", "validation records: validations / `greedy-20`'s", "C.R., points", "met",
        "tuning records: validations / `greedy-20`'s", "C.R., points", "met",
    )  # fmt: skip
    return section(
        "L, the shortest range that is tried",
        f"Means over the scenarios, against `{YARDSTICK}` on the same records. `rule` is the library's default.",
        table(headers, rows),
    )


def _search(row: str) -> str:
    """The search of a row, with `rule` where L is chosen by it."""
    name, _, length = row.partition("-")
    return f"`{row}`" if name not in RULES else f"`{name}`, L" if length else f"`{name}`, rule"


def _named(rows: Sequence[str]) -> str:
    """Rows of one search with the same figures."""
    lengths = ", ".join(row.partition("-")[2] for row in rows)
    search = _search(rows[0])
    return f"{search} = {lengths}" if search.endswith("L") else search


def _over_all(results: DedupResults, name: str, place: str) -> Sequence[str]:
    pairs = [pair for scenario in EIGHT if (pair := against(results, scenario, name, place))]
    if not pairs:
        return "", "", ""
    return (
        f"{mean(pair.ours[1] / max(pair.greedys[1], 1) for pair in pairs):.2f}",
        f"{mean(pair.points for pair in pairs):+.1f}",
        f"{sum(pair.met for pair in pairs)} of {len(pairs)}",
    )


def other_settings(results: DedupResults) -> str:
    """`dred` with other settings, and Table 6."""
    rows = [*_block_sizes(results)]
    for name, papers in paper.ABLATIONS.items():
        for value, theirs in papers.items():
            cells = results.cells("A1", name, value)
            if cells:
                rows.append((f"A1, {name}", f"`{value}`", with_papers(found(cells), theirs[:2])))
    if not rows:
        return ""
    headers = ("", "value", "C.R. %, validations (the paper's)")
    return section(
        "Other settings, `dred` on public validation (Table 6)",
        table(headers, rows),
        "The paper's blocks are larger because its models are; the middle size is the default in both.",
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
        ours = found(results.cells("A4", "block size", size))
        rows.append(("A4, block size", label, with_papers(ours, theirs[:2] if theirs else None)))
    return rows


def thresholds(results: DedupResults) -> str:
    """C.R. by the utility bound, with Table 7, and with the order of utilities kept."""
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
        "With the order of utilities kept, accuracy may not fall below that of the next less accurate variant on the "
        "same data. Everywhere else, as in the paper's experiments, only the bound limits the drop." if ordered else "",
        table(("", "own bound", "own bound, order of utilities kept"), ordered) if ordered else "",
    )  # fmt: skip


def _ratio(cells: Sequence[Line], theirs: float | None = None) -> str:
    ours = found(cells)
    return f"{ours[0]:.1f}" + (f" ({theirs:.1f})" if theirs is not None else "") if ours else ""

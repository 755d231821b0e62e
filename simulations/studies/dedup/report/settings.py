"""The settings: L (the library's rule, fixed lengths and Greedy-20), and Tables 6 and 7.

L is the shortest range that `drd` and `dred` try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.paper import EIGHT, Found
from simulations.studies.dedup.report.results import ROUNDING, DedupResults, by_both, count, found, section, with_papers
from simulations.studies.harness import Line, table

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
    def failed(self) -> str:
        """Where it falls short of that; empty if nowhere."""
        failed = [*([] if self.fewer else ["validations"]), *(["C.R."] if self.points > POINTS + ROUNDING else [])]
        return " and ".join(failed)


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


def by_length(results: DedupResults) -> str:
    """Whether `drd` meets its claim against Greedy-20."""
    told = claim(results)
    return section("L, the shortest range that is tried", told) if told else ""


def against_of(results: DedupResults, name: str) -> dict[str, Against]:
    """{scenario: a search against Greedy-20} of those of Table 2 that have both."""
    return {scenario: pair for scenario in EIGHT if (pair := against(results, scenario, name))}


def claim(results: DedupResults) -> str:
    """Whether `drd` takes fewer validations than Greedy-20 at a C.R. not worse than two points, by scenario."""
    pairs, others = against_of(results, "drd"), against_of(results, "dred")
    if not pairs:
        return ""
    met, papers = sum(pair.met for pair in pairs.values()), sum(papers_against(name, "drd").met for name in EIGHT)
    missed = ", ".join(f"{scenario} ({pair.failed})" for scenario, pair in pairs.items() if not pair.met)
    points = f"{min(pair.points for pair in pairs.values()):+.1f} to {max(pair.points for pair in pairs.values()):+.1f}"
    return (
        f"**`drd` takes fewer validations than `{YARDSTICK}` at a C.R. at most {POINTS:g} points worse** on {met} of "
        f"{len(pairs)} scenarios, by the rule and on validation records, which chose nothing. The target, {WANTED} of "
        f"{len(EIGHT)}, is {'reached' if met >= WANTED else '**not reached**'}. C.R. differs by {points} points."
        + (f" Missed: {missed}." if missed else "")
        + f" The paper's own figures (Table 2) meet it on {papers} of {len(EIGHT)}."
        + (f" `dred` meets it on {sum(p.met for p in others.values())} of {len(others)}." if others else "")
    )


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
    told = f"Means over the scenarios, against `{YARDSTICK}` on the same records. `rule` is the library's default:"
    return section("Every L", told, table(headers, rows))


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
    sizes = _block_sizes(results)
    rows = [("A4, block size", sizes)] if sizes else []
    for name, papers in paper.ABLATIONS.items():
        cells = ((value, by_both(results, "A1", name, value, theirs[0])) for value, theirs in papers.items())
        known = [f"`{value}` {told}" for value, told in cells if told]
        if known:
            rows.append((f"A1, {name}", ", ".join(known)))
    if not rows:
        return ""
    return section(
        "Other settings, `dred` on public validation (Table 6)",
        table(
            ("", "C.R. % by a proof / by the paper's rule (the paper's); of block sizes by a proof, with validations"),
            rows,
        ),
        "The paper's blocks are larger because its models are; the middle size is the default in both.",
    )


def _block_sizes(results: DedupResults) -> str:
    """The sizes by rank: the models differ in size, so equal sizes would mean unequal numbers of blocks."""
    sizes = sorted(results.rows("block size", ["A4"]), key=int)
    papers = list(paper.BLOCK_SIZES.values()) if len(sizes) == len(paper.BLOCK_SIZES) else [None] * len(sizes)
    shown = (
        f"`{size}` {with_papers(found(results.cells('A4', 'block size', size)), theirs[:2] if theirs else None)}"
        for size, theirs in zip(sizes, papers, strict=True)
    )
    return "; ".join(shown)


def thresholds(results: DedupResults) -> str:
    """C.R. by the utility bound, with Table 7, and with the order of utilities kept."""
    values = sorted({threshold for papers in paper.THRESHOLDS.values() for threshold in papers})
    rows = []
    for scenario in results.having("threshold"):
        papers = paper.THRESHOLDS.get(scenario, {})
        rows.append((scenario, *(by_both(results, scenario, "threshold", each, papers.get(each)) for each in values)))
    ordered = [
        pair
        for name in results.having("ordered utilities")
        if all(pair := [found(results.cells(name, place, "dred")) for place in ("algorithms", "ordered utilities")])
    ]
    if not rows and not ordered:
        return ""
    means = [mean(each[0] for each in place if each) for place in zip(*ordered, strict=True)] if ordered else []
    return section(
        "C.R. % by utility bound, `dred` (Table 7)",
        "By a proof / by the paper's rule (the paper's).",
        table(("", *(f"{100 * value:.1f} points" for value in values)), rows) if rows else "",
        "If accuracy may not fall below that of the next less accurate variant on the same data, the mean C.R. of "
        f"{count(len(ordered), 'scenario')} goes from {means[0]:.1f} to {means[1]:.1f}. Everywhere else, as in the "
        "paper's experiments, only the bound limits the drop." if ordered else "",
    )  # fmt: skip

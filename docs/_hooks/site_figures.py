"""Figures that pages cite, held to the tables that they come from; and lines that are older than what they measure.

A figure has one home: a row of a table in results/, made of a stored line. A page cites it by a key, whose definition
at the end of the page names cells of that row; each number of the link's text must stand in another cell of it:

    the head stays [0.034 below a probe][probe].

    [probe]: ../results/utility.md#corpora-that-chose-nothing "MedQuAD source of answer"

A page of results cites rows of its own tables, by the anchor alone.

Lines are out of date once a commit after theirs changes the code that decides their figures. If a change moves no
figure, `CHECKED` names the commit up to which that was made sure. Where the history is missing, nothing is known.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import site_links

CITATION = re.compile(r"\[(?P<text>[^\[\]]+)\]\[(?P<key>[^\[\]]+)\]")
NUMERAL = re.compile(r"\d+(?:[.,]\d+)*")
HEADING = re.compile(r"(#+) (.*)")

# {page: the code that decides the figures of its lines}: its draws, rates, clipping, noise and charges.
_RECIPE = (
    "fedpriv/privacy/accounting/recipe.py",
    "fedpriv/learning/training/noise_plan.py",
    "fedpriv/learning/training/rounds.py",
)
DECIDED_BY: Mapping[str, tuple[str, ...]] = {
    "aggregation": (
        *_RECIPE,
        "fedpriv/learning/aggregation",
        "fedpriv/learning/training/private_sums.py",
        "fedpriv/learning/training/stacked.py",
    ),
    "audit": (
        *(
            "fedpriv/methods/audit",
            "fedpriv/learning/training/canaries.py",
            "fedpriv/privacy/mechanisms",
            "fedpriv/learning/training/private_sums.py",
            "fedpriv/learning/training/stacked.py",
        ),
        *("simulations/studies/audit", ":(exclude)simulations/studies/audit/tables.py"),
    ),
    "dedup": (
        "fedpriv/models/dedup",
        "simulations/studies/dedup",
        *(
            f":(exclude)simulations/studies/dedup/{name}"
            for name in ("__main__.py", "check.py", "serving.py", "report")
        ),
    ),
    "integral": ("fedpriv/methods/integral", "simulations/studies/_integral_runs.py"),
    "language_models": (*_RECIPE, "fedpriv/learning/training/public_factors.py"),
    "lmo": (
        *(f"fedpriv/privacy/accounting/lmo_{part}.py" for part in ("distribution", "parameters", "renyi")),
        *("fedpriv/methods/lmo", "fedpriv/privacy/mechanisms/lmo.py"),
    ),
    "persons": _RECIPE,
    "secure_aggregation": (*_RECIPE, "fedpriv/privacy/accounting/views.py"),
    "utility": _RECIPE,
}
# Up to this commit no change of that code moved a figure of lines that are older, except that records which share other
# passes round otherwise: accuracies of seeded runs differ by up to 0.002, epsilons not at all.
CHECKED: Mapping[str, str] = {
    "aggregation": "f133f9e7",
    "audit": "8b58ec58",
    "dedup": "f4309d13",
    "integral": "f4309d13",
    "language_models": "f4309d13",
    "lmo": "f4309d13",
    "persons": "f4309d13",
    "secure_aggregation": "f4309d13",
    "utility": "f4309d13",
}


def wrong_citations(markdown: str, source: str, root: Path) -> list[str]:
    """All that is wrong with the figures that a page cites, a line each.

    Args:
        markdown: the page's text.
        source: its path in the repository.
        root: of the repository.
    """
    prose = site_links.prose(markdown)
    defined = {match["key"]: match for line in prose.splitlines() if (match := site_links.DEFINITION.match(line))}
    found = []
    for match in CITATION.finditer(prose):
        text, key = " ".join(match["text"].split()), match["key"]
        if key not in defined:
            found.append(f"{source}: [{text}][{key}] has no definition")
            continue
        target, cells = defined[key]["target"], (defined[key]["title"] or "").split(" | ")
        page, section = root / site_links.resolved(target, source), target.partition("#")[2]
        rows = list(_rows(page.read_text(encoding="utf-8"), section))
        named = [row for row in rows if all(cell in row for cell in cells)]
        figures = NUMERAL.findall(text)
        if not named:
            found.append(f"{source}: {target} has no row with the cells {' | '.join(cells)}")
        elif not figures or not any(_holds(row, cells, figures) for row in named):
            found.append(f"{source}: [{text}][{key}] differs from {target}, which has {' | '.join(named[0])}")
    return found


def _rows(markdown: str, anchor: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in a section, or on the whole page without an anchor."""
    depth = 0 if not anchor else None
    for line in markdown.splitlines():
        if anchor and (heading := HEADING.match(line)):
            level = len(heading[1])
            if depth is not None and level <= depth:
                return
            if depth is None and site_links.anchor(heading[2]) == anchor:
                depth = level
        elif depth is not None and line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def _holds(row: list[str], named: list[str], figures: list[str]) -> bool:
    """Whether cells of the row that are not named begin with each of the figures, whatever their sign."""
    values = {number[0] for cell in row if cell not in named and (number := NUMERAL.search(cell))}
    return values.issuperset(figures)


def outdated(root: Path) -> list[str]:
    """A text for each file of lines that are older than a change of the code that decides them."""
    found = []
    for page, paths in DECIDED_BY.items():
        file, since = f"results/{page}.jsonl", CHECKED[page]
        lines = [json.loads(line) for line in (root / file).read_text(encoding="utf-8").splitlines()]
        made = Counter(_later(root, since, line.get("software", {}).get("commit") or since) for line in lines)
        for commit, num in made.items():
            if changes := _git(root, "log", "--format=%h %s", f"{commit}..HEAD", "--", *paths):
                found.append(
                    f"{file}: {num} lines are older than {changes.splitlines()[0]!r}; measure them again, or set "
                    "CHECKED in docs/_hooks/site_figures.py once you have seen that no figure moves"
                )
                break
    return found


@cache  # hundreds of lines have a few commits
def _later(root: Path, one: str, other: str) -> str:
    """The second of two commits if it descends from the first, else the first."""
    return other if _git(root, "merge-base", "--is-ancestor", one, other, ok="yes") else one


def _git(root: Path, *arguments: str, ok: str = "") -> str:
    """The output of a command, or `ok` if that is empty; nothing if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return (done.stdout.strip() or ok) if done.returncode == 0 else ""

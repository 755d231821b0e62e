"""Figures that pages cite, held to the tables that they come from; and lines that are older than what they measure.

A figure has one home: a row of a table in results/, made of a stored line. A page cites it by a key, whose definition
at the end of the page names cells of that row:

    the head stays [0.034 below a probe][probe].

    [probe]: ../results/utility.md#targets "head less linear probe, epsilon 8 | MedQuAD source of answer"

Lines are out of date once a commit changes the code that decides their figures. If a change moves no figure, `CHECKED`
names the commit up to which that was made sure.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import site_links

CITATION = re.compile(r"\[(?P<text>[^\[\]]+)\]\[(?P<key>[^\[\]]+)\]")
NUMERAL = re.compile(r"\d+(?:[.,]\d+)*")
HEADING = re.compile(r"(#+) (.*)")

# Of each page's lines: the code that decides its figures. Code that changes no draw, rate or charge is not among it.
DECIDED_BY: Mapping[str, tuple[str, ...]] = {
    "audit": ("fedpriv/audit", "simulations/studies/audit"),
    "language_models": ("fedpriv/accounting/recipe.py", "fedpriv/training/public_factors.py"),
    "persons": ("fedpriv/accounting/recipe.py",),
    "secure_aggregation": ("fedpriv/accounting/recipe.py", "fedpriv/accounting/views.py"),
    "utility": ("fedpriv/accounting/recipe.py",),
}
# Up to this commit no change of that code moved a figure of lines that are older.
CHECKED: Mapping[str, str] = {
    "audit": "81331c34",
    "language_models": "81331c34",
    "persons": "81331c34",
    "secure_aggregation": "81331c34",
    "utility": "81331c34",
}


def wrong_citations(markdown: str, source: str, root: Path) -> list[str]:
    """All that is wrong with the figures that a page cites, a line each.

    Args:
        markdown: the page's text.
        source: its path in the repository.
        root: of the repository.
    """
    lines = markdown.splitlines()
    defined = {match["key"]: match for line in lines if (match := site_links.DEFINITION.match(line))}
    found = []
    for match in CITATION.finditer(markdown):
        text, key = " ".join(match["text"].split()), match["key"]
        if key not in defined:
            found.append(f"{source}: [{text}][{key}] has no definition")
            continue
        target, cells = defined[key]["target"], (defined[key]["title"] or "").split(" | ")
        page, _, section = target.partition("#")
        rows = list(_rows((root / site_links.resolved(page, source)).read_text(encoding="utf-8"), section))
        named = [row for row in rows if all(cell in row for cell in cells)]
        if not named:
            found.append(f"{source}: {target} has no row with the cells {' | '.join(cells)}")
        elif not any(all(_holds(row, figure) for figure in NUMERAL.findall(text)) for row in named):
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


def _holds(row: list[str], figure: str) -> bool:
    return any(figure in NUMERAL.findall(cell) for cell in row)


def outdated(root: Path) -> list[str]:
    """A text for each file of lines that are older than a change of the code that decides them.

    Without a history nothing is known, and nothing is told.
    """
    found = []
    for page, paths in DECIDED_BY.items():
        file = f"results/{page}.jsonl"
        made = _git(root, "log", "-1", "--format=%H", "--", file)
        since = CHECKED[page]
        if not made or _git(root, "cat-file", "-t", since) != "commit":
            continue
        if _git(root, "merge-base", "--is-ancestor", since, made, ok="yes"):
            since = made
        if changes := _git(root, "log", "--format=%h %s", f"{since}..HEAD", "--", *paths):
            last = changes.splitlines()[0]
            found.append(
                f"{file}: older than {last!r}; measure it again, or set CHECKED in docs/_hooks/site_figures.py once "
                "you have seen that no figure moves"
            )
    return found


def _git(root: Path, *arguments: str, ok: str = "") -> str:
    """The output of a command, or `ok` if that is empty; nothing if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return (done.stdout.strip() or ok) if done.returncode == 0 else ""

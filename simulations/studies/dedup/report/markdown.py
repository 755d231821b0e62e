"""Tables in markdown, and numbers as their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulations.studies.dedup.report.paper import Found


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; each row has one cell for each header."""
    body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers), *body])


def section(title: str, *parts: str) -> str:
    """A section of the page; parts without text are left out."""
    return "\n\n".join((f"### {title}", *(part for part in parts if part)))


def beside(ours: Found | None, papers: Found | None) -> str:
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


def yes(met: bool) -> str:
    """`yes`, or `no` in bold."""
    return "yes" if met else "**no**"


def count(num: int, thing: str) -> str:
    """`1 model`, `2 models`."""
    return f"{num} {thing}" + ("" if num == 1 else "s")

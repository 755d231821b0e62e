"""Whatever the code cites is in docs/references.md, and nothing else is.

A citation is a first author's surname, who else wrote it, and a year: `Mironov 2012`, `Zhu and Wang 2019`, `Lyu, Su and
Li 2017`, `Abadi et al. 2016`. Surname and year give the entry's anchor, `abadi-2016`. Only the four papers that the
library builds on may go without a year: `Liu et al., Eq. 8`.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from fedpriv import __version__

ROOT = Path(__file__).resolve().parents[1]
BIBLIOGRAPHY = ROOT / "docs" / "references.md"

NAME = r"\b[A-Z][A-Za-z-]*[a-z]"
SEVERAL = rf"(?: et al\.|(?:, {NAME})* and {NAME})"
YEAR = r",? \(?(?P<year>(?:19|20)\d\d[a-z]?)\b"
DATED = re.compile(rf"(?P<name>{NAME}){SEVERAL}?{YEAR}")
DATED_IN_PROSE = re.compile(rf"(?P<name>{NAME}){SEVERAL}{YEAR}|\((?P<alone>{NAME}) (?P<its_year>(?:19|20)\d\d[a-z]?)\)")
UNDATED = re.compile(rf"(?P<name>{NAME}) et al\.(?!{YEAR})")
ARXIV = re.compile(r"(?:arXiv[: ]|et al\., )(\d{4}\.\d{5})")
SOURCE = re.compile(r"(?<!class )(?<!-> )\bSource: (?=\S)(?P<text>.*)")
ENTRY = re.compile(
    r'^- <a id="(?P<key>[^"]+)"></a>\*\*(?P<label>.+) (?P<year>\d{4}[a-z]?)\.\*\* (?:(?P<authors>[^*]+?)\. )?'
    r"\*(?P<title>[^*]+[.?])\* (?P<venue>.+)$"
)


@cache
def bibliography() -> dict[str, dict[str, str]]:
    """{key: an entry's parts and the section it stands in}."""
    entries, section = {}, ""
    for line in BIBLIOGRAPHY.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("- "):
            match = ENTRY.match(line)
            assert match, f"not in the form of an entry: {line}"
            assert match["key"] not in entries, f"{match['key']}: twice"
            entries[match["key"]] = match.groupdict() | {"section": section}
    return entries


def key_without_year(name: str) -> str:
    """The key of the one among the four papers whose first author this is; the name itself where there is none."""
    four = [key for key, entry in bibliography().items() if entry["section"] == "The four papers"]
    return next((key for key in four if key.startswith(f"{name.lower()}-")), name)


def paragraphs(text: str) -> list[str]:
    """The paragraphs of comments, docstrings and pages that may cite, each on one line."""
    parts = (part for part in re.split(r'"""|\n[ \t]*\n', text) if re.search(r"\d{4}|Source:", part))
    return [re.sub(r"\s*\n[ \t]*#? ?", " ", part) for part in parts]


def sources(text: str) -> list[str]:
    """What stands after each `Source:`."""
    return [match["text"] for part in paragraphs(text) for match in SOURCE.finditer(part)]


def cited_in_source(source: str) -> list[str]:
    """Keys of all that a `Source:` names, whether or not there are such entries."""
    return [f"{m['name'].lower()}-{m['year']}" for m in DATED.finditer(source)] + [
        key_without_year(m["name"]) for m in UNDATED.finditer(source)
    ]


def cited_in_prose(text: str) -> set[str]:
    """Keys of the papers that a text cites with a year or an arXiv number."""
    keys = set()
    for part in paragraphs(text):
        keys |= {
            f"{(m['name'] or m['alone']).lower()}-{m['year'] or m['its_year']}" for m in DATED_IN_PROSE.finditer(part)
        }
        for number in ARXIV.findall(part):
            found = [key for key, entry in bibliography().items() if f"arXiv:{number}" in entry["venue"]]
            keys |= set(found) or {f"arXiv:{number}"}
    return keys


def unresolved(source: str) -> list[str]:
    """What is wrong with a `Source:`: papers that the bibliography lacks, or that none is named."""
    keys = cited_in_source(source)
    return [key for key in keys if key not in bibliography()] if keys else ["names no paper"]


def texts() -> dict[str, str]:
    """{file: its text} of all code and pages that cite."""
    folders = ("fedpriv", "clients", "server", "simulations", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file != Path(__file__)]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files if file != BIBLIOGRAPHY}


def test_every_citation_in_code_and_pages_is_of_an_entry_and_every_entry_is_cited():
    labels = {key: f"{entry['label']} {entry['year']}" for key, entry in bibliography().items()}
    cited, num_sources = set[str](), 0
    for file, text in texts().items():
        in_prose, named = cited_in_prose(text), sources(text)
        unknown = in_prose - bibliography().keys()
        assert not unknown, f"{file} cites {sorted(unknown)}, which docs/references.md lacks"
        if file.endswith(".py"):
            wrong = [f"{source}: {what}" for source in named for what in unresolved(source)]
            assert not wrong, f"{file}: Source: {'; '.join(wrong)}, which docs/references.md lacks"
            num_sources += len(named)
        cited |= in_prose.union(*map(cited_in_source, named))
        cited |= {key for key in labels.keys() - cited if labels[key] in text}
    assert num_sources > 60, "the check would be blind"
    assert sorted(bibliography().keys() - cited) == []


def test_every_entry_says_by_its_key_and_label_who_wrote_it_when():
    for key, entry in bibliography().items():
        first = re.match(NAME, entry["label"])
        assert first
        assert key == f"{first[0].lower()}-{entry['year']}"
        if entry["section"] == "The four papers":
            assert first[0] in entry["authors"]
        identifiers = re.findall(r"(?:doi|arXiv):\S+", entry["venue"])
        published = re.findall(r"\b(?:19|20)\d\d\b", re.sub(r"(?:doi|arXiv):\S+", "", entry["venue"]))
        assert all(year > entry["year"][:4] for year in published), f"{key}: its venue repeats the year"
        for identifier in identifiers:
            assert re.fullmatch(r"doi:10\.\d{4,5}/[^\s,]+,?|arXiv:\d{4}\.\d{5}|arXiv:\d{4}\.\d{4}", identifier), key


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("Abadi et al. 2016, Algorithm 1.", []),
        ("Liu et al., Eq. 8; conditions of Abadi et al. 2016, Theorem 1.", []),
        ("Lyu, Su and Li 2017, Algorithm 1 and Section 4.2.", []),
        ("Broder 1997.", []),
        ("Nobody et al. 2031, Theorem 1.", ["nobody-2031"]),
        ("Abadi et al. 2017.", ["abadi-2017"]),
        ("Abadi et al., Algorithm 1.", ["Abadi"]),
        ("Sun et al. 2024, equation 1.", ["sun-2024"]),
        ("Zhou et al. 2022, as Smith and Jones 1999 have it.", ["smith-1999"]),
        ("the paper's appendix.", ["names no paper"]),
    ],
)
def test_an_unknown_or_ambiguous_source_would_be_found(source, wrong):
    text = f'def f():\n    """One.\n\n    Source: {source}\n    """\n'
    assert [unresolved(found) for found in sources(text)] == [wrong]


def test_a_source_may_go_on_in_the_next_line_of_a_docstring_or_comment():
    assert sources('"""Two. Source: Yang et al.,\n    Eq. 1.\n    """\nx = 1\n') == ["Yang et al., Eq. 1. "]
    (comment,) = sources("# Source: Varshney and\n# Torra 2023.\n\nx = 1\n")
    assert comment == "Varshney and Torra 2023."


def test_the_citation_file_names_the_four_papers_by_their_titles():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    four = {e["title"]: e for e in bibliography().values() if e["section"] == "The four papers"}
    assert sorted(f"{reference['title']}." for reference in cited["references"]) == sorted(four)
    for reference in cited["references"]:
        names = [f"{author['given-names']} {author['family-names']}" for author in reference["authors"]]
        assert f"{', '.join(names[:-1])} and {names[-1]}" == four[f"{reference['title']}."]["authors"]

"""Figures that pages cite are those of the tables, and lines older than the code that decides them are told."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import site_figures

from tests.test_docs_paths import PAGES, ROOT

TABLE = """# Results

## One

| corpus | gain |
| --- | --- |
| digits | 0.017 |
| digits 5,000 | 0.017 |

### Below it

| corpus | gain |
| --- | --- |
| letters | -0.034 ± 0.005 |

## Two

| corpus | gain |
| --- | --- |
| digits | 0.5 |
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_figure_that_a_page_cites_is_that_of_its_row(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not site_figures.wrong_citations(text, page.relative_to(ROOT).as_posix(), ROOT)


def test_some_page_cites_a_figure() -> None:
    pages = [page.read_text() for page in PAGES]
    assert any(site_figures.CITATION.search(text) and "[gain-5000]: " in text for text in pages)


@pytest.mark.parametrize(
    ("cited", "definition", "wrong"),
    [
        ("[0.017 more][a]", '#one "digits"', ""),
        ("[0.034 less\nthan that][a]", '#one "letters"', ""),
        ("[0.017 more][a]", ' "digits"', ""),
        ("[0.018][a]", '#one "digits"', "differs"),
        ("[0.5][a]", '#one "digits"', "differs"),
        ("[0.17][a]", '#one "digits"', "differs"),
        ("[far more][a]", '#one "digits"', "differs"),
        ("[0.005 less][a]", '#one "letters"', "differs"),
        ("[0.017 with 5,000][a]", '#one "digits 5,000"', "differs"),
        ("\n```\nx[0][1]\n```\n", '#one "digits"', ""),
        ("[0.5][a]", '#two "digits | 0.5"', "differs"),
        ("[0.017][a]", '#two "letters"', "has no row"),
        ("[0.017][a]", '#three "digits"', "has no row"),
        ("[0.017][b]", '#one "digits"', "has no definition"),
    ],
)
def test_a_citation_holds_where_its_row_has_the_figure(tmp_path, cited, definition, wrong):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "r.md").write_text(TABLE)
    found = site_figures.wrong_citations(f"It is {cited}.\n\n[a]: ../results/r.md{definition}\n", "docs/p.md", tmp_path)
    assert [wrong in fault for fault in found] == [True] * bool(wrong)


def test_a_page_cites_rows_of_its_own_tables(tmp_path):
    (tmp_path / "results").mkdir()
    page = f'It gains [0.017][a], or [0.5][a].\n\n{TABLE}\n[a]: #one "digits"\n'
    (tmp_path / "results" / "r.md").write_text(page)
    found = site_figures.wrong_citations(page, "results/r.md", tmp_path)
    assert found == ["results/r.md: [0.5][a] differs from #one, which has digits | 0.017"]


@pytest.mark.parametrize("page", sorted(ROOT.glob("results/*.md")))
def test_every_figure_of_a_lead_is_cited(page: Path) -> None:
    lead = page.read_text(encoding="utf-8").split("\n\n")[1]
    assert not re.search(r"\d\.\d", site_figures.CITATION.sub("", lead))


def test_lines_are_outdated_once_the_code_that_decides_them_changes(tmp_path, monkeypatch):
    def commit(path: str, text: str) -> str:
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e.invalid")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", f"change {path}"], check=True)
        return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(site_figures, "DECIDED_BY", {"page": ("code",)})

    def told(checked: str) -> list[str]:
        monkeypatch.setattr(site_figures, "CHECKED", {"page": checked})
        return site_figures.outdated(tmp_path)

    def line(commit: str) -> str:
        return json.dumps({"software": {"commit": commit}}) + "\n"

    first = commit("code/a.py", "1")
    commit("results/page.jsonl", line(first))
    assert told(first) == []
    changed = commit("code/a.py", "2")
    assert len(told(first)) == 1
    assert "results/page.jsonl: 1 lines are older than" in told(first)[0]
    assert told(changed) == []
    assert told("0" * 40) == []
    last = commit("results/page.jsonl", line(first) + line(changed))
    assert "1 lines are older" in told(first)[0], "a new line makes no other one newer"
    commit("results/page.jsonl", line(changed) + line(last))
    assert told(first) == []

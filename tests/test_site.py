"""The documentation site: what its pages are made of, that it builds and fetches nothing, and figures that it cites."""

import json
import os
import re
import subprocess
import sys

import pytest
import site_api
import site_commands
import site_figures
import site_links

from tests.cli.test_every_command import COMMANDS
from tests.test_docs_code import PAGES, ROOT

SITE = {"docs/a.md": "a.md", "results/b.md": "results/b.md", "README.md": "index.md", "docs/papers/c.md": "papers/c.md"}
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


@pytest.mark.parametrize(
    ("source", "written", "on_the_site"),
    [
        ("docs/a.md", "[b](../results/b.md#x)", "[b](results/b.md#x)"),
        ("results/b.md", "[a](../docs/a.md)", "[a](../a.md)"),
        ("README.md", "![c](docs/papers/c.md)", "![c](papers/c.md)"),
        ("docs/papers/c.md", "[`b`](../../results/b.md)", "[`b`](../results/b.md)"),
        ("docs/a.md", "[code](../fedpriv/config.py) and [up](#up)", "code and [up](#up)"),
        ("docs/a.md", "[out](https://example.org/a.md)", "[out](https://example.org/a.md)"),
        ("docs/a.md", "```\n[b](../results/b.md)\n```", "```\n[b](../results/b.md)\n```"),
        ("docs/a.md", "```sh each\nls\n```", "```sh\nls\n```"),
    ],
)
def test_a_link_of_the_repository_leads_to_the_page_that_shows_the_file(source, written, on_the_site):
    assert site_links.for_site(written, source, SITE[source], SITE) == on_the_site


@pytest.mark.parametrize(
    ("written", "on_the_site"),
    [
        ("[b.md](../results/b.md#x)", "[B, measured](results/b.md#x)"),
        ("[`results/b.md`](../results/b.md)", "[B, measured](results/b.md)"),
        ("[what b is](../results/b.md)", "[what b is](results/b.md)"),
        ("[README.md](../README.md)", "[README.md](index.md)"),
    ],
)
def test_a_link_that_reads_as_a_file_reads_as_its_title(written, on_the_site):
    titles = {"results/b.md": site_links.title("# B, measured\n\nText.\n")}
    assert site_links.for_site(written, "docs/a.md", "a.md", SITE, titles) == on_the_site


def test_the_reference_has_every_command_with_its_options():
    page = site_commands.pages()["fedpriv.md"]
    assert set(re.findall(r"^## `fedpriv (.*)`$", page, re.M)) == set(COMMANDS)
    assert "| `--accountant [pld|rdp|closed-form]` | `pld` |" in page
    assert "\n\n```sh\nfedpriv account --noise-multiplier" in page


def test_the_reference_has_every_package_that_exports_something():
    pages = site_api.pages()
    assert {"fedpriv.md", "fedpriv.privacy.accounting.md", "fedpriv.privacy.ledger.md"} <= set(pages)
    assert "\n::: fedpriv.privacy.accounting.epsilon_of\n" in pages["fedpriv.privacy.accounting.md"]
    assert "\n::: fedpriv.runs.plan.memory_plan\n" in pages["fedpriv.runs.plan.md"]
    assert "fedpriv.runs.plan.decided" not in pages["fedpriv.runs.plan.md"]


def test_make_docs_lets_strict_mode_see_warnings():
    assert re.findall(r"-m mkdocs build (.*)", (ROOT / "Makefile").read_text()) == ["--strict"], "--quiet hides them"


@pytest.mark.slow
def test_the_site_builds_in_strict_mode_and_its_pages_fetch_nothing(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {file.relative_to(site).as_posix(): file for file in site.rglob("*.html")}
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix(".html").as_posix()
        assert name.removeprefix("docs/").replace("README", "index").lower() in pages
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert len(index) > 500
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index}
    assert boosts["configuration.html"] > boosts["simulation.html"] > boosts["tutorials/1-first-federation.html"]
    fetched = re.compile(
        r"<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*|<link\b[^>]*\bhref=\"(?:https?:)?//[^\"]*"
        r"|@import|url\(\"?(?:https?:)?//|class=\"mermaid"
    )
    for name, file in pages.items():
        assert not fetched.findall(file.read_text()), name
    for style in site.rglob("*.css"):
        assert not re.findall(r"@import|url\([\"']?(?:https?:)?//", style.read_text()), style


def test_prose_that_stands_out_is_reported_and_nothing_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"# What a heading says\n\nA short sentence. {'Word ' * 31}end.\n\n```\n{'code ' * 40}\n```\n\n"
        "| What | a table |\n\n- What it costs is told below.\n- What does it cost?\n"
    )
    command = [sys.executable, str(ROOT / "docs" / "_hooks" / "prose.py"), str(page)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(":")[1:3] for line in told[:-1]] == [["3", " 32 words"], ["11", " odd"]]
    assert told[-1] == "4 sentences, 1 of more than 30 words, 1 odd"


def test_every_figure_that_a_page_cites_is_that_of_its_row_and_every_one_of_a_lead_is_cited():
    texts = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
    assert not [fault for page, text in texts.items() for fault in site_figures.wrong_citations(text, page, ROOT)]
    cited = [text for text in texts.values() if site_figures.CITATION.search(text) and "[gain]: " in text]
    assert cited, "the check would be blind"
    leads = [page.read_text().split("\n\n")[1] for page in ROOT.glob("results/*.md")]
    assert not [lead for lead in leads if re.search(r"\d\.\d", site_figures.CITATION.sub("", lead))]


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

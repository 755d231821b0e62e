"""The documentation site: what its pages are made of, that it builds in strict mode, and that it fetches nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import site_api
import site_commands
import site_links

from tests.cli.test_every_command import COMMANDS
from tests.test_docs_paths import PAGES, ROOT

SITE = {"docs/a.md": "a.md", "results/b.md": "results/b.md", "README.md": "index.md", "docs/papers/c.md": "papers/c.md"}


@pytest.mark.parametrize(
    ("source", "page", "written", "on_the_site"),
    [
        ("docs/a.md", "a.md", "[b](../results/b.md#x)", "[b](results/b.md#x)"),
        ("results/b.md", "results/b.md", "[a](../docs/a.md)", "[a](../a.md)"),
        ("README.md", "index.md", "![c](docs/papers/c.md)", "![c](papers/c.md)"),
        ("docs/papers/c.md", "papers/c.md", "[`b`](../../results/b.md)", "[`b`](../results/b.md)"),
        ("docs/a.md", "a.md", "[code](../fedpriv/config.py) and [up](#up)", "code and [up](#up)"),
        ("docs/a.md", "a.md", "[out](https://example.org/a.md)", "[out](https://example.org/a.md)"),
        ("docs/a.md", "a.md", "```\n[b](../results/b.md)\n```", "```\n[b](../results/b.md)\n```"),
        ("docs/a.md", "a.md", "```sh each\nls\n```", "```sh\nls\n```"),
    ],
)
def test_a_link_of_the_repository_leads_to_the_page_that_shows_the_file(source, page, written, on_the_site):
    assert site_links.for_site(written, source, page, SITE) == on_the_site


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
    (command,) = re.findall(r"-m mkdocs build (.*)", (ROOT / "Makefile").read_text())
    assert command.split() == ["--strict"], "--quiet hides warnings from it"


@pytest.mark.slow
def test_the_site_builds_in_strict_mode_and_its_pages_fetch_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {file.relative_to(tmp_path / "site").as_posix(): file for file in (tmp_path / "site").rglob("*.html")}
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix(".html").as_posix()
        assert name.removeprefix("docs/").replace("README", "index").lower() in pages
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    assert len(index) > 500
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index}
    assert boosts["configuration.html"] > boosts["simulation.html"] > boosts["tutorials/1-first-federation.html"]
    fetched = re.compile(
        r"<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*|<link\b[^>]*\bhref=\"(?:https?:)?//[^\"]*"
        r"|@import|url\(\"?(?:https?:)?//|class=\"mermaid"
    )
    for name, file in pages.items():
        assert not fetched.findall(file.read_text()), name
    for style in (tmp_path / "site").rglob("*.css"):
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

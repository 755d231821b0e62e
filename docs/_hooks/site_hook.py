"""What turns the repository into the site: pages that are made, pages that lie elsewhere, and links between them.

The pages of docs/ and results/ and README.md are written for readers of the repository. Here they are taken as they
are; nothing of them is copied by hand.
"""

from __future__ import annotations

import fnmatch
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import site_api
import site_commands
import site_figures
import site_links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LOG = logging.getLogger("mkdocs.hooks.site")

# Pages outside docs/ and results/, which the site has under these names.
AT_THE_TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LARGEST_SOURCE = 200_000


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages of the site: those of docs/, of results/ and of the top, what is made, and the code they link to."""
    for repository, uri in AT_THE_TOP.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / repository)))
    for path in sorted((ROOT / "results").iterdir()):
        if path.suffix in {".md", ".png", ".svg", ".jsonl"}:
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    made = {f"reference/commands/{name}": text for name, text in site_commands.pages().items()}
    made |= {f"reference/api/{name}": text for name, text in site_api.pages().items()}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    for path in sorted(_linked_sources(files)):
        text = f"# `{path}`\n\n````{Path(path).suffix[1:]}\n{(ROOT / path).read_text()}\n````\n"
        files.append(File.generated(config, f"source/{path}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    for fault in site_figures.outdated(ROOT):
        LOG.warning(fault)
    config.nav = _expanded(config.nav, files)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links to pages of the site."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    page.meta["search"] = {"boost": _boost(page.file.src_uri)}
    source = _repository_path(page.file)
    if source is None or page.file.src_uri.endswith(".ipynb"):
        return markdown
    for fault in site_figures.wrong_citations(markdown, source, ROOT):
        LOG.warning(fault)
    return site_links.for_site(markdown, source, page.file.src_uri, _site_pages(files), _titles(files))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A notebook with links to pages of the site; the generator looks at links of Markdown alone."""
    source = _repository_path(page.file)
    if source is None or not page.file.src_uri.endswith(".ipynb"):
        return html
    pages = _site_pages(files)

    def relinked(match: re.Match[str]) -> str:
        target = match["target"]
        if site_links.ELSEWHERE.match(target) or not re.search(r"\.(md|ipynb)(#|$)", target):
            return match[0]
        found = files.get_file_from_path(pages.get(site_links.resolved(target, source), ""))
        if found is None:
            LOG.warning("%s links to %s, which is no page", source, target)
            return match[0]
        _, sign, anchor = target.partition("#")
        return f'href="{found.url_relative_to(page.file)}{sign}{anchor}"'

    return re.sub(r'href="(?P<target>[^"]+)"', relinked, html)


def _linked_sources(files: Files) -> set[str]:
    """Files of the repository that pages link to and the site would not have: code, configurations."""
    pages = _site_pages(files)
    found: set[str] = set()
    for file in files.documentation_pages():
        source = _repository_path(file)
        if source is not None and source.endswith(".md"):
            found |= site_links.linked_files((ROOT / source).read_text(encoding="utf-8"), source) - pages.keys()
    return {path for path in found if (ROOT / path).is_file() and (ROOT / path).stat().st_size < LARGEST_SOURCE}


def _repository_path(file: File) -> str | None:
    """Where a file lies in the repository; None for a page that is made."""
    if file.abs_src_path is None or not Path(file.abs_src_path).is_relative_to(ROOT):
        return None
    return Path(file.abs_src_path).relative_to(ROOT).as_posix()


def _site_pages(files: Files) -> dict[str, str]:
    """{path in the repository: path in the site}."""
    pages = {path: file.src_uri for file in files if (path := _repository_path(file)) is not None}
    sources = {file.src_uri.removeprefix("source/")[:-3]: file.src_uri for file in files if _is_source(file)}
    return pages | sources


def _titles(files: Files) -> dict[str, str]:
    """{path in the repository: title} of the pages that lie there."""
    found = [path for file in files.documentation_pages() if (path := _repository_path(file)) is not None]
    return {
        path: title for path in found if path.endswith(".md") and (title := site_links.title((ROOT / path).read_text()))
    }


def _boost(uri: str) -> float:
    """How much a page counts in a search: a key's own page before the notebooks and the code that use it."""
    if uri == "configuration.md":
        return 4
    return 0.5 if uri.endswith(".ipynb") or uri.startswith("source/") else 1


def _is_source(file: File) -> bool:
    return file.src_uri.startswith("source/")


def _expanded(nav: list[Any], files: Files) -> list[Any]:
    """The navigation with pages in place of each entry with a *; a section without any is left out."""
    named = set(_named(nav))
    pages = [file.src_uri for file in files.documentation_pages() if file.src_uri not in named]

    def matching(pattern: str) -> list[str]:
        folder = posixpath.dirname(pattern)
        found = [uri for uri in pages if posixpath.dirname(uri) == folder and fnmatch.fnmatch(uri, pattern)]
        return sorted(found, key=lambda uri: posixpath.splitext(uri)[0])

    def expanded(entry: Any) -> list[Any]:
        if isinstance(entry, str):
            return matching(entry) if "*" in entry else [entry]
        ((title, inside),) = entry.items()
        if isinstance(inside, str) and "*" not in inside:
            return [entry]
        inner = [found for part in ([inside] if isinstance(inside, str) else inside) for found in expanded(part)]
        return [{title: inner}] if inner else []

    return [found for entry in nav for found in expanded(entry)]


def _named(entry: Any) -> Iterator[str]:
    """The pages that a navigation names, without patterns."""
    if isinstance(entry, str):
        yield from () if "*" in entry else (entry,)
    else:
        for inside in entry.values() if isinstance(entry, dict) else entry:
            yield from _named(inside)

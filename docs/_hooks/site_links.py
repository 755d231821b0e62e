"""Links between files of the repository, as links between pages of the site.

On a code host a link of a page leads to any file beside it; the site has pages and no folders of code. So each link is
resolved in the repository first, and then written as a link to the page that shows that file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s]+)\)")
# The place that a link names by a key, at the end of a page.
DEFINITION = re.compile(r'^\[(?P<key>[^\]]+)\]: (?P<target>\S+)(?: "(?P<title>[^"]*)")?$')
FILE_NAME = re.compile(r"\[`?[\w./-]+\.md`?\]")
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|#|/")
FENCE = re.compile(r" {0,3}(?:```|~~~)")


def resolved(target: str, source: str) -> str:
    """The repository path that a link leads to.

    Args:
        target: as it stands in the page, perhaps with an anchor; an anchor alone leads to the page itself.
        source: the page's own path in the repository.
    """
    if target.startswith("#"):
        return source
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def linked_files(markdown: str, source: str) -> set[str]:
    """The repository paths of everything that a page links to, outside code."""
    lines = prose(markdown).splitlines()
    links = (match for line in lines for match in (*LINK.finditer(line), *DEFINITION.finditer(line)))
    targets = (match["target"] for match in links)
    return {resolved(target, source) for target in targets if not ELSEWHERE.match(target)}


def for_site(
    markdown: str, source: str, page: str, pages: Mapping[str, str], titles: Mapping[str, str] | None = None
) -> str:
    """A page of the repository as the site's generator reads it.

    Args:
        markdown: the page's text.
        source: its path in the repository.
        page: its path in the site.
        pages: {path in the repository: path in the site} of all files that the site has. A link to any other file
            becomes plain text.
        titles: {path in the repository: title} of pages. A link that reads as a page's file name, as it is best told
            to readers of the repository, reads as the title.
    """
    titles = titles or {}

    def place(target: str) -> str:
        file, anchor = resolved(target, source), target.partition("#")[1:]
        return posixpath.relpath(pages[file], posixpath.dirname(page) or ".") + "".join(anchor)

    def relinked(match: re.Match[str]) -> str:
        target = match["target"]
        if ELSEWHERE.match(target):
            return match[0]
        file = resolved(target, source)
        if file not in pages:
            return match["text"][1:-1]
        text = f"[{titles[file]}]" if FILE_NAME.fullmatch(match["text"]) and file in titles else match["text"]
        return f"{text}({place(target)})"

    def of_line(line: str) -> str:
        if (found := DEFINITION.match(line)) and resolved(found["target"], source) in pages:
            return line.replace(found["target"], place(found["target"]))
        return LINK.sub(relinked, line)

    return "\n".join(_language_alone(line) if is_code else of_line(line) for line, is_code in _lines(markdown))


def prose(markdown: str) -> str:
    """The page without its fenced blocks of code."""
    return "\n".join(line for line, is_code in _lines(markdown) if not is_code)


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def title(markdown: str) -> str:
    """The heading that a page begins with; empty without one."""
    found = re.match(r"\s*# (.*)", markdown)
    return found[1].strip() if found else ""


def _lines(markdown: str) -> list[tuple[str, bool]]:
    """(line, whether it belongs to a fenced block of code)."""
    lines, inside = [], False
    for line in markdown.split("\n"):
        is_fence = FENCE.match(line) is not None
        lines.append((line, inside or is_fence))
        inside ^= is_fence
    return lines


def _language_alone(line: str) -> str:
    """```` ```sh each ```` without what tests read there, which the site's parser would not take for a fence."""
    return re.sub(r"^( {0,3}```\w+) .*", r"\1", line)

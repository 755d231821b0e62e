"""Docstrings as pages of reference/api/ read them: `>= 0` is no quotation, and links start from docs/."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringsOfTheSite(griffe.Extension):
    """Escapes the sign with which a described value begins, and leads links to pages of docs/ out of reference/api/."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is documented."""
        if obj.docstring:
            obj.docstring.value = for_site(obj.docstring.value)


def for_site(text: str) -> str:
    """A docstring as a page of reference/api/ shows it."""
    text = re.sub(r"(?m)(^ *[\w*]+:\s+|^\s*)>(?=[= ])(?!>)", r"\1\\>", text)
    return re.sub(r"\]\((?=[\w-]+\.md[)#])", "](../../", text)

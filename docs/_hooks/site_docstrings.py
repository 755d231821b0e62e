"""Docstrings as Markdown reads them: a description such as `>= 0` is no quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ComparisonsAreNoQuotations(griffe.Extension):
    """Escapes the sign with which a described value begins."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is documented."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)(^ *[\w*]+:\s+|^\s*)>(?=[= ])(?!>)", r"\1\\>", obj.docstring.value)

"""Texts that others wrote, such as labels, as Markdown that says them and does nothing else."""

from __future__ import annotations

import re
import string

_MOST = 200

# Letters, digits and what joins them in names: means nothing in Markdown where it begins with a letter.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9 ,/.-]*")


def one_line(text: str) -> str:
    """The text on one line, without characters that steer a reader's screen, cut to 200 characters."""
    line = " ".join(text.split())
    printable = "".join(char if char.isprintable() else "\ufffd" for char in line)
    return printable if len(printable) <= _MOST else printable[: _MOST - 1] + "…"


def markdown(text: str) -> str:
    """The text on one line, as no markup, link, HTML, table cell or heading: unless it is plain, all is escaped."""
    line = one_line(text)
    if _PLAIN.fullmatch(line) and "www." not in line.lower():
        return line
    return "".join(f"\\{char}" if char in string.punctuation else char for char in line)

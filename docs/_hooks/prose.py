"""Reports long sentences and odd openings in the pages; it judges nothing, and never fails.

    python docs/_hooks/prose.py [FILE ...]      # all pages by default

A sentence of more than 30 words may be right; read it aloud and decide. Headings, tables and code are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 30
_ODD = re.compile(r"^(What|Of|Who|Whom|Whoever|Whose)\b.*[^?]$|\b(anew|whoever|beside)\b", re.IGNORECASE | re.DOTALL)
_NO_PROSE = re.compile(r"^(#|\||!\[|<!--|\s{4,}\S)")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z*`\[])")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of every paragraph and list item."""
    lines: list[str] = []
    start, in_code = 0, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith(("```", "~~~")):
            in_code = not in_code
        begins = not line.strip() or in_code or line.startswith("```") or re.match(r"\s*([-*]|\d+\.)\s", line)
        if begins or _NO_PROSE.match(line):
            if lines:
                yield start, " ".join(lines)
            lines = []
        if not (in_code or line.startswith("```") or _NO_PROSE.match(line)) and line.strip():
            start = start if lines else number
            lines.append(re.sub(r"^\s*([-*]|\d+\.)\s+", "", line).strip())


def sentences(paragraph: str) -> list[str]:
    """The sentences, with each link as its text."""
    return _SENTENCE_END.split(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph))


def main() -> None:
    """Print what stands out, a line each, and how much of it there is."""
    pages = [Path(name) for name in sys.argv[1:]] or sorted(
        [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")]
    )
    num_sentences = num_long = num_odd = 0
    for page in pages:
        for line, paragraph in paragraphs(page.read_text(encoding="utf-8")):
            for sentence in sentences(paragraph):
                words = len(sentence.split())
                num_sentences += 1
                if words > MOST_WORDS:
                    num_long += 1
                    print(f"{page.name}:{line}: {words} words: {sentence[:90]}")
                if _ODD.search(sentence):
                    num_odd += 1
                    print(f"{page.name}:{line}: odd: {sentence[:90]}")
    print(f"{num_sentences} sentences, {num_long} of more than {MOST_WORDS} words, {num_odd} odd")


if __name__ == "__main__":
    main()

"""The layout of a table in text: its encoding, which is never guessed, and its separator, which its header decides.

No record has a say: adding, changing or removing one never changes how another is read.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Sequence

from fedpriv.config import Encoding, Separator
from fedpriv.texts import counted

# The library's own limit, 128 KiB, would make a long text unreadable.
csv.field_size_limit(sys.maxsize)

SEPARATORS: dict[Separator, str] = {"comma": ",", "semicolon": ";", "tab": "\t"}
"""{name: character}"""

# A header longer than this many characters is none.
_LONGEST_HEADER = 100_000

_WHOLE = re.compile(r"[+-]?[0-9]+(,[0-9]+)?")


class LayoutError(ValueError):
    """A text is no table; the message names the line, what it has, and never a value of a record."""


def decoded(content: bytes, encoding: Encoding, *, line: int = 1) -> str:
    """The text of a file, or of a part that begins at a line, without a byte order mark.

    Raises:
        LayoutError: it has another encoding; names the line, what stands there, and the option.
    """
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise LayoutError("line 1: begins with the mark of UTF-16; save the file as UTF-8")
    try:
        return content.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        found = f"line {line}: holds byte 0x{content[error.start]:02x}, which is not {encoding.upper()}"
        raise LayoutError(
            f"{found}; if the file is Latin-1, give --encoding latin-1 (key: encoding), or cp1252 for that of Windows"
        ) from None


def separator_of(header: str, asked: Separator) -> Separator:
    """The separator that a header has, or the one that was asked for.

    Args:
        header: text that begins with the names of the columns.
        asked: `auto` lets the header decide: it is the one that splits it, and comma if none does.

    Raises:
        LayoutError: several split the header.
    """
    if asked != "auto":
        return asked
    sizes = {name: len(_first(header, separator)) for name, separator in SEPARATORS.items()}
    found = [name for name, size in sizes.items() if size > 1]
    if len(found) > 1:
        ways = " and ".join(f"{sizes[name]} columns by {name}" for name in found)
        raise LayoutError(f"line 1: the header has {ways}; name the separator: --separator {found[0]} (key: separator)")
    return found[0] if found else "comma"


def _first(text: str, separator: str) -> list[str]:
    """The first fields of a text that are not blank."""
    rows = csv.reader(io.StringIO(text[:_LONGEST_HEADER], newline=""), delimiter=separator)
    return next((row for row in rows if not _is_blank(row)), [])


def _is_blank(row: Sequence[str]) -> bool:
    """Whether a row is that of a blank line."""
    return not row or (len(row) == 1 and not row[0].strip())


def names_of(row: Sequence[str], line: int) -> tuple[str, ...]:
    """The names of the columns; one without a name gets its number."""
    names = tuple(name or f"column {number}" for number, name in enumerate(row, 1))
    for name in names:
        if names.count(name) > 1:
            raise LayoutError(f"line {line}: the header names {name!r} twice; give each column a name of its own")
    return names


def misfit(row: Sequence[str], names: Sequence[str], line: int, separator: Separator) -> str:
    """The reason why a row does not fit the header."""
    found = f"line {line}: has {counted(len(row), 'field')} by {separator}, but the header names {len(names)}"
    written = SEPARATORS[separator].join(row)
    for other, character in SEPARATORS.items():
        if other != separator and len(_first(written, character)) == len(names):
            return f"{found}; this line seems to be separated by {other}: use one separator throughout"
    mend = f"quote fields that hold a {separator}" if len(row) > len(names) else "leave no field out"
    return f"{found}; {mend}, or name another separator with --separator (key: separator)"


def is_decimal_comma(values: Sequence[str | None]) -> bool:
    """Whether a column holds numbers alone, some of them with a decimal comma."""
    present = [value.strip() for value in values if value]
    return any("," in value for value in present) and all(map(_WHOLE.fullmatch, present))

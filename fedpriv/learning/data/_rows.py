"""The rows of a table's file, each read on its own: no row decides how, or whether, another is read.

A row is one line of a CSV, TSV or JSONL file, or one row of a Parquet file. Whatever it holds, it ends where its line
ends: if a quoted field could go on over lines, one open quote would take the rows that follow. So a file with line
breaks within its fields is written again, by `write_lines`, before a run or a node reads it. The encoding of a text is
never guessed, and its header decides the separator.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedpriv.config import Encoding, Separator
from fedpriv.errors import InputError, first_line, is_memory_failure
from fedpriv.learning.adapters import GIT_LFS
from fedpriv.texts import counted, visible

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

# The library's own limit, 128 KiB, would make a long text unreadable.
csv.field_size_limit(sys.maxsize)

SEPARATORS: dict[Separator, str] = {"comma": ",", "semicolon": ";", "tab": "\t"}
"""{name: character}"""

# A header longer than this many characters is none.
_LONGEST_HEADER = 100_000

# Of Excel's, before the header.
_DECLARED = re.compile(r"sep=(.)[\r\n]*", re.IGNORECASE)

# {first bytes of a file that is another than its name says: what it is, and what to do}
_FOREIGN = dict([GIT_LFS]) | {
    b"\x1f\x8b": "compressed with gzip; let its name end in .gz",
    b"PK\x03\x04": "an Excel workbook or a ZIP archive; save its table as CSV in UTF-8",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save its table as CSV in UTF-8",
    b"PAR1": "a Parquet file; let its name end in .parquet",
}

_WHOLE = re.compile(r"[+-]?[0-9]+(,[0-9]+)?")

FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""{ending of a file's name: the format of its table}."""

Row = Mapping[str, object]
"""{column: value}."""

Place = tuple[int, Callable[[], Row]]
"""The number of a row's line, or of the row itself, from 1, and what reads it; it may raise anything."""


class LayoutError(ValueError):
    """A text is no table; the message names the line, what it has, and never a value of a record."""


def decoded(content: bytes, encoding: Encoding, *, line: int = 1) -> str:
    """The text of a file, or of a part from a line on, without a byte order mark; LayoutError for another encoding."""
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


def refuse_foreign(start: bytes, own: bytes = b"") -> None:
    """Refuse, with a LayoutError, the start of another kind of file than its name says, or than the `own` bytes."""
    for mark, what in _FOREIGN.items():
        if mark != own and start.startswith(mark):
            raise LayoutError(f"is {what}")


def separator_of(header: str, asked: Separator) -> Separator:
    """The separator that splits a header, comma if none does, or the one asked for; LayoutError if several do."""
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
    return next((row for row in rows if len(row) > 1 or any(field.strip() for field in row)), [])


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


@dataclass(frozen=True)
class Rows:
    """The rows of an open file.

    Attributes:
        places: of the rows that are not blank.
        names: of the columns; empty where every row names its own.
        separator: of a CSV file; None of any other.
    """

    places: Iterator[Place]
    names: tuple[str, ...] = ()
    separator: Separator | None = None


def suffix_of(path: Path) -> str:
    """The ending of a file's name before a possible `.gz`, in lower case."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def unit_of(path: Path) -> str:
    """The part of a file that is a row of its table, by its name."""
    return "row" if suffix_of(path) == ".parquet" else "line"


@contextmanager
def opened(
    source: str,
    *,
    key: str = "data",
    separator: Separator = "auto",
    encoding: Encoding = "utf-8",
    columns: Sequence[str] = (),
    spans: bool = False,
) -> Iterator[Rows]:
    """The rows of a file, possibly gzipped.

    Args:
        key: the configuration key to name in errors.
        separator: of a CSV file; with `auto` its header decides, and a TSV file has tabs.
        encoding: of a CSV or JSONL file.
        columns: of a Parquet file that are read, if it has them; empty reads all.
        spans: whether a quoted field may go on over lines, and a JSON file may be one list.

    Raises:
        InputError: for what no row decides: there is no such file, its format is unknown, it is damaged as a whole, or
            memory is used up.
    """
    path = Path(source).expanduser()
    suffix = suffix_of(path)
    if path.is_dir():
        join = f"import pyarrow.parquet as p; p.write_table(p.read_table({str(path)!r}), 'all.parquet')"
        raise InputError(f'{key} = {source!r}: is a folder; join its Parquet files with python -c "{join}"')
    if not path.is_file():
        raise InputError(f"{key} = {source!r}: no such file")
    if suffix not in FORMATS:
        raise InputError(f"{key} = {source!r}: unknown format; use {', '.join(FORMATS)}, gzip allowed")
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            if suffix == ".parquet":
                yield _from_parquet(file, columns)
            elif FORMATS[suffix] == "csv":
                asked: Separator = "tab" if separator == "auto" and suffix == ".tsv" else separator
                yield _separated(_lines(file, spans=spans), asked, encoding)
            else:
                yield Rows(_objects(file, encoding, spans=spans))
    except InputError:
        raise
    except LayoutError as error:
        raise InputError(f"{key} = {source!r}: {error}") from None
    except Exception as error:  # the libraries raise errors of many types
        raise InputError(f"{key} = {source!r}: cannot be read ({first_line(error)})") from None


def require_columns(names: Collection[str], asked: Iterable[tuple[str, str]], source: str) -> None:
    """Refuse, with an InputError, a table that lacks a column which a (configuration key, column) pair asks for."""
    for key, column in asked:
        if column and column not in names:
            title = "; if that is a title above the names, delete it" if len(names) == 1 or "column 2" in names else ""
            raise InputError(
                f"{key} = {column!r}: {source} has no such column; it has {', '.join(map(visible, names))}{title}"
            )


def unreadable(error: Exception, where: str) -> str:
    """Why the row at a place, such as `line 7`, cannot be read, in one line; raises the error if memory is used up."""
    if is_memory_failure(error):
        raise error
    if isinstance(error, LayoutError):
        return str(error)
    return (
        f"{where}: has no {error}" if isinstance(error, KeyError) else f"{where}: cannot be read ({first_line(error)})"
    )


def _lines(file: IO[bytes] | gzip.GzipFile, *, spans: bool = False) -> Iterator[tuple[int, bytes]]:
    """The numbers, from 1, and bytes of the lines that are not blank; with `spans` of lines whose quotes are closed."""
    start, held = 1, b""
    for number, line in enumerate(file, 1):
        held += line
        if not (spans and held.count(b'"') % 2):
            if held.strip():
                yield start, held
            start, held = number + 1, b""
    if held.strip():
        yield start, held


def _objects(file: IO[bytes] | gzip.GzipFile, encoding: Encoding, *, spans: bool) -> Iterator[Place]:
    if spans and file.read(1) == b"[":
        values = _json(b"[" + file.read())
        return ((number, partial(_checked, value)) for number, value in enumerate(values, 1))
    file.seek(0)
    return ((number, partial(_object, line, encoding, number)) for number, line in _lines(file))


# A number keeps its digits, as it does in any other table: 250.10 is another code than 250.1. NaN is a missing one.
_json = partial(json.loads, parse_float=str, parse_constant=lambda name: None if name == "NaN" else name)


def _object(line: bytes, encoding: Encoding, number: int) -> Row:
    # A byte order mark is dropped wherever it stands: a line before the first must not change the first.
    if number == 1:  # which may be a record: it alone is refused then
        refuse_foreign(line)
    return _checked(_json(decoded(line, encoding, line=number)))


def _checked(value: object) -> Row:
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _separated(lines: Iterator[tuple[int, bytes]], asked: Separator, encoding: Encoding) -> Rows:
    number, first = next(lines, (1, b""))
    refuse_foreign(first)
    header = decoded(first, encoding, line=number)
    if declared := _DECLARED.fullmatch(header):
        named = {character: name for name, character in SEPARATORS.items()}.get(declared[1])
        if named is None:
            raise LayoutError(f"line {number}: sep={declared[1]} is none of {', '.join(SEPARATORS)}; use one of these")
        asked = named if asked == "auto" else asked
        number, first = next(lines, (number, b""))
        header = decoded(first, encoding, line=number)
    # The header alone decides: no row decides how another is read.
    separator = separator_of(header, asked)
    names, below = names_of(_fields(header, separator, number), number) if header else (), number + 1

    def row(line: bytes, number: int) -> Row:
        fields = _fields(decoded(line, encoding, line=number), separator, number)
        if len(fields) != len(names):
            title = "; if the line above is a title, delete it" if number == below else ""
            raise LayoutError(misfit(fields, names, number, separator) + title)
        # Values as written: NA is a name, and 007 differs from 7; only an empty field is missing.
        return {name: field or None for name, field in zip(names, fields, strict=True)}

    return Rows(((number, partial(row, line, number)) for number, line in lines), names, separator)


def _fields(line: str, separator: Separator, number: int) -> list[str]:
    try:
        (fields,) = csv.reader([line.rstrip("\r\n")], delimiter=SEPARATORS[separator], strict=True)
    except csv.Error as error:
        is_open = "unexpected end" in str(error)
        reason = "a quote opens here and is not closed" if is_open else f"cannot be read ({error})"
        raise LayoutError(
            f"line {number}: {reason}; within quotes, write a quote twice, and if fields go on over several lines, "
            "write the file again with `fedpriv data lines`"
        ) from None
    return fields


def _from_parquet(file: IO[bytes] | gzip.GzipFile, columns: Sequence[str]) -> Rows:
    # Deferred: most runs and nodes read no Parquet file.
    from datasets import Features
    from pyarrow.parquet import ParquetFile

    refuse_foreign(file.read(32), own=b"PAR1")
    parquet = ParquetFile(file)
    names = tuple(parquet.schema_arrow.names)
    read = [name for name in dict.fromkeys(columns or names) if name in names]
    table = parquet.read(columns=read)
    features = Features.from_arrow_schema(table.schema)
    return Rows(((row + 1, partial(_values, table, features, row)) for row in range(len(table))), names)


def _values(table: pa.Table, features: datasets.Features, row: int) -> Row:
    # One value at a time: a column is converted as a whole, or not at all.
    return {name: named(features[name], _value(table[name][row])) for name in table.column_names}


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:  # said to be text, which nothing checked when it was written
        return scalar.as_buffer().to_pybytes()


def named(feature: Any, value: Any) -> object:
    """The name of a class, the text of bytes in UTF-8, or the value itself; None for NaN, a missing number."""
    from datasets import ClassLabel

    if isinstance(value, bytes):  # other bytes may be of a column that nobody reads
        with suppress(UnicodeDecodeError):
            return value.decode()
    if isinstance(value, float) and math.isnan(value):
        return None
    return feature.int2str(value) if isinstance(feature, ClassLabel) and value is not None else value

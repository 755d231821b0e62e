"""A node's own records, each read on its own: no record decides how, or whether, another is read.

A record is one line of a CSV, TSV or JSONL file, or one row of a Parquet file. Whatever it holds, it ends where its
line ends: if a quoted field could go on over lines, one open quote would take the records that follow. So a file with
line breaks within its fields is written again, by `write_lines`, before it can be a node's.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fedpriv.config import Encoding, Separator
from fedpriv.data._layout import SEPARATORS, LayoutError, codec_of, decoded, separator_of
from fedpriv.data._tables import FORMATS, load_table, separator_asked, suffix_of
from fedpriv.data._text import DataSource, as_text, from_messages
from fedpriv.errors import InputError, is_memory_failure
from fedpriv.files import new_file

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_Row = Mapping[str, object]
# The number of a record's line or row, and what reads it; it may raise anything.
_Place = tuple[int, Callable[[], _Row]]


@dataclass(frozen=True)
class OwnRecord:
    """A record of a node.

    Attributes:
        text: may be empty; in instruction data, what was said before the response.
        pair: the second text, or what the record has as its response; empty if there is none.
        label: the name of its label; None if it is missing. In instruction data, the same as `pair`.
        person: whom it is about; empty if the unit is the record.
        place: its line or row, from 1, which the records before it decide; to be shown to the operator alone.
    """

    text: str
    pair: str
    label: str | None
    person: str = ""
    place: int = field(default=0, compare=False)


def read(source: DataSource) -> list[OwnRecord | InputError]:
    """The records of a file in their order; for one that cannot be read, the reason in its place.

    Guarantee: adding or removing a line, or a row of a Parquet file, adds or removes one record; of the others, it
    changes the number of their place alone.
    Blank lines are no records. Values are as written: no type is inferred from other records.

    Args:
        source: a file, possibly gzipped; `label_column` is empty where no labels are wanted.

    Raises:
        InputError: for what no record decides: there is no such file, its format is unknown, it is damaged as a whole,
            or its header lacks a column.
    """
    path = Path(source.data).expanduser()
    suffix = suffix_of(path)
    if not path.is_file():
        raise InputError(f"data = {source.data!r}: no such file")
    if suffix not in FORMATS:
        raise InputError(f"data = {source.data!r}: unknown format; use {', '.join(FORMATS)}, gzip allowed")
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            return [_record(place, row, source) for place, row in _places(file, suffix, source)]
    except InputError:
        raise
    except LayoutError as error:
        raise InputError(f"data = {source.data!r}: {error}") from None
    except Exception as error:  # the libraries raise errors of many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"data = {source.data!r}: cannot be read ({reason})") from None


def read_strictly(source: DataSource) -> list[OwnRecord]:
    """The same of a file that its operator can still mend: every record must be readable.

    Raises:
        InputError: as `read`; or the file has no records, or one that cannot be read.
    """
    records = []
    for record in read(source):
        if isinstance(record, InputError):
            raise InputError(
                f"data = {source.data!r}: {record}; mend it, name --separator or --encoding or, if fields go on over "
                "several lines, write the file again with `fedpriv data lines`"
            )
        records.append(record)
    if not records:
        raise InputError(f"data = {source.data!r}: holds no records")
    return records


def write_lines(source: str, path: Path, *, separator: Separator = "auto", encoding: Encoding = "utf-8") -> int:
    """Write the records of any table that `load_table` reads to a JSONL file, one a line; how many there are.

    Args:
        source: a file, parsed as a whole, so that a quoted field may go on over lines.
        path: of a new file, which its user alone may read.
        separator: of the file, as for `read_table`.
        encoding: as there.

    Raises:
        InputError: the table cannot be read, or the path is taken.
    """
    table = load_table(source, key="file", separator=separator, encoding=encoding)
    try:
        with new_file(path, mode=0o600) as file:
            for row in table:
                values = {name: _named(table.features[name], value) for name, value in row.items()}
                file.write(f"{json.dumps(values, default=str)}\n".encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return len(table)


def _record(place: int, row: Callable[[], _Row], source: DataSource) -> OwnRecord | InputError:
    """The record at a place, or why it cannot be read."""
    where = f"{source.unit} {place}"
    try:
        values = row()
        person = as_text(values[source.person_column]) if source.person_column else ""
        if source.instructs:
            return replace(_instruction(values, source), person=person, place=place)
        label = values[source.label_column] if source.label_column else None
        return OwnRecord(
            text=as_text(values[source.text_column]),
            pair=as_text(values[source.text_pair_column]) if source.text_pair_column else "",
            label=None if label is None else str(label),
            person=person,
            place=place,
        )
    except KeyError as error:
        return InputError(f"{where}: has no {error}")
    except Exception as error:  # whatever one record holds, the others are read
        if is_memory_failure(error):
            raise
        return InputError(f"{where}: cannot be read ({(str(error).splitlines() or [type(error).__name__])[0]})")


def _instruction(values: _Row, source: DataSource) -> OwnRecord:
    if source.messages_column:
        said, response = from_messages(values[source.messages_column])
    else:
        said, response = as_text(values[source.prompt_column]), as_text(values[source.response_column])
    return OwnRecord(text=said, pair=response, label=response or None)


def _places(file: BinaryIO | gzip.GzipFile, suffix: str, source: DataSource) -> Iterator[_Place]:
    if suffix == ".parquet":
        return _rows(file, source)
    if FORMATS[suffix] == "csv":
        return _separated(file, source)
    return ((number, partial(_object, line, source.encoding)) for number, line in _lines(file))


def _lines(file: BinaryIO | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """The numbers, from 1, and bytes of the lines that are not blank."""
    return ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _object(line: bytes, encoding: Encoding) -> _Row:
    # A byte order mark is dropped wherever it stands: a line before the first must not change the first.
    values = json.loads(line.decode(codec_of(encoding)))
    if not isinstance(values, dict):
        raise ValueError("is not a JSON object")
    return values


def _separated(file: BinaryIO | gzip.GzipFile, source: DataSource) -> Iterator[_Place]:
    lines = _lines(file)
    number, first = next(lines, (1, b""))
    header = decoded(first, source.encoding, line=number)
    # The header alone decides: no record decides how another is read.
    delimiter = SEPARATORS[separator_of(header, separator_asked(Path(source.data), source.separator))]
    names = _fields(header, delimiter) if header else []
    _require_columns(names, source)
    for number, line in lines:
        yield number, partial(_named_fields, names, line, delimiter, source.encoding)


def _named_fields(names: Sequence[str], line: bytes, delimiter: str, encoding: Encoding) -> _Row:
    fields = _fields(line.decode(encoding), delimiter)
    if len(fields) != len(names):
        raise ValueError(f"has {len(fields)} fields, and the header has {len(names)}")
    # Values as written: NA is a name, and 007 differs from 7; only an empty field is missing.
    return {name: field or None for name, field in zip(names, fields, strict=True)}


def _fields(line: str, delimiter: str) -> list[str]:
    """The fields of one line.

    Raises:
        csv.Error: a quote is open at its end, or closed within a field.
    """
    (fields,) = csv.reader([line.rstrip("\r\n")], delimiter=delimiter, strict=True)
    return fields


def _rows(file: BinaryIO | gzip.GzipFile, source: DataSource) -> Iterator[_Place]:
    # Deferred: most nodes have no Parquet file.
    from datasets import Features
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(file)
    _require_columns(parquet.schema_arrow.names, source)
    table = parquet.read(columns=list(dict.fromkeys(column for _, column in _columns(source))))
    features = Features.from_arrow_schema(table.schema)
    for row in range(len(table)):
        yield row + 1, partial(_values, table, features, row)


def _values(table: pa.Table, features: datasets.Features, row: int) -> _Row:
    # One value at a time: a column is converted as a whole, or not at all.
    return {name: _named(features[name], table[name][row].as_py()) for name in table.column_names}


def _named(feature: object, value: object) -> object:
    """The name of a class, or the value itself."""
    from datasets import ClassLabel

    return feature.int2str(value) if isinstance(feature, ClassLabel) and value is not None else value


def _columns(source: DataSource) -> list[tuple[str, str]]:
    """(setting, name) of the columns that the file must have."""
    plain, instructions = (
        ("text_column", "text_pair_column", "label_column"),
        ("prompt_column", "response_column", "messages_column"),
    )
    read = (*(instructions if source.instructs else plain), "person_column")
    columns = [(key, getattr(source, key)) for key in read]
    return [(key, column) for key, column in columns if column]


def _require_columns(names: Sequence[str], source: DataSource) -> None:
    for key, column in _columns(source):
        if column not in names:
            raise InputError(f"{key} = {column!r}: {source.data} has no such column; it has {', '.join(names)}")

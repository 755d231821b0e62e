"""The records of a CSV, JSONL or Parquet file, or of the Hugging Face Hub: as a table, or as a node reads its own.

Of a table every record must be readable. Of a node's file each row is a record, or there is a reason why it is none.
"""

import ctypes
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedpriv.config import DataSection, Encoding, RunConfig, Separator
from fedpriv.errors import InputError, first_line
from fedpriv.files import new_file
from fedpriv.learning.adapters import hub_problem, quiet_hub
from fedpriv.learning.data import _rows
from fedpriv.learning.data.text import (
    DataSource,
    TextData,
    as_text,
    from_choices,
    from_messages,
    response_of,
    unpacked_choices,
)


@dataclass(frozen=True)
class Table:
    """The records of a file or of a data set on the Hub, and how the file was read.

    Attributes:
        columns: {name: [records] values}; the names of classes, and None where a value is missing.
        lines: the line at which each record begins, from 1; empty where records are no lines.
        separator: of a CSV file; None of any other.
        lacking: {column: the first place without it} where records name their own columns.
    """

    source: str
    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int] = ()
    separator: Separator | None = None
    lacking: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def decimal_commas(self) -> list[str]:
        """The columns of numbers that are written with a decimal comma."""
        if self.separator is None or self.separator == "comma":
            return []
        return [name for name, values in self.columns.items() if _rows.is_decimal_comma(values)]

    def names_of(self, column: str) -> list[str | None]:
        """[records] the values of a column as texts, such as names of labels; None where one is missing."""
        return [None if value is None else str(value) for value in self.columns[column]]

    def require(self, columns: Sequence[tuple[str, str]]) -> None:
        """Refuse a table that lacks one of the (configuration key, column) pairs; an empty column name is skipped."""
        _rows.require_columns(self.columns, columns, self.source)
        for key, column in columns:
            if column and column in self.lacking:
                raise InputError(f"{key} = {column!r}: {self.lacking[column]} of {self.source} has no such column")
            if any(isinstance(value, bytes) for value in self.columns.get(column, ())):
                raise InputError(f"{key} = {column!r}: {self.source} has bytes there that are no text in UTF-8")


def read_table(
    source: str, *, key: str = "data", separator: Separator = "auto", encoding: Encoding = "utf-8", spans: bool = False
) -> Table:
    """The records of a file, possibly gzipped, or of the train split of a data set on the Hub.

    A file is read as a node reads its own, so what a simulation accepts a node accepts too; but here every record must
    be readable. No copy of a private file is made.

    Args:
        source: a path, or a name on the Hub; `name:split` selects another split.
        key: the configuration key to name in errors.
        separator: as for `opened`, as are `encoding` and `spans`.

    Raises:
        InputError: there is no such file or data set, its format is unknown, it is empty, or a record is unreadable.
    """
    path = Path(source).expanduser()
    if not path.is_file() and not (_rows.suffix_of(path) in _rows.FORMATS or path.is_absolute() or path.exists()):
        return Table(source, _from_hub(source, key))
    columns: dict[str, list[object]] = {}
    lacking: dict[str, str] = {}
    places: list[int] = []
    unit = _rows.unit_of(path)
    with _rows.opened(source, key=key, separator=separator, encoding=encoding, spans=spans) as rows:
        for place, row in rows.places:
            try:
                values = row()
            except Exception as error:
                raise InputError(f"{key} = {source!r}: {_rows.unreadable(error, f'{unit} {place}')}") from None
            for name in values:
                if name not in columns:
                    columns[name] = [None] * len(places)
                    if places:
                        lacking[name] = f"{unit} {places[0]}"
            for name, column in columns.items():
                if name not in values:
                    lacking.setdefault(name, f"{unit} {place}")
                column.append(values.get(name))
            places.append(place)
    if not places:
        raise InputError(f"{key} = {source!r}: holds no records")
    return Table(source, columns, places if unit == "line" else (), rows.separator, lacking)


def write_lines(source: str, path: Path, *, separator: Separator = "auto", encoding: Encoding = "utf-8") -> int:
    """Write the records of a table to a JSONL file, one a line; how many there are.

    Args:
        source: a file whose quoted fields may go on over lines, or a data set on the Hub.
        path: of a new file, which its user alone may read.
        separator: as for `read_table`, as is `encoding`.

    Raises:
        InputError: the table cannot be read, or the path is taken.
    """
    table = read_table(source, key="file", separator=separator, encoding=encoding, spans=True)
    try:
        with new_file(path, mode=0o600) as file:
            for values in zip(*table.columns.values(), strict=True):
                file.write(f"{json.dumps(dict(zip(table.columns, values, strict=True)), default=str)}\n".encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return len(table)


def _from_hub(source: str, key: str) -> dict[str, list[object]]:
    import datasets  # deferred: most runs and nodes read no such table

    name, _, split = source.partition(":")
    if problem := hub_problem(name, "dataset"):
        raise InputError(f"{key} = {source!r}: neither a file nor a data set on the Hub ({problem})")
    try:
        with quiet_hub():
            table = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the library raises errors of many types
        reason = first_line(error)
        raise InputError(f"{key} = {source!r}: neither a file nor a data set on the Hub ({reason})") from None
    return {
        name: [_rows.named(feature, value) for value in table.with_format("arrow")[name].to_pylist()]
        for name, feature in table.features.items()
    }


def release_memory() -> None:
    """Give back what is no longer used: the libraries of tables and of C keep it for further use."""
    if "pyarrow" in sys.modules:
        import pyarrow as pa

        pa.default_memory_pool().release_unused()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc alone has it
        trim(0)


def to_text(table: Table, config: RunConfig) -> TextData:
    """The texts and labels of the configured columns, empty where one is missing; InputError if one holds lists."""
    if config.instructs:
        prompts, responses = zip(*instructions(table, config), strict=True) if len(table) else ((), ())
        return TextData(texts=prompts, labels=(), pairs=responses)
    return TextData(
        texts=_texts(table, config, "text_column"),
        labels=tuple(map(str, table.names_of(config.label_column))) if config.task == "SEQ_CLS" else (),
        pairs=_texts(table, config, "text_pair_column") if config.text_pair_column else None,
    )


def instructions(table: Table, config: DataSection) -> list[tuple[str, str]]:
    """[records] what was said, and the response; both empty for a chat without one, or with one that is not allowed.

    Raises:
        InputError: a column of texts holds lists.
    """
    if config.messages_column:
        chats = [_chat(value) for value in table.columns[config.messages_column]]
    else:
        prompts = _texts(table, config, "prompt_column")
        if config.choice_columns:
            return list(zip(prompts, _choices(table, config), strict=True))
        chats = list(zip(prompts, _texts(table, config, "response_column"), strict=True))
    allowed = [response_of(response, labels=config.labels, answers=config.answers) for _, response in chats]
    return [
        ("", "") if response is None else (prompt, response)
        for (prompt, _), response in zip(chats, allowed, strict=True)
    ]


def _choices(table: Table, config: DataSection) -> list[str]:
    """[records] the choices, packed; InputError for a record that has none, no right one, or more than may be."""
    found = []
    rights, columns = table.columns[config.response_column], [table.columns[name] for name in config.choice_columns]
    for row, (right, *values) in enumerate(zip(rights, *columns, strict=True)):
        where = f"{table.source}: {f'line {table.lines[row]}' if table.lines else f'record {row + 1}'}"
        try:
            found.append(from_choices(values, right, config.labels))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"choice_columns = {','.join(config.choice_columns)}: {where} {first_line(error)}"
            ) from None
        if (number := len(unpacked_choices(found[-1])[1])) > config.max_choices:
            raise InputError(f"max_choices = {config.max_choices}: {where} has {number} choices; use the most of any")
    return found


def _chat(value: object) -> tuple[str, str]:
    """The prompt and the response of one record's messages, both empty if it has none."""
    try:
        return from_messages(value)
    except (ValueError, RecursionError):
        return "", ""


def _texts(table: Table, config: DataSection, key: str) -> tuple[str, ...]:
    """The texts of the column that a configuration key names."""
    column = getattr(config, key)
    try:
        return tuple(map(as_text, table.columns[column]))
    except ValueError as error:
        raise InputError(f"{key} = {column!r}: {error}") from None


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


def read_own(source: DataSource) -> list[OwnRecord | InputError]:
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
    asked = source.columns
    with _rows.opened(
        source.data, separator=source.separator, encoding=source.encoding, columns=[name for _, name in asked]
    ) as rows:
        if rows.names:  # else every record names its own
            _rows.require_columns(rows.names, asked, source.data)
        return [_record(place, row, source) for place, row in rows.places]


def read_strictly(source: DataSource) -> list[OwnRecord]:
    """The same of a file that its operator can still mend: InputError if it has no record, or an unreadable one."""
    records = []
    for record in read_own(source):
        if isinstance(record, InputError):
            raise InputError(f"data = {source.data!r}: {record}")
        records.append(record)
    if not records:
        raise InputError(f"data = {source.data!r}: holds no records")
    return records


def _record(place: int, row: Callable[[], _rows.Row], source: DataSource) -> OwnRecord | InputError:
    """The record at a place, or why it cannot be read."""
    try:
        values = row()
        person = as_text(values[source.person_column]) if source.person_column else ""
        if source.instructs:
            return replace(_instruction(values, source), person=person, place=place)
        label = values[source.label_column] if source.label_column else None
        return OwnRecord(
            text=as_text(values[source.text_column]),
            pair=as_text(values[source.text_pair_column]) if source.text_pair_column else "",
            label=None if label is None else as_text(label),
            person=person,
            place=place,
        )
    except Exception as error:  # whatever one record holds, the others are read
        return InputError(_rows.unreadable(error, f"{source.unit} {place}"))


def _instruction(values: _rows.Row, source: DataSource) -> OwnRecord:
    if source.messages_column:
        said, response = from_messages(values[source.messages_column])
    else:
        said, right = as_text(values[source.prompt_column]), values[source.response_column]
        if source.choice_columns:
            choices = from_choices([values[name] for name in source.choice_columns], right, source.choice_names)
            return OwnRecord(text=said, pair=choices, label=as_text(right).strip())
        response = as_text(right)
    return OwnRecord(text=said, pair=response, label=response or None)

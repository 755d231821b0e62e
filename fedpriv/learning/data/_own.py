"""A node's own records: what each row of its file is as a record, or why it is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fedpriv.errors import InputError
from fedpriv.learning.data._rows import Row, opened, require_columns, unreadable
from fedpriv.learning.data._text import DataSource, as_text, from_messages


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
    asked = source.columns
    with opened(
        source.data, separator=source.separator, encoding=source.encoding, columns=[name for _, name in asked]
    ) as rows:
        if rows.names:  # else every record names its own
            require_columns(rows.names, asked, source.data)
        return [_record(place, row, source) for place, row in rows.places]


def read_strictly(source: DataSource) -> list[OwnRecord]:
    """The same of a file that its operator can still mend: every record must be readable.

    Raises:
        InputError: as `read`; or the file has no records, or one that cannot be read.
    """
    records = []
    for record in read(source):
        if isinstance(record, InputError):
            raise InputError(f"data = {source.data!r}: {record}")
        records.append(record)
    if not records:
        raise InputError(f"data = {source.data!r}: holds no records")
    return records


def _record(place: int, row: Callable[[], Row], source: DataSource) -> OwnRecord | InputError:
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
            label=None if label is None else str(label),
            person=person,
            place=place,
        )
    except Exception as error:  # whatever one record holds, the others are read
        return InputError(unreadable(error, f"{source.unit} {place}"))


def _instruction(values: Row, source: DataSource) -> OwnRecord:
    if source.messages_column:
        said, response = from_messages(values[source.messages_column])
    else:
        said, response = as_text(values[source.prompt_column]), as_text(values[source.response_column])
    return OwnRecord(text=said, pair=response, label=response or None)

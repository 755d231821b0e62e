"""Tables of records from a CSV, JSONL or Parquet file or from the Hugging Face Hub, by the datasets library."""

from __future__ import annotations

import gzip
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.adapters import hub_problem, quiet_hub
from fedpriv.config import DataSection, Encoding, RunConfig, Separator
from fedpriv.data._layout import LayoutError, decoded, is_decimal_comma, split
from fedpriv.data._text import TextData, as_text, from_messages, response_of
from fedpriv.errors import InputError
from fedpriv.texts import visible

if TYPE_CHECKING:
    import datasets

FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""{ending of a file's name: the format of its table, by its name in the datasets library}."""


def suffix_of(path: Path) -> str:
    """The ending of a file's name before a possible `.gz`, in lower case."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


@dataclass(frozen=True)
class Table:
    """The records of a file or of a data set on the Hub, and how the file was read.

    Attributes:
        source: as it was asked for.
        records: in their order.
        lines: the line at which each record begins, from 1; empty where records are no lines.
        separator: of a CSV file; None of any other.
    """

    source: str
    records: datasets.Dataset
    lines: Sequence[int] = ()
    separator: Separator | None = None

    @property
    def decimal_commas(self) -> list[str]:
        """The columns of numbers that are written with a decimal comma."""
        if self.separator is None or self.separator == "comma":
            return []
        return [name for name in self.records.column_names if is_decimal_comma(values_of(self.records, name))]


def load_table(
    source: str, *, key: str = "data", separator: Separator = "auto", encoding: Encoding = "utf-8"
) -> datasets.Dataset:
    """The records that `read_table` reads."""
    return read_table(source, key=key, separator=separator, encoding=encoding).records


def read_table(source: str, *, key: str = "data", separator: Separator = "auto", encoding: Encoding = "utf-8") -> Table:
    """The records of a file, possibly gzipped, or of the train split of a data set on the Hub.

    No trace of a private file is left behind: the library's cache is in a temporary folder that is deleted.

    Args:
        source: a path, or a name on the Hub; `name:split` selects another split.
        key: the configuration key to name in errors.
        separator: of a CSV file; with `auto` its header decides, and a TSV file has tabs.
        encoding: of a CSV or JSONL file.

    Raises:
        InputError: there is no such file or data set, its format is unknown, or it is unreadable or empty.
    """
    path = Path(source).expanduser()
    suffix = suffix_of(path)
    if not path.is_file():
        if suffix in FORMATS or path.is_absolute() or path.exists():
            raise InputError(f"{key} = {source!r}: no such file")
        return Table(source, _from_hub(source, key))
    if suffix not in FORMATS:
        raise InputError(f"{key} = {source!r}: unknown format; use {', '.join(FORMATS)}, gzip allowed")
    if not path.stat().st_size:
        raise InputError(f"{key} = {source!r}: holds no records")
    try:
        table = (
            _from_fields(source, path, separator_asked(path, separator), encoding)
            if FORMATS[suffix] == "csv"
            else Table(source, _from_library(path, FORMATS[suffix], encoding))
        )
    except LayoutError as error:
        raise InputError(f"{key} = {source!r}: {error}") from None
    except Exception as error:  # the library raises errors of many types
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        if "corresponds to no data" in reason:
            raise InputError(f"{key} = {source!r}: holds no records") from None
        raise InputError(f"{key} = {source!r}: cannot be read ({reason})") from None
    if not len(table.records):
        raise InputError(f"{key} = {source!r}: holds no records")
    return table


def separator_asked(path: Path, separator: Separator) -> Separator:
    """The separator that is asked for, or tab if the name of the file says so."""
    return "tab" if separator == "auto" and suffix_of(path) == ".tsv" else separator


def _from_fields(source: str, path: Path, separator: Separator, encoding: Encoding) -> Table:
    import datasets  # deferred, here and below: the embedded corpus and most nodes read no table
    import pyarrow as pa

    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        fields = split(decoded(file.read(), encoding), separator)
    columns = {name: pa.array(column, pa.string()) for name, column in zip(fields.names, fields.columns, strict=True)}
    # A fingerprint of the content, which nothing asks for, would take several times the table's memory.
    records = datasets.Dataset(pa.table(columns), fingerprint=uuid.uuid4().hex)
    return Table(source, records, fields.lines, fields.separator)


def _from_library(path: Path, format_: str, encoding: Encoding) -> datasets.Dataset:
    import datasets

    options = {"encoding": encoding} if format_ == "json" else {}
    bars_were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix="fedpriv-data-") as cache:
            return datasets.load_dataset(
                format_, data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True, **options
            )
    finally:
        if not bars_were_disabled:
            datasets.enable_progress_bars()


def _from_hub(source: str, key: str) -> datasets.Dataset:
    import datasets

    name, _, split = source.partition(":")
    if problem := hub_problem(name, "dataset"):
        raise InputError(f"{key} = {source!r}: neither a file nor a data set on the Hub ({problem})")
    try:
        with quiet_hub():
            return datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the library raises errors of many types
        reason = str(error).splitlines()[0]
        raise InputError(f"{key} = {source!r}: neither a file nor a data set on the Hub ({reason})") from None


def release_memory() -> None:
    """Give back what tables that are no longer used took: their library keeps it for further ones."""
    if "pyarrow" in sys.modules:
        import pyarrow as pa

        pa.default_memory_pool().release_unused()


def require_columns(table: datasets.Dataset, columns: Sequence[tuple[str, str]], source: str) -> None:
    """Refuse a table that lacks one of the (configuration key, column) pairs; an empty column name is skipped."""
    for key, column in columns:
        if column and column not in table.column_names:
            raise InputError(
                f"{key} = {column!r}: {source} has no such column; it has {', '.join(map(visible, table.column_names))}"
            )


def values_of(table: datasets.Dataset, column: str) -> list[Any]:
    """[records] A column's values, read at once: iterating over it would decode row by row."""
    return list(table[column][:])


def labels_of(table: datasets.Dataset, column: str) -> list[str | None]:
    """The name of each record's label; None if it is missing."""
    import datasets

    feature = table.features[column]
    name = feature.int2str if isinstance(feature, datasets.ClassLabel) else str
    return [None if label is None else name(label) for label in values_of(table, column)]


def to_text(table: datasets.Dataset, config: RunConfig) -> TextData:
    """The texts and labels of the configured columns; a missing text counts as empty.

    Raises:
        InputError: a column of texts holds lists.
    """
    if config.instructs:
        prompts, responses = zip(*instructions(table, config), strict=True) if len(table) else ((), ())
        return TextData(texts=prompts, labels=(), pairs=responses)
    return TextData(
        texts=_texts(table, config, "text_column"),
        labels=tuple(map(str, labels_of(table, config.label_column))) if config.task == "SEQ_CLS" else (),
        pairs=_texts(table, config, "text_pair_column") if config.text_pair_column else None,
    )


def instructions(table: datasets.Dataset, config: DataSection) -> list[tuple[str, str]]:
    """[records] what was said, and the response; both empty for a chat without one, or with one that is not allowed.

    Raises:
        InputError: a column of texts holds lists.
    """
    if config.messages_column:
        chats = [_chat(value) for value in values_of(table, config.messages_column)]
    else:
        prompts = _texts(table, config, "prompt_column")
        chats = list(zip(prompts, _texts(table, config, "response_column"), strict=True))
    allowed = [response_of(response, labels=config.labels, answers=config.answers) for _, response in chats]
    return [
        ("", "") if response is None else (prompt, response)
        for (prompt, _), response in zip(chats, allowed, strict=True)
    ]


def _chat(value: object) -> tuple[str, str]:
    """The prompt and the response of one record's messages, both empty if it has none."""
    try:
        return from_messages(value)
    except (ValueError, RecursionError):
        return "", ""


def _texts(table: datasets.Dataset, config: DataSection, key: str) -> tuple[str, ...]:
    """The texts of the column that a configuration key names; the names of a column of classes."""
    import datasets

    column = getattr(config, key)
    feature = table.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(label or "" for label in labels_of(table, column))
    try:
        return tuple(as_text(value) for value in values_of(table, column))
    except ValueError as error:
        raise InputError(f"{key} = {column!r}: {error}") from None

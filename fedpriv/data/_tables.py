"""Tables of records from a CSV, JSONL or Parquet file or from the Hugging Face Hub, by the datasets library."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.adapters import hub_problem, quiet_hub
from fedpriv.config import DataSection, RunConfig
from fedpriv.data._text import TextData, as_text, from_messages, response_of
from fedpriv.errors import InputError

if TYPE_CHECKING:
    import datasets

FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""{ending of a file's name: the format of its table, by its name in the datasets library}."""


def suffix_of(path: Path) -> str:
    """The ending of a file's name before a possible `.gz`, in lower case."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def load_table(source: str, *, key: str = "data") -> datasets.Dataset:
    """The records of a file, possibly gzipped, or of the train split of a data set on the Hub.

    No trace of a private file is left behind: the library's cache is in a temporary folder that is deleted.

    Args:
        source: a path, or a name on the Hub; `name:split` selects another split.
        key: the configuration key to name in errors.

    Raises:
        InputError: there is no such file or data set, its format is unknown, or it is unreadable or empty.
    """
    path = Path(source).expanduser()
    suffix = suffix_of(path)
    if not path.is_file():
        if suffix in FORMATS or path.is_absolute() or path.exists():
            raise InputError(f"{key} = {source!r}: no such file")
        return _from_hub(source, key)
    if suffix not in FORMATS:
        raise InputError(f"{key} = {source!r}: unknown format; use {', '.join(FORMATS)}, gzip allowed")
    if not path.stat().st_size:
        raise InputError(f"{key} = {source!r}: holds no records")
    import datasets  # deferred, here and below: the embedded corpus and most nodes read no table

    bars_were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix="fedpriv-data-") as cache:
            if FORMATS[suffix] == "csv":
                import pandas as pd

                # Values as written: NA is a name, and 007 differs from 7; only an empty field is missing.
                frame = pd.read_csv(
                    path, sep="\t" if suffix == ".tsv" else ",", dtype=str, keep_default_na=False, na_values=[""]
                )
                if len(frame) and not isinstance(frame.index, pd.RangeIndex):
                    # Its surplus would be taken for an index, so that columns shift; of later records pandas tells.
                    num_fields = frame.index.nlevels + len(frame.columns)
                    raise ValueError(f"record 1 has {num_fields} fields, but the header names {len(frame.columns)}")
                table = datasets.Dataset.from_pandas(frame, preserve_index=False)
            else:
                table = datasets.load_dataset(
                    FORMATS[suffix], data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True
                )
    except Exception as error:  # the library raises errors of many types
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        if "corresponds to no data" in reason:
            raise InputError(f"{key} = {source!r}: holds no records") from None
        raise InputError(f"{key} = {source!r}: cannot be read ({reason})") from None
    finally:
        if not bars_were_disabled:
            datasets.enable_progress_bars()
    if not len(table):
        raise InputError(f"{key} = {source!r}: holds no records")
    return table


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


def require_columns(table: datasets.Dataset, columns: Sequence[tuple[str, str]], source: str) -> None:
    """Refuse a table that lacks one of the (configuration key, column) pairs; an empty column name is skipped."""
    for key, column in columns:
        if column and column not in table.column_names:
            raise InputError(f"{key} = {column!r}: {source} has no such column; it has {', '.join(table.column_names)}")


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

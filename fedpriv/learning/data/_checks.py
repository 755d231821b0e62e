"""Summaries of a table of records or of instruction data, before anything is registered: what a run would see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpriv.config import RunConfig
from fedpriv.learning.data._tables import Table, read_table, to_text
from fedpriv.learning.data._text import TextData

if TYPE_CHECKING:
    from fedpriv.learning.data.chat import Row


# A length that no record reaches.
UNCUT = 2**40


def describe(
    source: str | Table,
    *,
    text: str,
    label: str = "",
    text_pair: str = "",
    client: str = "",
    person: str = "",
    tokenizer: Any = None,
    max_length: int = 64,
) -> dict[str, Any]:
    """The numbers of records, labels, clients and persons, the lengths of the texts, and how many are cut or repeated.

    Args:
        source: a file, a data set on the Hub, or a table that was read.
        text: column with the text.
        label: column with the label, or empty.
        text_pair: column with the second text, or empty; a record repeats another if both texts do.
        client: column with the holder of each record, or empty.
        person: column that says whom a record is about, or empty.
        tokenizer: of the model that would read the records; None counts words.
        max_length: the most tokens of a record, special ones included.

    Raises:
        InputError: the file or a column is missing.
    """
    table = read_table(source, key="file") if isinstance(source, str) else source
    columns = [("--text", text), ("--text-pair", text_pair), ("--label", label), ("--client", client)]
    table.require([*columns, ("--person", person)])
    texts = _texts(table, text)
    pairs = _texts(table, text_pair) if text_pair else None
    records = list(zip(texts, pairs or [""] * len(texts), strict=True))
    result: dict[str, Any] = {"records": len(table), "empty_texts": sum(not value.split() for value in texts)}
    if pairs is not None:
        result["empty_second_texts"] = sum(not value.split() for value in pairs)
    result["duplicate_texts" if pairs is None else "duplicate_pairs"] = len(records) - len(set(records))
    if tokenizer is None:
        result["words"] = _percentiles([len(first.split()) + len(second.split()) for first, second in records])
    else:
        result |= _in_tokens(tokenizer, texts, pairs, max_length)
    if label:
        values = table.names_of(label)
        result["records_without_label"] = sum(value is None for value in values)
        result["labels"] = counts(values)
    if client:
        result["clients"] = counts(table.columns[client])
    return result | _persons(table, person, client)


def _persons(table: Table, person: str, client: str) -> dict[str, int]:
    """The number of persons, and how many have several records, or records at several clients.

    Args:
        table: the records.
        person: column that says whom a record is about; nothing is counted if it is empty.
        client: column with the holder of each record, or empty.
    """
    if not person:
        return {}
    named = [value for value in table.names_of(person) if value is not None]
    records = Counter(named)
    found = {
        "persons": len(records),
        "records_without_person": len(table) - len(named),
        "persons_with_several_records": sum(number > 1 for number in records.values()),
        "most_records_of_a_person": max(records.values(), default=0),
    }
    if client:
        pairs = zip(table.names_of(person), table.names_of(client), strict=True)
        places = Counter(name for name, _ in {(name, at) for name, at in pairs if name is not None})
        found["persons_at_several_clients"] = sum(number > 1 for number in places.values())
    return found


def _percentiles(values: Sequence[int]) -> dict[str, float]:
    """Minimum, median, 95th percentile and maximum; empty for no values."""
    return {f"p{p}": float(np.percentile(values, p)) for p in (0, 50, 95, 100)} if values else {}


def _texts(table: Table, column: str) -> list[str]:
    return [value or "" for value in table.names_of(column)]


def _in_tokens(tokenizer: Any, texts: list[str], pairs: list[str] | None, max_length: int) -> dict[str, Any]:
    """Lengths in tokens, special ones included, and how many records are longer than `max_length`."""
    from fedpriv.learning.data.records import encode  # deferred: it imports torch

    rows = [row for row in encode(tokenizer, texts, pairs, UNCUT) if row is not None]
    lengths = [len(row["input_ids"]) for row in rows]
    return {
        "tokens": _percentiles(lengths),
        "max_length": max_length,
        "records_cut": sum(length > max_length for length in lengths),
        "unusable": len(texts) - len(rows),
    }


def counts(values: Any) -> dict[str, int]:
    """The number of times that each value occurs, most frequent first."""
    return dict(Counter(str(value) for value in values if value is not None).most_common())


NUM_SHOWN = 3
"""Records that are shown, the first usable ones."""

Part = tuple[str, bool]
"""Consecutive tokens as text, and whether they are learned."""


def describe_instructions(
    config: RunConfig, *, table: Table | None = None, client: str = "", person: str = "", tokenizer: Any = None
) -> tuple[dict[str, Any], list[list[Part]]]:
    """The numbers of records and clients, the lengths of prompts and responses; and records as the model sees them.

    Args:
        config: with `data`, columns, prompts and `max_length`.
        table: that was read of `data`; None reads it.
        client: column with the holder of each record, or empty.
        person: column that says whom a record is about, or empty.
        tokenizer: that `ChatFormat.check` accepts; None counts words alone and shows no records.

    Raises:
        InputError: the file or a column is missing.
    """
    table = table or read_table(config.data, key="file")
    columns = [("--prompt", config.prompt_column), ("--response", config.response_column)]
    columns += [("--messages", config.messages_column), ("--client", client), ("--person", person)]
    table.require(columns)
    data = to_text(table, config)
    responses = data.pairs or ()
    result: dict[str, Any] = {
        "records": len(data),
        "empty_responses": sum(not text.strip() for text in responses),
        "duplicate_prompts": len(data) - len(set(data.texts)),
    }
    if not config.messages_column:
        result["words_of_prompts"] = _percentiles([len(text.split()) for text in data.texts])
    result["words_of_responses"] = _percentiles([len(text.split()) for text in responses])
    if client:
        result["clients"] = counts(table.columns[client])
    result |= _persons(table, person, client)
    if tokenizer is None:
        return result, []
    figures, encoded = _chats_in_tokens(data, config, tokenizer)
    shown = [row for row in encoded if row is not None][:NUM_SHOWN]
    return result | figures, [_parts_of(tokenizer, row) for row in shown]


def _parts_of(tokenizer: Any, row: dict[str, list[int]]) -> list[Part]:
    """The record as text, special tokens included, in runs of tokens that are learned or not."""
    from fedpriv.learning.data.chat import RESPONSE_MASK  # deferred, as above

    mask, ids = row[RESPONSE_MASK], row["input_ids"]
    cuts = [0, *(place for place in range(1, len(ids)) if mask[place] != mask[place - 1]), len(ids)]
    return [(tokenizer.decode(ids[a:b]), bool(mask[a])) for a, b in pairwise(cuts)]


def _chats_in_tokens(data: TextData, config: RunConfig, tokenizer: Any) -> tuple[dict[str, Any], list[Row]]:
    """Figures on how the records fit within `max_length` tokens, and the records."""
    from fedpriv.learning.data.chat import RESPONSE_MASK
    from fedpriv.learning.data.records import chat_format_of

    chat = chat_format_of(config)
    whole = chat.encode(tokenizer, data.texts, data.pairs, UNCUT)
    rows = chat.encode(tokenizer, data.texts, data.pairs, config.max_length)
    both = [(a, b) for a, b in zip(whole, rows, strict=True) if a is not None]
    kept = [(a, b) for a, b in both if b is not None]
    learned = [(sum(a[RESPONSE_MASK]), sum(b[RESPONSE_MASK])) for a, b in kept]
    prompts = [len(a["input_ids"]) - n > len(b["input_ids"]) - m for (a, b), (n, m) in zip(kept, learned, strict=True)]
    return {
        "tokens": _percentiles([len(a["input_ids"]) for a, _ in both]),
        "tokens_of_responses": _percentiles([sum(a[RESPONSE_MASK]) for a, _ in both]),
        "max_length": config.max_length,
        "prompts_cut": sum(prompts),
        "responses_cut": sum(n > m for n, m in learned),
        "responses_cut_away": len(both) - len(kept),
        "unusable": sum(row is None for row in rows),
    }, rows

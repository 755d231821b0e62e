"""A summary of instruction data, and some records as a model sees them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fedpriv.config import RunConfig
from fedpriv.data.checks import UNCUT, counts, percentiles, persons
from fedpriv.data.encoding import chat_format_of
from fedpriv.data.records import RESPONSE_MASK, Row
from fedpriv.data.tables import load_table, require_columns, to_text
from fedpriv.data.text import TextData

NUM_SHOWN = 3
"""Records that are shown, the first usable ones."""

Part = tuple[str, bool]
"""Consecutive tokens as text, and whether they are learned."""


def describe_instructions(
    config: RunConfig, *, client: str = "", person: str = "", tokenizer: Any = None
) -> tuple[dict[str, Any], list[list[Part]]]:
    """The numbers of records and clients, the lengths of prompts and responses; and records as the model sees them.

    Args:
        config: with `data`, columns, prompts and `max_length`.
        client: column with the holder of each record, or empty.
        person: column that says whom a record is about, or empty.
        tokenizer: that `ChatFormat.check` accepts; None counts words alone and shows no records.

    Raises:
        InputError: the file or a column is missing.
    """
    table = load_table(config.data, key="file")
    columns = [("--prompt", config.prompt_column), ("--response", config.response_column)]
    columns += [("--messages", config.messages_column), ("--client", client), ("--person", person)]
    require_columns(table, columns, config.data)
    data = to_text(table, config)
    responses = data.pairs or ()
    result: dict[str, Any] = {
        "records": len(data),
        "empty_responses": sum(not text.strip() for text in responses),
        "duplicate_prompts": len(data) - len(set(data.texts)),
    }
    if not config.messages_column:
        result["words_of_prompts"] = percentiles([len(text.split()) for text in data.texts])
    result["words_of_responses"] = percentiles([len(text.split()) for text in responses])
    if client:
        result["clients"] = counts(table[client])
    result |= persons(table, person, client)
    if tokenizer is None:
        return result, []
    figures, rows = _in_tokens(data, config, tokenizer)
    shown = [row for row in rows if row is not None][:NUM_SHOWN]
    return result | figures, [parts_of(tokenizer, row) for row in shown]


def parts_of(tokenizer: Any, row: dict[str, list[int]]) -> list[Part]:
    """The record as text, special tokens included, in runs of tokens that are learned or not."""
    mask, ids = row[RESPONSE_MASK], row["input_ids"]
    cuts = [0, *(place for place in range(1, len(ids)) if mask[place] != mask[place - 1]), len(ids)]
    return [(tokenizer.decode(ids[a:b]), bool(mask[a])) for a, b in pairwise(cuts)]


def _in_tokens(data: TextData, config: RunConfig, tokenizer: Any) -> tuple[dict[str, Any], list[Row]]:
    """What becomes of the records within `max_length` tokens, and the records."""
    chat = chat_format_of(config)
    whole = chat.encode(tokenizer, data.texts, data.pairs, UNCUT)
    rows = chat.encode(tokenizer, data.texts, data.pairs, config.max_length)
    both = [(a, b) for a, b in zip(whole, rows, strict=True) if a is not None]
    kept = [(a, b) for a, b in both if b is not None]
    learned = [(sum(a[RESPONSE_MASK]), sum(b[RESPONSE_MASK])) for a, b in kept]
    prompts = [len(a["input_ids"]) - n > len(b["input_ids"]) - m for (a, b), (n, m) in zip(kept, learned, strict=True)]
    return {
        "tokens": percentiles([len(a["input_ids"]) for a, _ in both]),
        "tokens_of_responses": percentiles([sum(a[RESPONSE_MASK]) for a, _ in both]),
        "max_length": config.max_length,
        "prompts_cut": sum(prompts),
        "responses_cut": sum(n > m for n, m in learned),
        "responses_cut_away": len(both) - len(kept),
        "unusable": sum(row is None for row in rows),
    }, rows

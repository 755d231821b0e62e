"""The summary of a table that `fedpriv data check` shows before anything is registered, and a cleaned copy of it.

The summary is of what a run would see. In a copy, names have one spelling each, and no record is empty or there twice.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.files import write_new
from fedpriv.learning.data._mistakes import (
    CheckedColumns,
    Finding,
    Roles,
    by_folded,
    folded,
    is_empty,
    misspelt_clients,
    mistakes,
    not_available,
    spelling_meant,
    spellings_of,
)
from fedpriv.learning.data._tables import Table, read_table, to_text
from fedpriv.learning.data.text import TextData, unpacked_choices, with_right

if TYPE_CHECKING:
    from fedpriv.learning.data.chat import Row

# A length that no record reaches.
UNCUT = 2**40

NUM_SHOWN = 3
"""Records that are shown, the first usable ones."""

MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
"""An encoder of 50 languages on the Hub."""

# Characters that are written without blanks, marks of punctuation, and words, whose vowels may be marks too.
_UNSPACED, _MARKS = r"\u3040-\u30ff\u3400-\u9fff", r"!-/:-@\[-`{-~\xa1\xab\xbb\xbf\u2000-\u206f\u3000-\u303f"
_WORD = re.compile(rf"[{_UNSPACED}{_MARKS}]|[^\s{_UNSPACED}{_MARKS}]+")
# So many texts tell the language. Of a word the bundled encoder makes 1.1 to 1.4 sub-words in English, on SST-2 and
# MedQuAD, 1.5 to 1.8 in French, Spanish and Italian, and 2 in German; it knows every sub-word of these.
_MOST_READ, _FOREIGN, _UNKNOWN = 1000, 1.45, 0.05

Part = tuple[str, bool]
"""Consecutive tokens as text, and whether they are learned."""


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
        text: a column, as are `label`, `text_pair`, `client` and `person`, empty for none. A record repeats another if
            both its texts do.
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
    """The number of persons, and how many have several records, or several clients, if a column names any."""
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
        **subwords(tokenizer, texts),
    }


def subwords(tokenizer: Any, texts: Sequence[str]) -> dict[str, float]:
    """How many sub-words the tokenizer makes of a word, and the share of them that it does not know."""
    sample = [text for text in texts if text.strip()][:_MOST_READ]
    words = sum(len(_WORD.findall(text)) for text in sample)
    rows = tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"] if words else []
    tokens = sum(map(len, rows))
    unknown = sum(row.count(tokenizer.unk_token_id) for row in rows)
    return {"subwords_per_word": tokens / max(1, words), "unknown_share": unknown / max(1, tokens)}


def other_language(subwords_per_word: float, unknown_share: float) -> str:
    """A line that says that a model reads texts as it reads those of a foreign language; empty if it does not."""
    if subwords_per_word < _FOREIGN and unknown_share < _UNKNOWN:
        return ""
    return (
        f"texts: read like those of another language than the model's, {subwords_per_word:.1f} sub-words a word (the "
        f"bundled encoder is English, and has 1.1 to 1.4 there), {unknown_share:.0%} of them unknown; if they are, "
        f"name a multilingual encoder, such as model = {MULTILINGUAL!r}"
    )


def counts(values: Any) -> dict[str, int]:
    """The number of times that each value occurs, most frequent first."""
    return dict(Counter(str(value) for value in values if value is not None).most_common())


def describe_instructions(
    config: RunConfig, *, table: Table | None = None, client: str = "", person: str = "", tokenizer: Any = None
) -> tuple[dict[str, Any], list[list[Part]]]:
    """The numbers of records and clients, the lengths of prompts and responses; and records as the model sees them.

    Args:
        config: with `data`, columns, prompts and `max_length`.
        table: that was read of `data`; None reads it.
        client: a column, as is `person`; empty for none.
        tokenizer: that `ChatFormat.check` accepts; None counts words alone and shows no records.

    Raises:
        InputError: the file or a column is missing.
    """
    table = table or read_table(config.data, key="file")
    columns = [("--prompt", config.prompt_column), ("--response", config.response_column)]
    columns += [("--messages", config.messages_column), ("--client", client), ("--person", person)]
    columns += [("--choices", name) for name in config.choice_columns]
    table.require(columns)
    data, choices = to_text(table, config), {}
    if config.choice_columns:
        found = list(map(unpacked_choices, data.pairs or ()))
        choices = {"choices": counts(len(each) for _, each in found), "right": counts(right for right, _ in found)}
        data = with_right(data)
    responses = data.pairs or ()
    result: dict[str, Any] = {
        "records": len(data),
        "empty_responses": sum(not text.strip() for text in responses),
        "duplicate_prompts": len(data) - len(set(data.texts)),
    }
    if not config.messages_column:
        result["words_of_prompts"] = _percentiles([len(text.split()) for text in data.texts])
    result |= choices | {"words_of_responses": _percentiles([len(text.split()) for text in responses])}
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


@dataclass(frozen=True)
class Mended:
    """A cleaned copy.

    Attributes:
        changes: one line for each thing that was changed, with the number and the first places of its records.
        left: the findings that it still has.
    """

    num_records: int
    changes: list[str]
    left: list[Finding]


def write_mended(table: Table, roles: Roles, out: Path, *, keep: Collection[str] = ()) -> Mended:
    """Write a copy of a table in which names have one spelling, and every record has what a run needs, once.

    Names of clients, persons and labels lose blanks around them and take the most frequent spelling, or the label
    agreed on, but for those to keep; a likely misspelt client takes the name that is meant. Records without client,
    label or text go, those without a person or with one who looks like a missing one, and those that repeat an earlier
    one in every column. All else is as it was.

    Args:
        out: a new .csv or .jsonl file, which its user alone may read.

    Raises:
        InputError: the file has another ending or is taken, or a CSV file cannot hold a value.
    """
    if out.suffix.lower() not in (".csv", ".jsonl"):
        raise InputError(f"--fix {out}: must end in .csv or .jsonl")
    before = CheckedColumns.of(table, roles)
    values = {name: list(column) for name, column in table.columns.items()}
    changes = []
    for role, column in (("client", roles.client), ("label", roles.label), ("person", roles.person)):
        if column:
            meant = _meant(before, role, roles.classes if role == "label" else (), keep)
            changes += _renames(before, role, meant)
            values[column] = [meant.get(str(value), value) for value in values[column]]
    rows, dropped = _kept(before, values, roles)
    changes += dropped
    kept = {name: [column[row] for row in rows] for name, column in values.items()}
    _write(out, kept)
    after = CheckedColumns.of(replace(table, columns=kept, lines=()), roles)
    return Mended(len(rows), changes, mistakes(after))


def _meant(columns: CheckedColumns, role: str, agreed: Sequence[str], keep: Collection[str]) -> dict[str, str]:
    """{spelling: the one that is meant} of the names that change."""
    spellings = spellings_of(getattr(columns, f"{role}s"))
    meant: dict[str, str] = {}
    for group in by_folded(spellings).values():
        target = spelling_meant({name: len(spellings[name]) for name in group}, agreed)
        meant |= dict.fromkeys(group, target)
    looks = {"client": misspelt_clients(columns, spellings), "person": not_available(columns, "persons", spellings, ())}
    for finding in looks.get(role, ()):
        meant |= finding.renamed
    stay = {*keep, *agreed}
    return {name: target for name, target in meant.items() if name != target and name not in stay}


def _renames(columns: CheckedColumns, role: str, meant: Mapping[str, str]) -> list[str]:
    """A line for each name that changes."""
    spellings = spellings_of(getattr(columns, f"{role}s"))
    return [
        (f"renamed {role} {name!r} to {target!r}" if target else f"took {role} {name!r} for a missing one")
        + ("" if folded(name) == folded(target) else f", likely misspelt; --keep {name!r} leaves it")
        + f" ({columns.where(spellings[name])})"
        for name, target in meant.items()
    ]


def _kept(columns: CheckedColumns, values: Mapping[str, Sequence[Any]], roles: Roles) -> tuple[list[int], list[str]]:
    """The rows that stay, and a line for each reason why others do not."""
    needed = {roles.client: "client", roles.person: "person", roles.label: "label"} | dict.fromkeys(roles.texts, "text")
    needed.pop("", None)
    dropped: dict[str, list[int]] = defaultdict(list)
    seen: Counter[str] = Counter()
    kept = []
    for row, record in enumerate(zip(*values.values(), strict=True)):
        named = dict(zip(values, record, strict=True))
        lacking = next((what for name, what in needed.items() if is_empty(named[name])), None)
        seen[repr(record)] += 1
        if lacking is not None:
            dropped[f"without a {lacking}"].append(row)
        elif seen[repr(record)] > 1:
            dropped["that repeat an earlier one in every column"].append(row)
        else:
            kept.append(row)
    return kept, [f"dropped records {reason} ({columns.where(rows)})" for reason, rows in dropped.items()]


def _write(out: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write the columns to a new file."""
    records = zip(*columns.values(), strict=True)
    values = (value for column in columns.values() for value in column)
    if out.suffix.lower() == ".csv" and any(isinstance(v, (list, dict)) or "\n" in str(v) for v in values):
        raise InputError(f"--fix {out}: a column holds lists or line breaks; name a .jsonl file")
    text = io.StringIO(newline="")
    if out.suffix.lower() == ".jsonl":
        for record in records:
            text.write(json.dumps(dict(zip(columns, record, strict=True)), default=str) + "\n")
    else:
        # Quotes around names keep another separator in one of them from being taken for the table's.
        csv.writer(text, quoting=csv.QUOTE_ALL).writerow(columns)
        csv.writer(text).writerows(records)
    write_new(out, text.getvalue().encode(), mode=0o600)

"""Texts of a federation's records: one set for each client, and the server's test set; and whom records are about.

A record of instruction data is a prompt and the response to it, read from the columns of a table. The response is a
text. So is the prompt: with `prompt_column` it is as it stands; with `messages_column` it is the JSON of the chat turns
before the response, which `turns_of` reads. With `choice_columns` the response is JSON too: the place of the right one
among the record's choices, and all of them, which `unpacked_choices` reads.

Whatever is decided about a person depends on a key and on this person's name and records alone, so another person, or
another person's record, changes nothing of it. Names are compared as they are written: two persons whose names differ
by case alone are two, and a person in two spellings would be two as well, which `fedpriv data check` tells.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedpriv.config import Encoding, Separator
from fedpriv.learning.data._rows import unit_of

Turn = tuple[str, str]
"""(role, text); a role is one of `ROLES`."""

ROLES = ("system", "user", "assistant")
"""The roles of turns. A template writes them between its own special tokens, so a record may bring no other."""


@dataclass(frozen=True, slots=True)
class TextData:
    """Texts of one holder.

    Attributes:
        texts: one for each record; in instruction data, what was said before the response.
        labels: the name of each record's label; empty for causal models.
        pairs: the second text of each record for tasks on text pairs, or its response in instruction data; else None.
        persons: the name of the person that each record is about; None where the unit is the record. It is not shown,
            since a ledger's notes of a content are about the records, whoever they are about.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    pairs: tuple[str, ...] | None = None
    persons: tuple[str, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_units(self) -> int:
        """The number of what is protected and registered: persons, or records where these are the unit."""
        return len(self) if self.persons is None else len(set(self.persons))

    @property
    def content(self) -> bytes:
        """The records as bytes, equal for equal records alone."""
        return json.dumps([self.texts, self.labels, self.pairs]).encode()

    def part(self, indices: Sequence[int]) -> TextData:
        """The records with the given indices."""

        def chosen(column: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(column[index] for index in indices)

        return TextData(
            texts=chosen(self.texts),
            labels=chosen(self.labels) if self.labels else (),
            pairs=None if self.pairs is None else chosen(self.pairs),
            persons=None if self.persons is None else chosen(self.persons),
        )


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The place of a node's records. Only the node's own configuration decides this, never that of a run.

    Attributes:
        data: a file; `fedpriv.learning.data._rows` says what is a record of it.
        text_column: column with the text.
        text_pair_column: column with the second text; empty for tasks on single texts.
        label_column: column with the label; empty for causal models.
        prompt_column, response_column: columns of instruction data; with them, or with messages_column, the three
            above do not matter.
        messages_column: column with lists of chat messages.
        choice_columns: columns with the choices of which response_column names one; see `from_choices`.
        choice_names: by one of which it does, in the order of the choices; empty for any way.
        person_column: column that says whom a record is about; empty where the unit is the record.
        most_of_a_person: at most so many records of a person are kept, by a secret of the node.
        separator: of a CSV file; with `auto` its header decides, and a TSV file has tabs.
        encoding: of a CSV or JSONL file.
    """

    data: str
    text_column: str = "text"
    text_pair_column: str = ""
    label_column: str = "label"
    prompt_column: str = ""
    response_column: str = ""
    messages_column: str = ""
    choice_columns: tuple[str, ...] = ()
    choice_names: tuple[str, ...] = ()
    person_column: str = ""
    most_of_a_person: int = 8
    separator: Separator = "auto"
    encoding: Encoding = "utf-8"

    @property
    def instructs(self) -> bool:
        """Whether records are prompts with responses."""
        return bool(self.prompt_column or self.messages_column)

    @property
    def unit(self) -> str:
        """The part of the file that is a record: a row of a Parquet file, a line of any other."""
        return unit_of(Path(self.data))

    @property
    def columns(self) -> list[tuple[str, str]]:
        """(setting, name) of the columns that the file must have."""
        plain, instructions = (
            ("text_column", "text_pair_column", "label_column"),
            ("prompt_column", "response_column", "messages_column"),
        )
        read = (*(instructions if self.instructs else plain), "person_column")
        choices = [("choice_columns", column) for column in self.choice_columns]
        return choices + [(key, column) for key in read if (column := getattr(self, key))]


@dataclass(frozen=True)
class FederatedData:
    """The part of a federation's data that this process has.

    Attributes:
        clients: the training records of each client, by partition id. With `data = on-nodes` a node has its own
            records only, and the server none.
        client_names: for display, in the same order.
        test: the server's own test set; empty on a node with its own records.
        label_names: the classes, in the order of their indices; empty for causal models.
        test_holders: the client whose record each test record is, by partition id, -1 for a stranger's; empty where
            holders are not known by a column.
        warnings: likely mistakes in the table, a line each. They tell of records, so they are for the terminal of those
            who hold the table, and never for a run's folder or a log.
    """

    clients: tuple[TextData, ...]
    client_names: tuple[str, ...]
    test: TextData
    label_names: tuple[str, ...]
    test_holders: tuple[int, ...] = ()
    warnings: tuple[str, ...] = field(default=(), compare=False)


def from_messages(value: object) -> tuple[str, str]:
    """The turns before the response, as JSON, and the response: the last assistant turn. Later turns are left out.

    Args:
        value: a list of {"role": ..., "content": ...}, or its JSON. A content is a text, or a list of parts
            {"type": "text", "text": ...}.

    Raises:
        ValueError: it is no such list, has another role, or no assistant turn that answers another.
    """
    turns = _turns(json.loads(value) if isinstance(value, str) else value)
    last = max((index for index, (role, _) in enumerate(turns) if role == "assistant"), default=0)
    if last == 0:
        raise ValueError("has no assistant turn after another turn")
    return json.dumps(turns[:last]), turns[last][1]


def turns_of(text: str) -> tuple[Turn, ...]:
    """The turns before a response, as `from_messages` wrote them."""
    return tuple((role, content) for role, content in json.loads(text))


def packed_choices(right: int, choices: Sequence[str]) -> str:
    """The place of the right one, and the choices, as `unpacked_choices` reads them."""
    return json.dumps([right, *choices])


def unpacked_choices(response: str) -> tuple[int, tuple[str, ...]]:
    """The place and the choices that `packed_choices` wrote."""
    right, *choices = json.loads(response)
    return right, tuple(choices)


def with_right(data: TextData) -> TextData:
    """Records with packed choices, with the right one alone as the response."""
    found = map(unpacked_choices, data.pairs or ())
    return replace(data, pairs=tuple(choices[right] for right, choices in found))


def from_choices(values: Sequence[object], response: object, names: Sequence[str]) -> str:
    """The choices of a record and which of them is right, packed; no other record decides how they are read.

    Args:
        values: a text each, of which the last may be missing; or one value: a list of texts, {"text": texts, "label":
            their names} or {name: text}, or the JSON of one of these.
        response: the right one: its text, its name, or its number from 0.
        names: of the places, one of which the response must be; empty for those in the value, or numbers.

    Raises:
        ValueError: there are fewer than two choices, an empty one, or one twice; or the response is none of them, or
            means one as a text and another as a name. Says so, and never what stands there.
    """
    own, choices = named_choices(values)
    said, known = as_text(response).strip(), names or own or tuple(map(str, range(len(choices))))
    places = {place for place, name in enumerate(known[: len(choices)]) if name == said}
    places |= {place for place, choice in enumerate(choices) if choice == said and not names}
    if not places:
        ways = f"labels = {','.join(names)}" if names else "their texts, names or numbers from 0"
        raise ValueError(f"has a response that is none of its choices, by {ways}")
    if len(places) > 1:
        raise ValueError("has a response that is the text of one choice and the name of another; name them in labels")
    return packed_choices(places.pop(), choices)


def named_choices(values: Sequence[object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a record's choices, if it has any, and their texts; arguments and errors as for `from_choices`."""
    names: Sequence[object] = ()
    if len(values) == 1:
        (value,) = values
        found = value
        if isinstance(value, str):
            with suppress(ValueError):
                found = json.loads(value)
        if isinstance(found, Mapping) and isinstance(found.get("text"), (list, tuple)):
            names, found = found.get("label") or (), found["text"]
        elif isinstance(found, Mapping):
            names, found = tuple(found), tuple(found.values())
        if not (isinstance(found, (list, tuple)) and isinstance(names, (list, tuple))):
            raise ValueError("holds no list of choices")
        values = found
    while values and values[-1] is None:  # of a record with fewer choices than there are columns
        values = values[:-1]
    texts = tuple(as_text(value).strip() for value in values)
    if len(texts) < 2 or "" in texts or len(set(texts)) < len(texts):
        wrong = "an empty choice" if "" in texts else "a choice twice" if len(texts) > 1 else "fewer than two choices"
        raise ValueError(f"has {wrong}; a record needs two or more texts, each once")
    return tuple(map(str, names)), texts


def as_text(value: object) -> str:
    """A value of a column as a text, a missing one empty; ValueError for a list, a mapping or bytes."""
    if isinstance(value, bytes):
        raise ValueError("holds bytes that are no text in UTF-8")
    if isinstance(value, (list, tuple, Mapping)):
        raise ValueError("holds a list, not a text; chat messages go into messages_column")
    return "" if value is None else str(value)


def response_of(value: str, *, labels: Sequence[str], answers: Sequence[str]) -> str | None:
    """The response of a record by what its response column holds; None for one that is to be left out.

    Args:
        value: a label, if there are labels; else the response.
        labels: the classes, in the order of their answers; empty if the column holds the answers.
        answers: the allowed responses; empty allows any.
    """
    if not answers:
        return value
    return dict(zip(labels or answers, answers, strict=True)).get(value)


def _turns(value: object) -> list[Turn]:
    """The messages as turns, checked."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("is no list of messages")
    turns = []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ValueError(f"has a message whose role is none of {', '.join(ROLES)}")
        turns.append((str(message["role"]), _content(message.get("content"))))
    return turns


def _content(value: object) -> str:
    """The text of a message."""
    if isinstance(value, (list, tuple)):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
            raise ValueError("has a message with a part that is no text")
        return "".join(_content(part.get("text")) for part in value)
    if not isinstance(value, str):
        raise ValueError("has a message without text")
    return value


def by_person(names: Sequence[str]) -> dict[str, list[int]]:
    """{person: the places of its records, ascending}, persons in the order of their first ones, by [records] names."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return places


def some_of(name: str, places: Sequence[int], most: int, key: bytes) -> list[int]:
    """At most so many >= 1 of a person's records, in their order; over secret keys every choice is equally likely."""
    if len(places) <= most:
        return list(places)
    drawn = [
        hmac.digest(key, f"{number} {name}".encode("utf-8", "surrogatepass"), "sha256") for number in range(len(places))
    ]
    order = sorted(range(len(places)), key=drawn.__getitem__)
    return [places[number] for number in sorted(order[:most])]


def at_most(data: TextData, most: int, key: bytes) -> TextData:
    """The data with at most so many records of a person, as `some_of` chooses; the same if records are the unit."""
    if data.persons is None:
        return data
    kept = [place for name, places in by_person(data.persons).items() for place in some_of(name, places, most, key)]
    return data if len(kept) == len(data) else data.part(sorted(kept))

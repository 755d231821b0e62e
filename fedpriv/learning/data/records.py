"""Tokenised records and batches of them; the encoders of texts and chats; and how a saved model reads texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fedpriv.config import DataSection, RunConfig
from fedpriv.errors import InputError, is_memory_failure
from fedpriv.learning.data.chat import ChatFormat, Row
from fedpriv.learning.data.text import TextData, by_person

log = logging.getLogger(__name__)

# [records] of a tokenizer, texts, second texts if records have them, and the most tokens of a record.
Encode = Callable[[Any, Sequence[str], Sequence[str] | None, int], list[Row]]

_FEATURES = ("input_ids", "token_type_ids")

# A length that no prompt reaches.
_UNCUT = 2**20


class RecordSet(Protocol):
    """The records of one holder, in the form that its run's model reads."""

    @property
    def unusable(self) -> Tensor | None:
        """Bool [records], those that no model can read; None if there are none."""

    @property
    def num_units(self) -> int:
        """The number of what is protected and registered: persons, or records where these are the unit."""

    def __len__(self) -> int: ...

    def part(self, indices: Sequence[int]) -> RecordSet:
        """A new set of the records with the given indices."""

    def items(self, indices: Iterable[int] | None = None) -> list[Any]:
        """(this set, index) of the records with the given indices, or of all of them."""


@dataclass(frozen=True, eq=False)
class Records:
    """Tokenised records of one holder.

    Attributes:
        features: {tokenizer output, such as input_ids: one int64 vector per record}, of equal lengths for a record.
        labels: int64 [records] class indices; empty for causal models, whose labels are their tokens.
        pad_token_id: pads the shorter records of a batch, always on the right.
        unusable: bool [records], those that no model can read: they are sampled like the others and have no gradient;
            None if there are none.
        persons: [records] whom each is about; None where the unit is the record.
        choices: of which each record is to have one as its response, to test a model; None where it may have any.
        are_choices: whether the responses are compared by the mean log-likelihood of their tokens, the end of turn
            included; on a node no shape in the pass of one then tells its length.
    """

    features: dict[str, tuple[Tensor, ...]]
    labels: Tensor
    pad_token_id: int
    unusable: Tensor | None = None
    persons: tuple[str, ...] | None = None
    choices: Choices | None = None
    are_choices: bool = False

    def __len__(self) -> int:
        return len(self.features["input_ids"])

    def part(self, indices: Sequence[int]) -> Records:
        """A new set of the records with the given indices, without their choices."""
        features = {name: tuple(column[index] for index in indices) for name, column in self.features.items()}
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        labels = self.labels[chosen] if len(self.labels) else self.labels
        unusable = self.unusable[chosen] if self.unusable is not None else None
        persons = None if self.persons is None else tuple(self.persons[index] for index in indices)
        return Records(features, labels, self.pad_token_id, unusable, persons)

    @cached_property
    def by_person(self) -> tuple[tuple[str, list[int]], ...]:
        """(person, the person's records) in the order of their first records; nobody where the unit is the record."""
        return tuple(by_person(self.persons or ()).items())

    @property
    def num_units(self) -> int:
        """The number of what a sample draws: persons, or records where these are the unit."""
        return len(self) if self.persons is None else len(self.by_person)

    def items(self, indices: Iterable[int] | None = None) -> list[Item]:
        """The records with the given indices, or all of them."""
        return [(self, index) for index in (range(len(self)) if indices is None else indices)]

    def num_cut(self, end: int | None) -> int:
        """The number of usable records that lack the token `end` of a causal model: there was no room for it."""
        if end is None:
            return 0
        pairs = zip(self.features["input_ids"], self.items(), strict=True)
        return sum(int(row[-1]) != end for row, item in pairs if usable(item))

    def num_full(self, max_length: int) -> int:
        """The number of usable records with `max_length` tokens: something of each may be cut."""
        return sum(usable(item) and num_tokens(item) >= max_length for item in self.items())


@dataclass(frozen=True, eq=False)
class Choices:
    """Responses of which one is right for each record.

    Attributes:
        records: a set for each place, with the response there; a record that has fewer is unusable at the last.
        truth: place of each record's own; -1 for one that does not count.
    """

    records: tuple[Records, ...]
    truth: tuple[int, ...]


# One record of one holder: a batch may mix the records of several holders.
Item = tuple[Records, int]


def num_tokens(item: Item) -> int:
    """The number of tokens of a record."""
    records, index = item
    return len(records.features["input_ids"][index])


def usable(item: tuple[RecordSet, int]) -> bool:
    """Whether a model can read the record."""
    records, index = item
    return records.unusable is None or not bool(records.unusable[index])


def check_max_length(tokenizer: Any, max_length: int, *, pairs: bool) -> None:
    """Refuse a length without room for text, or for a pair of them: a tokenizer would silently not truncate at all."""
    (blank,) = encode(tokenizer, [" "], [" "] if pairs else None, _UNCUT)
    framed = len(blank["input_ids"]) if blank else 0  # the tokenizer may put a prompt before every text
    smallest = max(framed, tokenizer.num_special_tokens_to_add(pair=pairs)) + (2 if pairs else 1)
    if max_length < smallest:
        raise InputError(
            f"max_length = {max_length}: must be at least {smallest}, with the tokenizer's special tokens and prompt"
        )


def encode(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
    """[records] the tokenizer's output for each text, cut to `max_length` tokens; None where it fails."""
    if not texts:
        return []
    try:
        batch = tokenizer(list(texts), None if pairs is None else list(pairs), truncation=True, max_length=max_length)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # only one text at a time tells whose it is; a panic in Rust is no Exception
        if len(texts) == 1:
            if is_memory_failure(error):  # which says nothing of this text
                raise
            return [None]
        seconds = [None] * len(texts) if pairs is None else [[pair] for pair in pairs]
        return [encode(tokenizer, [t], second, max_length)[0] for t, second in zip(texts, seconds, strict=True)]
    names = [name for name in _FEATURES if name in batch]
    return [{name: list(batch[name][row][:max_length]) for name in names} for row in range(len(texts))]


def tokenize(
    data: TextData,
    tokenizer: Any,
    *,
    label_names: Sequence[str],
    max_length: int,
    vocabulary: int | None = None,
    encode: Encode = encode,
    names: Sequence[str] = (),
) -> Records:
    """The records of a data set, each cut to `max_length` tokens.

    No record decides what becomes of another: one with a text that the tokenizer refuses, a token that the model does
    not know, or a label outside `label_names` is marked unusable.

    Args:
        data: texts, optional second texts, and labels.
        tokenizer: a transformers tokenizer with a padding token.
        label_names: the classes in order; empty for causal models.
        max_length: tokens, special ones included; see `check_max_length`.
        vocabulary: number of rows of the model's input embedding; None does not check tokens.
        encode: gives the tokens; another one may have kept them.
        names: of the features; empty takes them from the records.
    """
    encoded = encode(tokenizer, data.texts, data.pairs, max_length)
    names = names or next((list(row) for row in encoded if row is not None), ["input_ids"])
    index = {name: position for position, name in enumerate(label_names)}
    unusable = torch.tensor([not _known(row, vocabulary) for row in encoded], dtype=torch.bool)
    if label_names:
        unusable |= torch.tensor([label not in index for label in data.labels], dtype=torch.bool)
    # A text without tokens, such as an empty one of a causal model, is a single padding token.
    empty = {name: [0] for name in names} | {"input_ids": [tokenizer.pad_token_id]}
    rows = [
        row if row is not None and row["input_ids"] and not bad else empty
        for row, bad in zip(encoded, unusable.tolist(), strict=True)
    ]
    return Records(
        features={name: tuple(torch.tensor(row[name]) for row in rows) for name in names},
        labels=torch.tensor([index.get(label, 0) for label in data.labels] if label_names else [], dtype=torch.int64),
        pad_token_id=tokenizer.pad_token_id,
        unusable=unusable if bool(unusable.any()) else None,
        persons=data.persons,
    )


def with_choices(
    data: TextData, choices: Sequence[tuple[int, Sequence[str]]], tokenized: Callable[[TextData], Records], most: int
) -> Records:
    """The records, and each with every one of its choices as its response.

    A record is unusable if it has more choices than `most`, or one that no model can read. No record decides how, or
    whether, another is read.

    Args:
        data: prompts with responses.
        choices: of each record, and the place of its response among them; -1 if it has another.
        tokenized: gives the tokens of such records.
    """
    texts = [texts for _, texts in choices]
    pairs = [tuple(own[place] if place < len(own) else "" for own in texts) for place in range(most)]
    places = tuple(tokenized(replace(data, pairs=responses)) for responses in pairs)
    reads = [
        len(own) <= most and all(usable((places[p], row)) for p in range(len(own))) for row, own in enumerate(texts)
    ]
    truth = tuple(right if read else -1 for (right, _), read in zip(choices, reads, strict=True))
    if num_not := truth.count(-1):
        log.warning("%d of %d records have no allowed answer, or too many, and do not count", num_not, len(truth))
    unusable = None if all(reads) else ~torch.tensor(reads)
    return replace(tokenized(data), unusable=unusable, choices=Choices(places, truth))


def _known(row: Row, vocabulary: int | None) -> bool:
    """Whether a text was tokenised, into tokens of the vocabulary."""
    if row is None:
        return False
    return vocabulary is None or all(0 <= token < vocabulary for token in row["input_ids"])


def collate(items: Sequence[Item], tokens: int | None = None) -> dict[str, Tensor]:
    """A batch of the given records, padded on the right.

    Args:
        items: at least one, all from the same tokenizer.
        tokens: of each row, padding included; None for those of the longest record.

    Returns:
        input_ids, attention_mask and the tokenizer's other features, int64 [records, tokens]; labels, int64 [records],
        if the records have them.
    """
    first, _ = items[0]
    lengths = [num_tokens(item) for item in items]
    tokens = tokens or max(lengths)
    batch = {}
    for name in first.features:
        padding = first.pad_token_id if name == "input_ids" else 0
        given = [records.features[name][index] for records, index in items]
        rows = pad_sequence(given, batch_first=True, padding_value=padding)
        batch[name] = F.pad(rows, (0, tokens - rows.shape[1]), value=padding).to(torch.int64)
    batch["attention_mask"] = (torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)).to(torch.int64)
    if len(first.labels):
        batch["labels"] = torch.stack([records.labels[index] for records, index in items])
    return batch


class Encoder(Protocol):
    """Gives the tokens of records. No record decides another's."""

    def encode(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """[records] the features of each record, at most `max_length` tokens; None for one that no model can read."""

    def names(self, tokenizer: Any, *, pairs: bool, max_length: int) -> tuple[str, ...]:
        """The names of the features, whatever the records are; none if the tokenizer fails on an empty text."""

    def key(self, tokenizer: Any) -> str:
        """A text that differs wherever the same tokenizer would give other tokens."""


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """Texts or pairs as the tokenizer frames them; if `ends`, the end-of-sequence token follows where it fits."""

    ends: bool = False

    def encode(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """See `Encoder`."""
        rows = encode(tokenizer, texts, pairs, max_length)
        end = getattr(tokenizer, "eos_token_id", None) if self.ends else None
        return rows if end is None else [_ended(row, end, max_length) for row in rows]

    def names(self, tokenizer: Any, *, pairs: bool, max_length: int) -> tuple[str, ...]:
        """See `Encoder`."""
        (row,) = encode(tokenizer, [""], [""] if pairs else None, max_length)
        return tuple(row or ())

    def key(self, tokenizer: Any) -> str:
        """See `Encoder`."""
        return f"text {getattr(tokenizer, 'eos_token_id', None)}" if self.ends else ""


def chat_format_of(config: DataSection) -> ChatFormat:
    """The format of a run's prompts."""
    return ChatFormat(
        system_prompt=config.system_prompt,
        prompt_template=config.prompt_template,
        has_messages=bool(config.messages_column),
    )


def encoder_of(config: RunConfig) -> Encoder:
    """The encoder of a run's records."""
    return chat_format_of(config) if config.instructs else PlainText(ends=config.task == "CAUSAL_LM")


def _ended(row: Row, end: int, max_length: int) -> Row:
    """The tokens with an end behind them, if they lack one and there is room."""
    if row is None or len(row["input_ids"]) >= max_length or row["input_ids"][-1:] == [end]:
        return row
    return {name: [*column, end if name == "input_ids" else (column or [0])[-1]] for name, column in row.items()}


@dataclass(frozen=True, kw_only=True)
class TextReading:
    """The way in which texts become tokens, and the length of an answer.

    Attributes:
        max_length: tokens of a text, special ones included.
        pairs: whether a record is two texts.
        instructs: whether a text is a prompt, put in the model's chat template.
        system_prompt: put before a prompt; empty puts none.
        prompt_template: a text around each prompt, with one `{}` in its place; empty for the prompt alone.
        max_new_tokens: of an answer.
    """

    max_length: int
    pairs: bool = False
    instructs: bool = False
    system_prompt: str = ""
    prompt_template: str = ""
    max_new_tokens: int = 96

    @classmethod
    def of(cls, config: RunConfig) -> TextReading:
        """The reading of a run's models."""
        return cls(
            max_length=config.max_length,
            pairs=bool(config.text_pair_column),
            instructs=config.instructs,
            system_prompt=config.system_prompt,
            prompt_template=config.prompt_template,
            max_new_tokens=config.max_new_tokens,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, where: str) -> TextReading:
        """The reading whose fields `to_json` gave; InputError if one is missing, unknown, or of another type."""
        kinds = {"int": int, "bool": bool, "str": str}
        wrong = sorted({field.name for field in fields(cls)} ^ values.keys())
        wrong += [f.name for f in fields(cls) if f.name in values and type(values[f.name]) is not kinds[str(f.type)]]
        if wrong:
            raise InputError(f"{where}: reading.{wrong[0]} is missing, unknown or of another type")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    @property
    def chat(self) -> ChatFormat:
        """The format of one prompt."""
        return ChatFormat(system_prompt=self.system_prompt, prompt_template=self.prompt_template)

    @property
    def encoder(self) -> Encoder:
        """The encoder that turns texts, or prompts with their responses, into tokens."""
        return self.chat if self.instructs else PlainText()

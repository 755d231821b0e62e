"""Tokenised records, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpriv.data.text import TextData
from fedpriv.errors import InputError

RESPONSE_MASK = "response_mask"
"""A feature of each token: 1 where a model is to predict it. Without this feature, it is to predict all of them."""


@dataclass(frozen=True, eq=False)
class Records:
    """Tokenised records of one holder.

    Attributes:
        features: {tokenizer output, such as input_ids: one int64 vector per record}, of equal lengths for a record.
        labels: int64 [records] class indices; empty for causal models, whose labels are their tokens.
        pad_token_id: pads the shorter records of a batch, always on the right.
        unusable: bool [records], those that no model can read: they are sampled like the others and have no gradient;
            None if there are none.
    """

    features: dict[str, tuple[Tensor, ...]]
    labels: Tensor
    pad_token_id: int
    unusable: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features["input_ids"])

    def part(self, indices: Sequence[int]) -> Records:
        """A new set of the records with the given indices."""
        features = {name: tuple(column[index] for index in indices) for name, column in self.features.items()}
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        labels = self.labels[chosen] if len(self.labels) else self.labels
        unusable = self.unusable[chosen] if self.unusable is not None else None
        return Records(features, labels, self.pad_token_id, unusable)

    def items(self, indices: Iterable[int] | None = None) -> list[Item]:
        """The records with the given indices, or all of them."""
        return [(self, index) for index in (range(len(self)) if indices is None else indices)]


# One record of one holder: a batch may mix the records of several holders.
Item = tuple[Records, int]


def num_tokens(item: Item) -> int:
    """The number of tokens of a record."""
    records, index = item
    return len(records.features["input_ids"][index])


def usable(item: Item) -> bool:
    """Whether a model can read the record."""
    records, index = item
    return records.unusable is None or not bool(records.unusable[index])


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The shape of a batch.

    Attributes:
        rows: records, and dummies where there are fewer.
        tokens: of each row, padding included.
        full: whether every row has `tokens` tokens; if not, every row has padding. Models leave out the attention mask
            of a batch without padding, and then compute in another way.
    """

    rows: int
    tokens: int
    full: bool


def check_max_length(tokenizer: Any, max_length: int, *, pairs: bool) -> None:
    """Refuse a length that has no room for a token of text.

    Args:
        tokenizer: a transformers tokenizer.
        max_length: tokens, special ones included.
        pairs: whether records have a second text.

    Raises:
        InputError: max_length is too small; a tokenizer would silently not truncate at all.
    """
    smallest = tokenizer.num_special_tokens_to_add(pair=pairs) + (2 if pairs else 1)
    if max_length < smallest:
        raise InputError(f"max_length = {max_length}: must be at least {smallest}, with the tokenizer's special tokens")


# The tokens of one record by the tokenizer's names for them, of equal lengths; None if the tokenizer refuses it.
Row = dict[str, list[int]] | None
# [records] of a tokenizer, texts, second texts if records have them, and the most tokens of a record.
Encode = Callable[[Any, Sequence[str], Sequence[str] | None, int], list[Row]]

_FEATURES = ("input_ids", "token_type_ids")


def encode(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
    """[records] the tokenizer's output for each text, cut to `max_length` tokens; None where it fails."""
    if not texts:
        return []
    try:
        batch = tokenizer(list(texts), None if pairs is None else list(pairs), truncation=True, max_length=max_length)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException:  # whatever it is, only one text at a time tells whose; a panic in Rust is no Exception
        if len(texts) == 1:
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
    )


def _known(row: Row, vocabulary: int | None) -> bool:
    """Whether a text was tokenised, into tokens of the vocabulary."""
    if row is None:
        return False
    return vocabulary is None or all(0 <= token < vocabulary for token in row["input_ids"])


def collate(items: Sequence[Item], shape: BatchShape | None = None) -> dict[str, Tensor]:
    """A batch of the given records, padded on the right to the given shape, or to the longest of them.

    Args:
        items: at least one, all from the same tokenizer.
        shape: has room for all of them; dummies of padding tokens fill the remaining rows.

    Returns:
        input_ids, attention_mask and the tokenizer's other features, int64 [rows, tokens]; labels, int64
        [rows], if the records have them.
    """
    first, _ = items[0]
    lengths = [num_tokens(item) for item in items]
    shape = shape or BatchShape(rows=len(items), tokens=max(lengths), full=False)
    batch = {}
    for name in first.features:
        padding = first.pad_token_id if name == "input_ids" else 0
        batch[name] = torch.full((shape.rows, shape.tokens), padding, dtype=torch.int64)
        for row, (records, index) in enumerate(items):
            batch[name][row, : lengths[row]] = records.features[name][index]
    lengths += [shape.tokens if shape.full else 1] * (shape.rows - len(items))
    batch["attention_mask"] = (torch.arange(shape.tokens) < torch.tensor(lengths).unsqueeze(1)).to(torch.int64)
    if len(first.labels):
        batch["labels"] = torch.zeros(shape.rows, dtype=torch.int64)
        batch["labels"][: len(items)] = torch.stack([records.labels[index] for records, index in items])
    return batch

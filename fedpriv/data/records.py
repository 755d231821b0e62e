"""Tokenised records, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpriv.data.text import TextData


@dataclass(frozen=True, eq=False)
class Records:
    """Tokenised records of one holder.

    Attributes:
        features: {tokenizer output, such as input_ids: one int64 vector per record}, of equal lengths for a record.
        labels: int64 [records] class indices; empty for causal models, whose labels are their tokens.
        pad_token_id: pads the shorter records of a batch, always on the right.
    """

    features: dict[str, tuple[Tensor, ...]]
    labels: Tensor
    pad_token_id: int

    def __len__(self) -> int:
        return len(self.features["input_ids"])

    def part(self, indices: Sequence[int]) -> Records:
        """A new set of the records with the given indices."""
        features = {name: tuple(column[index] for index in indices) for name, column in self.features.items()}
        labels = self.labels[torch.as_tensor(indices, dtype=torch.int64)] if len(self.labels) else self.labels
        return Records(features, labels, self.pad_token_id)

    def items(self, indices: Iterable[int] | None = None) -> list[Item]:
        """The records with the given indices, or all of them."""
        return [(self, index) for index in (range(len(self)) if indices is None else indices)]


# One record of one holder: a batch may mix the records of several holders.
Item = tuple[Records, int]


def num_tokens(item: Item) -> int:
    """The number of tokens of a record."""
    records, index = item
    return len(records.features["input_ids"][index])


def tokenize(data: TextData, tokenizer: Any, *, label_names: Sequence[str], max_length: int) -> Records:
    """The records of a data set, each cut to `max_length` tokens.

    Args:
        data: texts, optional second texts, and labels, all of them in `label_names`.
        tokenizer: a transformers tokenizer with a padding token.
        label_names: the classes in order; empty for causal models.
        max_length: tokens, >= 1, special ones included.
    """
    pairs = list(data.pairs) if data.pairs is not None else None
    encoded = tokenizer(list(data.texts), pairs, truncation=True, max_length=max_length) if data.texts else {}
    names = [name for name in ("input_ids", "token_type_ids") if name in encoded] or ["input_ids"]
    index = {name: position for position, name in enumerate(label_names)}
    return Records(
        features={name: tuple(torch.tensor(row) for row in encoded.get(name, ())) for name in names},
        labels=torch.tensor([index[label] for label in data.labels] if label_names else [], dtype=torch.int64),
        pad_token_id=tokenizer.pad_token_id,
    )


def collate(items: Sequence[Item]) -> dict[str, Tensor]:
    """A batch of the given records, padded on the right to the longest of them.

    Args:
        items: at least one, all from the same tokenizer.

    Returns:
        input_ids, attention_mask and the tokenizer's other features, int64 [batch, tokens]; labels, int64
        [batch], if the records have them.
    """
    first, _ = items[0]
    batch = {
        name: torch.nn.utils.rnn.pad_sequence(
            [records.features[name][index] for records, index in items],
            batch_first=True,
            padding_value=first.pad_token_id if name == "input_ids" else 0,
        )
        for name in first.features
    }
    lengths = torch.tensor([num_tokens(item) for item in items])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths.unsqueeze(1)).to(torch.int64)
    if len(first.labels):
        batch["labels"] = torch.stack([records.labels[index] for records, index in items])
    return batch

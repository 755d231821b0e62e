"""Tokenised records and the batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpriv.data.text import TextData


@dataclass(frozen=True, eq=False)
class Records:
    """Tokenised records of one holder.

    Attributes:
        features: {tokenizer output, such as input_ids: one int64 vector a record}, all of equal lengths.
        labels: int64 [records] class indices; empty for causal models, whose labels are their tokens.
        pad_token_id: fills shorter records of a batch, always on the right.
    """

    features: dict[str, tuple[Tensor, ...]]
    labels: Tensor
    pad_token_id: int

    def __len__(self) -> int:
        return len(self.features["input_ids"])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Tokens of each record."""
        return [len(self.features["input_ids"][index]) for index in indices]


def tokenize(data: TextData, tokenizer: Any, *, label_names: Sequence[str], max_length: int) -> Records:
    """The records of a data set, each cut to `max_length` tokens.

    Args:
        data: texts, optional second texts, and labels, whose names are all in `label_names`.
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


def collate(records: Records, indices: Sequence[int]) -> dict[str, Tensor]:
    """A batch of the given records, padded on the right to the longest of them.

    Returns:
        input_ids, attention_mask and the tokenizer's other features, int64 [batch, tokens]; labels, int64
        [batch], where the records have them.
    """
    lengths = torch.tensor(records.lengths(indices))
    batch = {
        name: torch.nn.utils.rnn.pad_sequence(
            [vectors[index] for index in indices],
            batch_first=True,
            padding_value=records.pad_token_id if name == "input_ids" else 0,
        )
        for name, vectors in records.features.items()
    }
    width = batch["input_ids"].shape[1]
    batch["attention_mask"] = (torch.arange(width) < lengths.unsqueeze(1)).to(torch.int64)
    if len(records.labels):
        batch["labels"] = records.labels[torch.as_tensor(indices, dtype=torch.int64)]
    return batch

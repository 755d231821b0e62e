"""Records as the study's models read them: in passes whose rows have one shape, so that no record needs padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tensors = Mapping[str, NDArray[Any]]
"""{name: array} of a model."""

Pass = tuple[Tensor, Tensor]
"""The inputs of a network, float [rows, ...], and the labels, int64 [rows]."""

# Rows, or tokens, of a pass: enough to keep a core busy, few enough for its caches.
_ROWS, _TOKENS = 256, 4096


class StudyRecords(Protocol):
    """Labelled records of one task."""

    @property
    def labels(self) -> Tensor:
        """Int64 [records]."""

    def __len__(self) -> int: ...

    def part(self, index: int, num_parts: int) -> Self:
        """One of `num_parts` disjoint parts of about equal size."""

    def first(self, num: int) -> Self:
        """The first `num` records."""

    def passes(self, chosen: Sequence[int] | None = None) -> Iterator[Pass]:
        """The chosen records, or all, each once."""

    def order(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of the chosen records among themselves, in the order of their passes."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """Records of one shape.

    Attributes:
        inputs: float32 [records, ...]: images [28, 28] in [0, 1], or embeddings [384].
        labels: int64 [records].
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: int, num_parts: int) -> Vectors:
        """One of `num_parts` disjoint parts of about equal size."""
        return Vectors(self.inputs[index::num_parts], self.labels[index::num_parts])

    def first(self, num: int) -> Vectors:
        """The first `num` records."""
        return Vectors(self.inputs[:num], self.labels[:num])

    def passes(self, chosen: Sequence[int] | None = None) -> Iterator[Pass]:
        """The chosen records, or all, in their order."""
        rows = torch.arange(len(self)) if chosen is None else torch.tensor(chosen, dtype=torch.int64)
        for few in rows.split(_ROWS):
            if len(few):
                yield self.inputs[few], self.labels[few]

    def order(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their own."""
        return np.arange(len(chosen))


@dataclass(frozen=True, eq=False)
class TokenRecords:
    """Texts as the states of their tokens after an encoder's frozen layers.

    Attributes:
        states: float16 [tokens of all texts, width]; may be a mapped file.
        starts: int64 [records], where each text begins.
        lengths: int64 [records], tokens of each text, >= 1.
        labels: int64 [records].
    """

    states: NDArray[np.float16]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: int, num_parts: int) -> TokenRecords:
        """One of `num_parts` disjoint parts of about equal size."""
        return self._only(slice(index, None, num_parts))

    def first(self, num: int) -> TokenRecords:
        """The first `num` records."""
        return self._only(slice(num))

    def passes(self, chosen: Sequence[int] | None = None) -> Iterator[Pass]:
        """The chosen records, or all, by length: float32 [rows, tokens, width], none of them padding."""
        rows = np.arange(len(self)) if chosen is None else np.asarray(chosen, dtype=np.int64)
        for length in np.unique(self.lengths[rows]):
            same = rows[self.lengths[rows] == length]
            size = max(1, _TOKENS // int(length))
            for begin in range(0, len(same), size):
                few = same[begin : begin + size]
                places = self.starts[few][:, None] + np.arange(length)
                yield torch.from_numpy(self.states[places]).float(), self.labels[torch.from_numpy(few)]

    def order(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """By length, and among equals their own."""
        return np.argsort(self.lengths[chosen], kind="stable")

    def _only(self, rows: slice) -> TokenRecords:
        return TokenRecords(self.states, self.starts[rows], self.lengths[rows], self.labels[rows])


def together(several: Sequence[StudyRecords]) -> StudyRecords:
    """The records of several sets as one.

    Raises:
        TypeError: they are not of one shape.
    """
    if len(several) == 1:
        return several[0]
    vectors = [each for each in several if isinstance(each, Vectors)]
    if len(vectors) < len(several):
        raise TypeError("only records of one shape make one set")
    return Vectors(torch.cat([each.inputs for each in vectors]), torch.cat([each.labels for each in vectors]))

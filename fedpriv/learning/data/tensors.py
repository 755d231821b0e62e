"""Records as tensors in memory, in the form that a module of the user's own reads, one set for each holder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import Dataset

from fedpriv.errors import InputError

Batch = Any
"""Tensors with one row per record, or a tuple, list or dictionary of such."""


@dataclass(frozen=True, eq=False)
class TensorRecords:
    """The records of one holder, all in one `batch`."""

    batch: Batch = field(repr=False)

    def __len__(self) -> int:
        return num_records(self.batch)

    @property
    def unusable(self) -> None:
        """None: only a pass tells whether a model can read a record."""

    @property
    def persons(self) -> None:
        """None: the unit is the record."""

    @property
    def num_units(self) -> int:
        """The number of what is protected and registered."""
        return len(self)

    @property
    def content(self) -> bytes:
        """SHA-256 of the records, equal for equal records alone."""
        digest = hashlib.sha256(form_of(self.batch).encode())
        for leaf in tree_leaves(self.batch):
            digest.update(leaf.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def part(self, indices: Sequence[int]) -> TensorRecords:
        """A new set of the records with the given indices."""
        return TensorRecords(rows_of(self.batch, indices))

    def items(self, indices: Iterable[int] | None = None) -> list[TensorItem]:
        """The records with the given indices, or all of them."""
        return [(self, index) for index in (range(len(self)) if indices is None else indices)]


TensorItem = tuple[TensorRecords, int]
"""One record of one holder: a batch may mix the records of several holders."""


def tensor_records(given: Any, *, name: str) -> TensorRecords:
    """The records in arrays, tensors or a data set.

    Args:
        given: arrays or tensors with one row per record, a tuple, list or dictionary of them, or a torch `Dataset` with
            a length, whose items are records.
        name: what they are, for errors.

    Raises:
        InputError: it is none of these, or holds no record.
    """
    try:
        batch = _stacked(given) if isinstance(given, Dataset) else tree_map(_tensor, given)
        records = TensorRecords(batch)
        num = len(records)
    except (InputError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).removeprefix("records: ")
        raise InputError(f"{name}: {reason}") from None
    if not num:
        raise InputError(f"{name}: has no records; leave it out")
    return records


def _stacked(data: Any) -> Batch:
    """A batch of all items of a torch data set."""
    if not len(data):
        raise InputError("has no records; leave it out")
    rows = [tree_flatten(data[index]) for index in range(len(data))]
    columns = zip(*(leaves for leaves, _ in rows), strict=True)
    return tree_unflatten([torch.stack([torch.as_tensor(each) for each in column]) for column in columns], rows[0][1])


def _tensor(leaf: Any) -> Any:
    """The leaf as a tensor, if it is an array or a column of a table."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.tensor(leaf.__array__()) if hasattr(leaf, "__array__") else leaf


def num_records(batch: Batch) -> int:
    """The number of rows of a batch's tensors; InputError if it has none, one is no tensor, or numbers differ."""
    leaves = tree_leaves(batch)
    lengths = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else -1 for leaf in leaves}
    if len(lengths) != 1 or -1 in lengths:
        raise InputError("records: must be tensors with one row per record, or a tuple, list or dictionary of them")
    return lengths.pop()


def form_of(batch: Batch) -> str:
    """The structure of a batch, with the shapes and formats of a record's tensors."""
    leaves, spec = tree_flatten(batch)
    rows = ", ".join(f"{leaf.dtype} {list(leaf.shape[1:])}".removeprefix("torch.") for leaf in leaves)
    return f"{spec.type.__name__ if spec.type else 'tensor'} of {rows}"


def rows_of(batch: Batch, positions: Sequence[int]) -> Batch:
    """The batch of the records at the positions, in this order."""
    return tree_map(lambda tensor: tensor[list(positions)], batch)

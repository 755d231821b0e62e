"""What the head reads of a record, computed once: while the head alone is trained it does not change.

It depends on the record, on A and B and on what was merged into the frozen weights. As long as these stay the same, a
step costs one small product for each record instead of a pass through the model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedpriv.adapters.merged import Merged, same
from fedpriv.data.records import BatchShape, Item, Records, usable
from fedpriv.training.isolation import isolated
from fedpriv.training.progress import READING, Tell, silent
from fedpriv.training.shapes import Pass

_FLOAT_BYTES = 4

log = logging.getLogger(__name__)

Drawn = tuple[Records, Tensor]
"""Some records of a set, by their indices, int64 [records]."""


@dataclass(frozen=True, eq=False)
class Body:
    """What decides a record's features: everything before the head that may change.

    Attributes:
        tensors: {tensor name: float32}, of the adapter without the head.
        merged: what was added to the frozen weights.
    """

    tensors: Mapping[str, Tensor]
    merged: Merged

    def same(self, other: Body) -> bool:
        """Whether both give the same features; cheap if their tensors are the same objects."""
        if self.tensors.keys() != other.tensors.keys() or not same(self.merged, other.merged):
            return False
        pairs = ((tensor, other.tensors[name]) for name, tensor in self.tensors.items())
        return all(one is two or torch.equal(one, two) for one, two in pairs)

    def copy(self) -> Body:
        """The same, whatever becomes of the tensors."""
        return Body({name: tensor.clone() for name, tensor in self.tensors.items()}, dict(self.merged))


@dataclass(frozen=True, eq=False)
class _Kept:
    """The features of the first records of a set, float32 [records, width], and what they were computed with."""

    states: Tensor
    body: Body


class FeatureCache:
    """Features of any number of record sets.

    A record is computed in a shape that it alone decides, so its features do not depend on the others by a bit. One
    that is unusable or fails has NaN, and so a gradient that counts as zero. One for which there is no room is computed
    whenever it is needed, to the same bits.

    Without `reserve` the room depends on the number of records of a set: this is for public records.

    Args:
        compute: the features, [rows, width], of records in a shape, with a body and through the prefix cache or not.
        passes: splits records into passes of fixed shapes, for a body.
        width: of a record's features.
        memory_limit: bytes to keep, all in memory.
        tell: told how many of the records to be read are.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Item], BatchShape, Body, bool], Tensor],
        passes: Callable[[Sequence[Item], Body], Iterable[Pass]],
        *,
        width: int,
        memory_limit: int,
        tell: Tell = silent,
    ) -> None:
        self._tell = tell
        self._compute = compute
        self._passes = passes
        self._width = width
        self._memory_limit = memory_limit
        self._reserved: Tensor | None = None
        self._kept: weakref.WeakKeyDictionary[Records, _Kept] = weakref.WeakKeyDictionary()

    @property
    def bytes_in_memory(self) -> int:
        """Of all features that are kept or have room reserved."""
        if self._reserved is not None:
            return _FLOAT_BYTES * self._reserved.numel()
        return sum(_FLOAT_BYTES * kept.states.numel() for kept in self._kept.values())

    def reserve(self, num_records: int) -> None:
        """Take room for so many records, all of it now; where there is none, features are computed each time.

        From then on this room alone is used, for one set of records at a time: another one takes it over.

        Args:
            num_records: >= 1, a public number.
        """
        if self._reserved is None or len(self._reserved) not in (0, num_records):
            self._reserved = None
            self._kept.clear()
            self._reserved = self._room(num_records)

    def features(self, drawn: Sequence[Drawn], body: Body, *, keep: bool) -> Tensor:
        """The features of the drawn records of each set, one set after the other, float32 [records, width].

        Args:
            drawn: in any number and order.
            body: to compute them with.
            keep: whether to look for them among those that are kept, and to keep them; they are then computed through
                the prefix cache.
        """
        if keep:
            self._keep([records for records, _ in drawn], body)
        result = torch.full((sum(len(indices) for _, indices in drawn), self._width), torch.nan)
        missing: list[tuple[int, Item]] = []
        begin = 0
        for records, indices in drawn:
            rows = torch.arange(begin, begin + len(indices))
            kept = self._kept[records].states if keep and len(records) else result[:0]
            known = indices < len(kept)
            result[rows[known]] = kept[indices[known]]
            others = zip(rows[~known].tolist(), indices[~known].tolist(), strict=True)
            missing += [(row, (records, index)) for row, index in others]
            begin += len(indices)
        if missing:
            result[[row for row, _ in missing]] = self._computed([item for _, item in missing], body, keep)
        return result

    def _keep(self, sets: Sequence[Records], body: Body) -> None:
        """Make sure that the sets' features are kept, as far as there is room, and computed with this body."""
        # An empty set takes nobody's place.
        nonempty = [records for records in dict.fromkeys(sets) if len(records)]
        stale = [r for r in nonempty if r not in self._kept or not self._kept[r].body.same(body)]
        if not stale:
            return
        # Removed before they are overwritten: a failure must not leave features of another body behind.
        rooms = [self._room_for(records, alone=len(sets) == 1) for records in stale]
        items = [(records, i) for records, room in zip(stale, rooms, strict=True) for i in range(len(room))]
        computed = self._computed(items, body, True).split([len(room) for room in rooms])
        own = body.copy()
        for records, room, states in zip(stale, rooms, computed, strict=True):
            room.copy_(states)
            self._kept[records] = _Kept(room, own)

    def _room_for(self, records: Records, *, alone: bool) -> Tensor:
        """Room for the set, or for its first records."""
        if self._reserved is not None:
            self._kept.clear()
            return self._reserved[: len(records) if alone else 0]
        kept = self._kept.pop(records, None)
        return self._room(len(records)) if kept is None else kept.states

    def _room(self, num_records: int) -> Tensor:
        """Room for so many records' features, or none."""
        size = _FLOAT_BYTES * num_records * self._width
        try:
            if self.bytes_in_memory + size <= self._memory_limit:
                return torch.full((num_records, self._width), torch.nan)
            reason = f"the limit is {self._memory_limit // 2**20} MiB"
        except (RuntimeError, MemoryError) as error:
            reason = str(error)
        log.warning("no room for %d MiB of features, which are computed each time: %s", size // 2**20, reason)
        return torch.empty(0, self._width)

    @torch.no_grad()
    def _computed(self, items: Sequence[Item], body: Body, cached: bool) -> Tensor:
        """[records, width]; NaN for a record that is unusable or fails."""
        result = torch.full((len(items), self._width), torch.nan)
        places = [place for place, item in enumerate(items) if usable(item)]
        readable = [items[place] for place in places]
        num_read = 0
        for together in self._passes(readable, body):
            run = partial(self._of, readable, together.shape, body, cached)
            for positions, states in isolated(run, together.positions):
                if states is not None:
                    result[[places[position] for position in positions]] = states[: len(positions)]
            num_read += len(together.positions)
            self._tell(READING, num_read, len(readable))
        return result

    def _of(self, items: Sequence[Item], shape: BatchShape, body: Body, cached: bool, positions: list[int]) -> Tensor:
        return self._compute([items[position] for position in positions], shape, body, cached).float().cpu()

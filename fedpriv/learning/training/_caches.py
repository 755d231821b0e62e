"""Caches of what training does not change: states below the first trained layer, and the features of a trained head.

Below the first trainable layer, a record's hidden states never change. They are computed once per record, kept in
memory up to a limit and beyond it in a nameless memory-mapped file, and fed to the first trainable layer; the layers
below are then skipped. For private records the room is taken before any of them is read, for as many and as long ones
as there may be, so that no record's length decides where the others' go.

While the head alone is trained, the features that it reads depend on the record, on A and B and on what was merged into
the frozen weights. As long as these stay the same, a step costs one small product for each record instead of a pass
through the model.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.files import require_room
from fedpriv.learning.adapters import Merged, same_merged
from fedpriv.learning.data.records import Item, Records, num_tokens, usable
from fedpriv.learning.training.independence import FEATURES, READING, Tell, isolated, shared, side_by_side

log = logging.getLogger(__name__)

Drawn = tuple[Records, Tensor]
"""Some records of a set, by their indices, int64 [records]."""


@dataclass(frozen=True)
class Prefix:
    """The layers below the first trainable one.

    Attributes:
        parent: the module that contains the list of layers.
        name: the name of the list in that module.
        layers: all layers.
        length: number of layers before the first trainable one.
    """

    parent: nn.Module
    name: str
    layers: nn.ModuleList
    length: int


class _StopForwardError(Exception):
    """Ends a forward pass once a module's input is known."""


def find_prefix(model: Any) -> Prefix | None:
    """The frozen prefix of a peft model; None if the first layer, or something before it, is trained."""
    found = _trained_list(model)
    return found if found is not None and found.length else None


def blocks_from_first_trained(model: Any) -> Sequence[nn.Module]:
    """The layers of a peft model from the first trained one on; none if something outside of them is trained."""
    found = _trained_list(model)
    return () if found is None else list(found.layers[found.length :])


def _trained_list(model: Any) -> Prefix | None:
    """The outermost list of layers in which all that is trained is, and how many layers precede the first of these."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad and ".modules_to_save." not in name]
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and trained and all(n.startswith(f"{path}.") for n in trained):
            first = min(int(name[len(path) + 1 :].split(".")[0]) for name in trained)
            parent_path, _, name = path.rpartition(".")
            return Prefix(model.get_submodule(parent_path), name, module, first)
    return None


@contextmanager
def input_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Within this context a forward pass stops before the module and appends its input to the list."""
    captured: list[Tensor] = []

    def stop(_module: nn.Module, args: Any) -> None:
        captured.append(args[0])
        raise _StopForwardError

    handle = module.register_forward_pre_hook(stop)
    try:
        yield captured
    except _StopForwardError:
        pass
    finally:
        handle.remove()


@contextmanager
def skipping_prefix(prefix: Prefix, hidden: Tensor) -> Iterator[None]:
    """Within this context a forward pass starts at the first trainable layer, with `hidden` as its input."""

    def inject(_module: nn.Module, args: Any) -> Any:
        return (hidden, *args[1:])

    handle = prefix.layers[prefix.length].register_forward_pre_hook(inject)
    setattr(prefix.parent, prefix.name, prefix.layers[prefix.length :])
    try:
        yield
    finally:
        setattr(prefix.parent, prefix.name, prefix.layers)
        handle.remove()


class Cached(Protocol):
    """A model whose states are kept: how it shares records out among passes, and what room there is."""

    num_workers: int
    """Processes in which passes run side by side."""
    memory_limit: int
    """Bytes for passes, for the clients of a stack, and for what a cache keeps in memory."""
    tell: Tell
    """Told how far training, tests and caches are; where records are others', nobody is."""
    cache: PrefixCache | None
    """The states below the first trained layer; None if they are not kept."""

    def passes(self, items: Sequence[Item]) -> Iterable[list[int]]:
        """The positions of the records that share a pass."""


@dataclass(frozen=True, eq=False)
class _Room:
    """The memory or the file in which states are kept, [tokens, width], in the format of the base."""

    states: Tensor
    in_memory: bool


@dataclass(frozen=True)
class _Reserved:
    """Room that was taken before the records were read: for so many of at most `longest` tokens each."""

    room: _Room
    num_records: int
    longest: int


class PrefixCache:
    """Hidden states below the first trainable layer, for any number of record sets.

    The states are in the base's format and unpadded. All of a record set are computed at once and freed together with
    the records. A record whose states cannot be computed has NaN, and so a gradient that counts as zero. One for which
    there is no room has its states computed whenever they are needed; where each record has a pass of its own, to the
    same bits.

    Without `reserve` the room depends on the number of tokens of a record set: this is for public records.

    Args:
        forward: runs the model in eval mode on records.
        model: of the states; those beyond its limit go to a file without a name, which nobody else can open and which
            ends with this process, however it ends.
        width: of a hidden state.
        dtype: of the base.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Item]], object],
        model: Cached,
        prefix: Prefix,
        *,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self.prefix = prefix
        self._forward, self._model = forward, model
        self._width, self._dtype = width, dtype
        self._memory_limit = model.memory_limit
        self._reserved: _Reserved | None = None
        self._kept: weakref.WeakKeyDictionary[Records, tuple[_Room, list[int]]] = weakref.WeakKeyDictionary()

    @property
    def bytes_in_memory(self) -> int:
        """The bytes of all states that are kept or have room reserved."""
        rooms = {room for room, _ in self._kept.values()} | ({self._reserved.room} if self._reserved else set())
        return sum(room.states.nbytes for room in rooms if room.in_memory)

    def reserve(self, num_records: int, longest: int) -> bool:
        """Take room for so many records of so many tokens at most, all of it now; False if there is none.

        From then on this room alone is used, for one set of records at a time: another one takes it over.

        Args:
            num_records: >= 1, a public number.
            longest: tokens, >= 1, a public number.
        """
        held = self._reserved
        if held is None or (held.num_records, held.longest) != (num_records, longest):
            self._reserved = held = None
            self._kept.clear()
            room = self._room(num_records * longest)
            self._reserved = _Reserved(room, num_records, longest) if room else None
        return self._reserved is not None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within this context other records are kept; then those from before are, in their room."""
        before = self._reserved, self._kept
        self._reserved, self._kept = None, weakref.WeakKeyDictionary()
        try:
            yield
        finally:
            self._reserved, self._kept = before

    def fill(self, items: Sequence[Item]) -> None:
        """Keep the states of all records of these records' sets, as far as there is room."""
        missing = [records for records in dict.fromkeys(records for records, _ in items) if records not in self._kept]
        if self._reserved:  # for one set at a time
            for records in missing:
                self._keep([records])
        elif missing:
            self._keep(missing)

    def hidden(self, items: Sequence[Item], shape: Sequence[int]) -> Tensor:
        """The states of the given records, padded with zeros to [rows, tokens]: [rows, tokens, width]."""
        states = torch.zeros(*shape, self._width, dtype=self._dtype)
        for row, (records, index) in enumerate(items):
            own = self._row(records, index)
            states[row, : len(own)] = own
        return states

    def _row(self, records: Records, index: int) -> Tensor:
        self.fill([(records, index)])
        room, starts = self._kept[records]
        own = room.states[starts[index] : starts[index + 1]]
        if len(own):
            return own
        return self._computed([(records, index)])[0]

    def _keep(self, sets: Sequence[Records]) -> None:
        """Keep the states of all records that there is room for, computed in passes that the sets share."""
        items: list[Item] = []
        places: list[Tensor] = []
        for records in sets:
            room, lengths = self._room_for(records)
            # Those without room have no tokens there.
            starts = [0, *np.cumsum(lengths).tolist()]
            roomy = [index for index, length in enumerate(lengths) if length]
            items += records.items(roomy)
            places += [room.states[starts[index] : starts[index + 1]] for index in roomy]
            self._kept[records] = room, starts  # so that it counts when the next one takes room
        passes = list(self._model.passes(items))
        num_read = list(accumulate(map(len, passes)))

        def keep(number: int, _worker: int) -> None:
            together = passes[number]
            for position, states in zip(together, self._computed([items[p] for p in together]), strict=True):
                places[position].copy_(states)
            self._model.tell(READING, num_read[number], len(items))

        try:
            side_by_side(keep, len(passes), self._model.num_workers)
        except BaseException:
            for records in sets:
                del self._kept[records]
            raise

    def _room_for(self, records: Records) -> tuple[_Room, list[int]]:
        """Room, and how much of it each record takes, in tokens."""
        lengths = [num_tokens(item) for item in records.items()]
        if (held := self._reserved) is not None:
            self._kept.clear()
            # Whether a record has room is for its own index and length to say, whatever the others are.
            return held.room, [n if i < held.num_records and n <= held.longest else 0 for i, n in enumerate(lengths)]
        room = self._room(sum(lengths))
        if room is None:
            return _Room(torch.empty(0, self._width, dtype=self._dtype), in_memory=True), [0] * len(lengths)
        return room, lengths

    @torch.no_grad()
    def _computed(self, items: Sequence[Item]) -> list[Tensor]:
        """The states of each record of a pass, [tokens, width]; NaN for one that fails."""
        found = [torch.full((num_tokens(item), self._width), torch.nan, dtype=self._dtype) for item in items]

        def hidden_of(positions: list[int]) -> Tensor:
            with input_of(self.prefix.layers[self.prefix.length]) as captured:
                self._forward([items[position] for position in positions])
            return captured[0].to("cpu", self._dtype)

        for positions, hidden in isolated(hidden_of, range(len(items))):
            if hidden is not None:
                for position, states in zip(positions, hidden, strict=True):
                    found[position] = states[: len(found[position])]
        return found

    def _room(self, num_tokens: int) -> _Room | None:
        """Room for so many tokens' states, taken at once: neither memory nor disk can run out later. None if full."""
        shape = num_tokens, self._width
        size = self._dtype.itemsize * num_tokens * self._width
        try:
            if self.bytes_in_memory + size <= self._memory_limit:
                return _Room(shared(*shape, dtype=self._dtype).fill_(torch.nan), in_memory=True)
            require_room(Path(tempfile.gettempdir()), size)
            # Deleted before it is written to; the mapping keeps its contents until the states are freed.
            with tempfile.TemporaryFile(prefix="fedpriv-prefix-") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                states = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,)))
                return _Room(states.view(self._dtype).view(shape), in_memory=False)
        except (OSError, MemoryError) as error:
            log.warning("no room for %d MiB of the prefix cache: %s", size // 2**20, error)
            return None


@dataclass(frozen=True, eq=False)
class Body:
    """Everything before the head that may change, which decides a record's features.

    Attributes:
        tensors: {tensor name: float32}, of the adapter without the head.
        merged: what was added to the frozen weights.
    """

    tensors: Mapping[str, Tensor]
    merged: Merged

    def same(self, other: Body) -> bool:
        """Whether both give the same features; cheap if their tensors are the same objects."""
        if self.tensors.keys() != other.tensors.keys() or not same_merged(self.merged, other.merged):
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

    A record that is unusable or fails has NaN, and so a gradient that counts as zero. One for which there is no room is
    computed whenever it is needed; where each record has a pass of its own, to the same bits.

    Without `reserve` the room depends on the number of records of a set: this is for public records.

    Args:
        compute: the features, [records, width], with a body and through the prefix cache or not.
        model: of the features; all that its limit allows are in memory.
        width: of a record's features.
    """

    def __init__(self, compute: Callable[[Sequence[Item], Body, bool], Tensor], model: Cached, *, width: int) -> None:
        self._compute, self._model, self._width = compute, model, width
        self._memory_limit = model.memory_limit
        self._reserved: Tensor | None = None
        self._kept: weakref.WeakKeyDictionary[Records, _Kept] = weakref.WeakKeyDictionary()

    @property
    def bytes_in_memory(self) -> int:
        """The bytes of all features that are kept or have room reserved."""
        if self._reserved is not None:
            return self._reserved.nbytes
        return sum(kept.states.nbytes for kept in self._kept.values())

    @property
    def has_room(self) -> bool:
        """Whether any features are kept."""
        return self._reserved is None or len(self._reserved) > 0

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

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within this context other records are kept, if there is room for any; then those from before are."""
        before = self._reserved, self._kept
        self._reserved, self._kept = None if self.has_room else self._reserved, weakref.WeakKeyDictionary()
        try:
            yield
        finally:
            self._reserved, self._kept = before

    def features(self, drawn: Sequence[Drawn], body: Body, *, keep: bool) -> Tensor:
        """The features of the drawn records of each set, one set after the other, float32 [records, width].

        Args:
            drawn: in any number and order.
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
        size = torch.float32.itemsize * num_records * self._width
        try:
            if self.bytes_in_memory + size <= self._memory_limit:
                return shared(num_records, self._width, dtype=torch.float32).fill_(torch.nan)
            reason = f"the limit is {self._memory_limit // 2**20} MiB"
        except (OSError, MemoryError) as error:
            reason = str(error)
        log.warning("no room for %d MiB of features, which are computed each time: %s", size // 2**20, reason)
        return torch.empty(0, self._width)

    @torch.no_grad()
    def _computed(self, items: Sequence[Item], body: Body, cached: bool) -> Tensor:
        """[records, width]; NaN for a record that is unusable or fails."""
        result = shared(len(items), self._width, dtype=torch.float32).fill_(torch.nan)
        places = [place for place, item in enumerate(items) if usable(item)]
        readable = [items[place] for place in places]
        passes = list(self._model.passes(readable))
        num_read = list(accumulate(map(len, passes)))
        if cached and self._model.cache is not None:  # before there are workers, each of which would do it
            self._model.cache.fill(readable)

        def compute(positions: list[int]) -> Tensor:
            return self._compute([readable[position] for position in positions], body, cached).float().cpu()

        def keep(number: int, _worker: int) -> None:
            for positions, states in isolated(compute, passes[number]):
                if states is not None:
                    result[[places[position] for position in positions]] = states
            self._model.tell(FEATURES, num_read[number], len(readable))

        side_by_side(keep, len(passes), self._model.num_workers)
        return result

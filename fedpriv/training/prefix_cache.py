"""Frozen-prefix cache: below the first trainable layer, a record's hidden states never change.

They are computed once per record, kept in memory up to a limit and beyond it in a nameless memory-mapped file, and fed
to the first trainable layer; the layers below are then skipped. For private records the room is taken before any of
them is read, for as many and as long ones as there may be, so that no record's length decides where the others' go.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.data.records import BatchShape, Item, Records, num_tokens
from fedpriv.training.isolation import isolated
from fedpriv.training.progress import READING, Tell, silent
from fedpriv.training.shapes import Pass

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, eq=False)
class _Room:
    """Where states go.

    Attributes:
        states: [tokens, width], in the format of the base.
        in_memory: or in a file.
    """

    states: Tensor
    in_memory: bool


@dataclass(frozen=True)
class _Reserved:
    """Room that was taken before the records were read.

    Attributes:
        room: for `num_records` records of `longest` tokens each.
        num_records: >= 1.
        longest: tokens, >= 1.
    """

    room: _Room
    num_records: int
    longest: int

    def fits(self, index: int, tokens: int) -> bool:
        """Whether there is room for a record of this index and length, whatever the other records are."""
        return index < self.num_records and tokens <= self.longest


class PrefixCache:
    """Hidden states below the first trainable layer, for any number of record sets.

    The states are in the base's format and unpadded, and computed in fixed shapes, so those of a record do not depend
    on the batch it is drawn in, nor on the other records. All states of a record set are computed at once and freed
    together with the records. A record whose states cannot be computed has NaN, and so a gradient that counts as zero.
    One for which there is no room has its states computed, in the same shape and so to the same bits, whenever they are
    needed.

    Without `reserve` the room depends on the number of tokens of a record set: this is for public records.

    Args:
        forward: runs the model in eval mode on records, in a shape.
        passes: splits records into passes of fixed shapes.
        prefix: from `find_prefix`.
        width: of a hidden state.
        dtype: of the base.
        memory_limit: bytes to keep in memory; states beyond that go to a file without a name, which nobody else can
            open and which ends with this process, however it ends.
        tell: told how many records of a set are read.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Item], BatchShape], object],
        passes: Callable[[Sequence[Item]], Iterable[Pass]],
        prefix: Prefix,
        *,
        width: int,
        dtype: torch.dtype,
        memory_limit: int,
        tell: Tell = silent,
    ) -> None:
        self.prefix = prefix
        self._tell = tell
        self._forward = forward
        self._passes = passes
        self._width = width
        self._dtype = dtype
        self._memory_limit = memory_limit
        self._reserved: _Reserved | None = None
        self._kept: weakref.WeakKeyDictionary[Records, tuple[_Room, list[int]]] = weakref.WeakKeyDictionary()

    @property
    def bytes_in_memory(self) -> int:
        """Of all states that are kept or have room reserved."""
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

    def fill(self, items: Sequence[Item]) -> None:
        """Keep the states of all records of these records' sets, as far as there is room.

        It also has the sizes of their passes tried. A pass that stops at its middle would disturb that, so this comes
        first.
        """
        for records in dict.fromkeys(records for records, _ in items):
            if records not in self._kept:
                for _ in self._passes(records.items()):
                    pass
                self._kept[records] = self._keep(records)

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
        ((_, computed),) = self._computed([(records, index)])
        return computed

    def _keep(self, records: Records) -> tuple[_Room, list[int]]:
        """The states of all records that there is room for, and where each begins; the others have no tokens there."""
        room, lengths = self._room_for(records)
        starts = [0, *np.cumsum(lengths).tolist()]
        roomy = [index for index, length in enumerate(lengths) if length]
        for num_read, (position, states) in enumerate(self._computed(records.items(roomy)), start=1):
            index = roomy[position]
            room.states[starts[index] : starts[index + 1]] = states
            self._tell(READING, num_read, len(roomy))
        return room, starts

    def _room_for(self, records: Records) -> tuple[_Room, list[int]]:
        """Room, and how much of it each record takes, in tokens."""
        lengths = [num_tokens(item) for item in records.items()]
        if self._reserved is not None:
            self._kept.clear()
            fits = self._reserved.fits
            return self._reserved.room, [n if fits(index, n) else 0 for index, n in enumerate(lengths)]
        room = self._room(sum(lengths))
        if room is None:
            return _Room(torch.empty(0, self._width, dtype=self._dtype), in_memory=True), [0] * len(lengths)
        return room, lengths

    @torch.no_grad()
    def _computed(self, items: Sequence[Item]) -> Iterator[tuple[int, Tensor]]:
        """The position and the states, [tokens, width], of each record; NaN for one that fails."""
        for together in self._passes(items):
            run = partial(self._hidden_of, items, together.shape)
            for positions, hidden in isolated(run, together.positions):
                for row, position in enumerate(positions):
                    tokens = num_tokens(items[position])
                    failed = torch.full((tokens, self._width), torch.nan, dtype=self._dtype)
                    yield position, failed if hidden is None else hidden[row, :tokens]

    def _hidden_of(self, items: Sequence[Item], shape: BatchShape, positions: list[int]) -> Tensor:
        with input_of(self.prefix.layers[self.prefix.length]) as captured:
            self._forward([items[position] for position in positions], shape)
        return captured[0].to("cpu", self._dtype)

    def _room(self, num_tokens: int) -> _Room | None:
        """Room for so many tokens' states, taken at once: neither memory nor disk can run out later. None if full."""
        shape = num_tokens, self._width
        size = self._dtype.itemsize * num_tokens * self._width
        try:
            if self.bytes_in_memory + size <= self._memory_limit:
                return _Room(torch.full(shape, torch.nan, dtype=self._dtype), in_memory=True)
            # Deleted before it is written to; the mapping keeps its contents until the states are freed.
            with tempfile.TemporaryFile(prefix="fedpriv-prefix-") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                states = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,)))
                return _Room(states.view(self._dtype).view(shape), in_memory=False)
        except (OSError, MemoryError) as error:
            log.warning("no room for %d MiB of the prefix cache: %s", size // 2**20, error)
            return None

"""Serving stored models from bounded memory: the most recently used ones are kept, ready for inference.

Models share the memory of tensors that they have in common. Any other tensor of a model that is not in memory is built
in place of the least recently used model's, and only the blocks in which the two differ, by their numbers, are read.

Blocks are read in the file's order, many at once, and nothing that is not needed. A memory map would bring in every
page by a fault of its own or, read ahead, many that were not asked for; and pages that were not touched while a model
was loaded would be read while it computes.

Source: Guan et al. 2025, section 5.2.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.models.serving.sources import BoundedCache, CacheStatistics, NoRoomError
from fedpriv.models.variants import Manifest
from fedpriv.models.variants.blocks import BlockLayout, TensorSpec
from fedpriv.models.variants.store import Store


class StoreRegistry:
    """Serves the models of a store from bounded memory.

    Weights are read as they are stored: a registry does not check for damage, `Store.verify` does. Not thread-safe.

    Args:
        store: open for as long as the registry is used.
        memory_bytes: bound on the models in memory, where a tensor that several of them have in common counts once;
            pages of the store's files that the system caches do not count (`memory_for_models`).
    """

    def __init__(self, store: Store, memory_bytes: int) -> None:
        self._store = store
        self._rows, self._mapped = _OpenRows.of(store), store.blocks
        self._memory_bytes = memory_bytes
        self._contents: weakref.WeakKeyDictionary[Manifest, tuple[_Content, ...]] = weakref.WeakKeyDictionary()
        self._models: BoundedCache[list[_TensorMemory]] = BoundedCache(_bytes_of)
        self._memories: list[_TensorMemory] = []
        self._served: list[_Served] = []

    @property
    def names(self) -> list[str]:
        """The models in memory, least recently used first."""
        return self._models.names

    @property
    def statistics(self) -> CacheStatistics:
        """Counts of its work so far."""
        return self._models.statistics

    @property
    def used_bytes(self) -> int:
        """Memory allocated, including what no model needs any more."""
        return sum(memory.num_bytes for memory in self._memories)

    def get(self, name: str) -> dict[str, Tensor]:
        """The model's tensors, read-only and valid until the next call, which may reuse their memory.

        Raises:
            InputError: there is no such model, or it does not fit into memory.
            StoreError: the store is damaged.
        """
        return {memory.content.spec.name: memory.tensor for memory in self._load(name, None)}

    def load_into(self, model: nn.Module, name: str) -> None:
        """Give a built model the stored model's weights, in memory shared with the registry: for inference only.

        The weights stay in memory until the model is loaded with another name, released or gone. If they have been
        changed in place in the meantime, they are loaded again, as far as PyTorch counts the change: one through
        `.data` stays unnoticed, and so do the statistics of a batch norm that is not in `eval` mode. Other models that
        have such a tensor in common see the change until then.

        Args:
            model: on the CPU, of the stored model's architecture. Its parameters and buffers remain the same objects,
                with different memory.
            name: of a stored model.

        Raises:
            InputError: there is no such model, it has another architecture, or the models being served leave no
                memory.
            StoreError: the store is damaged.
        """
        targets = targets_in(model, self._store.manifest(name).layout)
        memories = {memory.content.spec.name: memory for memory in self._load(name, model)}
        for tensor_name, target in targets.items():
            if target.data_ptr() != memories[tensor_name].tensor.data_ptr():
                target.data = memories[tensor_name].tensor
        self._served = [served for served in self._served if served.model() is not model]
        weights = [(target, memories[tensor_name]) for tensor_name, target in targets.items()]
        self._served.append(_Served.of(weakref.ref(model), name, weights))

    def release(self, model: nn.Module) -> None:
        """Allow the weights of a model that was loaded to be replaced; load it again before it computes anything."""
        self._forget_changed()
        self._served = [served for served in self._served if served.model() is not model]

    def _load(self, name: str, model: nn.Module | None) -> list[_TensorMemory]:
        """The memory that holds the model of this name, filled."""
        manifest = self._store.manifest(name)
        if self._mapped is not self._store.blocks:  # written since, so its file may be another
            self._rows, self._mapped = _OpenRows.of(self._store), self._store.blocks
        if manifest.basis is not None:
            raise InputError(f"model {name!r}: is restored from a basis, without blocks to copy; use Store.tensors")
        self._forget_changed()
        if manifest not in self._contents:
            self._contents[manifest] = _contents_of(manifest)
        contents = self._contents[manifest]
        memories = self._models.get(name) or []
        if len(memories) != len(contents) or any(
            memory.content.key != content.key for memory, content in zip(memories, contents, strict=True)
        ):
            memories = self._allocate(name, manifest.layout, contents, model)
        self._models.keep(name, memories, bytes_read=_fill(memories, self._store, self._rows, manifest))
        return memories

    def _forget_changed(self) -> None:
        """Forget the content of memory that was written to, and models that are gone."""
        for served in self._served:
            for memory in served.changed():
                memory.forget()
        self._served = [served.refreshed() for served in self._served if served.model() is not None]

    def _allocate(
        self, name: str, layout: BlockLayout, contents: Sequence[_Content], model: nn.Module | None
    ) -> list[_TensorMemory]:
        """Memory for a model: what holds its tensors already, and for the rest what is free.

        Memory becomes free when the least recently used models are given up, except those that other built models are
        being served.
        """
        if layout.padded_bytes > self._memory_bytes:
            raise InputError(f"memory_bytes = {self._memory_bytes}: model {name!r} alone needs {layout.padded_bytes}")
        self._models.forget(name)
        elsewhere = [served for served in self._served if served.model() is not model]
        present = {memory.content.key: memory for memory in self._memories}
        found = {content.key: present[content.key] for content in contents if content.key in present}
        missing = [content for content in contents if content.key not in present]
        pinned = [*found.values(), *(memory for served in elsewhere for _, memory, _ in served.weights)]

        def placed() -> list[_TensorMemory] | None:
            missing[:] = self._place(missing, layout, pinned, found)
            return None if missing else [found[content.key] for content in contents]

        try:
            return self._models.make_room(placed, in_use={served.name for served in elsewhere})
        except NoRoomError:
            raise InputError(
                f"memory_bytes = {self._memory_bytes}: no room for model {name!r} with the "
                f"{len(self._models.names)} models that are served"
            ) from None

    def _place(
        self,
        missing: Sequence[_Content],
        layout: BlockLayout,
        pinned: list[_TensorMemory],
        found: dict[str, _TensorMemory],
    ) -> list[_Content]:
        """Find memory for contents, preferably what held the tensor of another model; returns those without any."""
        used = {id(memory) for memories in (pinned, *self._models.held) for memory in memories}
        free: dict[TensorSpec, list[_TensorMemory]] = {}
        for memory in self._memories:
            if id(memory) not in used:
                free.setdefault(memory.content.spec, []).append(memory)
        homeless = []
        for content in missing:
            if same := free.get(content.spec):
                memory = same.pop()
                memory.assign(content)
                found[content.key] = memory
                pinned.append(memory)
            else:
                homeless.append(content)
        spare = [memory for same in free.values() for memory in same]
        room = self._memory_bytes - self.used_bytes
        for content in homeless.copy():
            needed = _content_bytes(content, layout)
            while needed > room and spare:  # of other shapes
                given_up = spare.pop()
                self._memories = [memory for memory in self._memories if memory is not given_up]
                room += given_up.num_bytes
            if needed <= room:
                room -= needed
                homeless.remove(content)
                found[content.key] = _TensorMemory(content, layout)
                self._memories.append(found[content.key])
                pinned.append(found[content.key])
        return homeless


def _bytes_of(models: Collection[list[_TensorMemory]]) -> int:
    """The bytes of models in memory; a tensor that several have in common counts once."""
    return sum({id(memory): memory.num_bytes for memories in models for memory in memories}.values())


def memory_for_models(store: Store, memory_bytes: int) -> int:
    """The share of a process's memory for a registry; the rest is for the system's cache of the store's files.

    All of it where it holds all models, tensors in common once, or where the files would not fit with one model
    anyway. Else enough is left for the files: then a load copies from memory, which is many times as fast as a disk.

    Args:
        store: with at least one model.
        memory_bytes: for models and files together.
    """
    manifests = [store.manifest(name) for name in store.names]
    largest = max(manifest.layout.padded_bytes for manifest in manifests)
    if _distinct_bytes(manifests) <= memory_bytes or store.bytes_stored > memory_bytes:
        return memory_bytes
    return max(largest, memory_bytes - store.bytes_stored)


def _fill(memories: Sequence[_TensorMemory], store: Store, rows: _OpenRows | None, manifest: Manifest) -> int:
    """Read what memories do not hold of a model's content yet; returns the number of bytes copied."""
    stale = [memory for memory in memories if not memory.intact]
    wanted = [(memory.values, *memory.missing()) for memory in stale if memory.content.numbers is not None]
    for memory in stale:
        memory.forget()  # in case the copy fails
    if wanted and rows is not None:
        _read_rows(rows, [_Wanted(target, positions, store.rows(numbers)) for target, positions, numbers in wanted])
    extra = [memory for memory in stale if memory.content.numbers is None]
    if extra:
        values = store.extras(manifest.name)
        for memory in extra:
            memory.values[...] = values[memory.content.spec.name]
    for memory in stale:
        memory.keep()
    copied = sum(len(positions) * values.strides[0] for values, positions, _ in wanted)
    return copied + sum(memory.num_bytes for memory in extra)


_GAP_BYTES = 2**14  # reading this much that is not needed takes as long as another call
_MOST_RUNS = 500  # in one call, which takes at most 1,024 pieces of memory, gaps included


@dataclass(frozen=True)
class _OpenRows:
    """An open file of equal rows.

    Attributes:
        descriptor: of the file.
        offset: the byte at which the first row begins.
        row_bytes: of one row.
    """

    descriptor: int
    offset: int
    row_bytes: int

    @classmethod
    def of(cls, store: Store) -> _OpenRows | None:
        """The file of a store's blocks, open as long as the result is kept; None before the first model is stored."""
        path = next(store.path.glob("blocks.*.npy"), None)
        if path is None:
            return None
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            (_, *row_shape), _, dtype = np.lib.format.read_array_header_1_0(file)
            found = cls(os.dup(file.fileno()), file.tell(), dtype.itemsize * int(np.prod(row_shape)))
        weakref.finalize(found, os.close, found.descriptor)
        return found


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Rows and where they belong.

    Attributes:
        target: [n, values], contiguous; a row has the file's `row_bytes`.
        positions: [k] int64, distinct, in [0, n).
        rows: [k] int64: the file's row for each position.
    """

    target: NDArray[Any]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Extent:
    """A piece of the file that is read at once.

    Attributes:
        start, end: bytes, counted from the first row.
        pieces: memory for these bytes, in the file's order.
    """

    start: int
    end: int
    pieces: list[memoryview]


def _read_rows(file: _OpenRows, wanted: Sequence[_Wanted]) -> None:
    """Read rows to their positions.

    Raises:
        ValueError: the file ends too early, in one line.
        OSError: the file cannot be read.
    """
    unneeded = memoryview(bytearray(_GAP_BYTES))
    extents = [extent for each in wanted for extent in _extents(each, file.row_bytes, unneeded)]
    extents.sort(key=lambda extent: extent.start)
    if len(extents) > 1 and hasattr(os, "posix_fadvise"):  # not on macOS
        for extent in extents:  # all are under way before the first is waited for
            start, num_bytes = file.offset + extent.start, extent.end - extent.start
            os.posix_fadvise(file.descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
    for extent in extents:
        _read(file.descriptor, file.offset + extent.start, extent.pieces)


def _extents(wanted: _Wanted, row_bytes: int, unneeded: memoryview) -> list[_Extent]:
    """The pieces to read: runs that are contiguous in the file and in the target, with short gaps between them."""
    if not len(wanted.rows):
        return []
    order = np.argsort(wanted.rows, kind="stable")
    rows, positions = wanted.rows[order], wanted.positions[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(rows) != 1) | (np.diff(positions) != 1)])
    lengths = np.diff(np.r_[starts, len(rows)])
    gaps = (rows[starts[1:]] - rows[starts[:-1]] - lengths[:-1]) * row_bytes
    apart = (gaps < 0) | (gaps > _GAP_BYTES) | (np.arange(1, len(starts)) % _MOST_RUNS == 0)
    target = wanted.target.reshape(-1).view(np.uint8).data
    begins = [0, *(1 + np.flatnonzero(apart)).tolist(), len(starts)]
    gaps = np.r_[0, gaps].tolist()
    runs = (row_bytes * np.stack([rows[starts], positions[starts], lengths], axis=1)).tolist()
    extents = []
    for begin, end in pairwise(begins):
        pieces: list[memoryview] = []
        for index in range(begin, end):
            if index > begin and gaps[index]:
                pieces.append(unneeded[: gaps[index]])
            _, first, size = runs[index]
            pieces.append(target[first : first + size])
        extents.append(_Extent(runs[begin][0], runs[end - 1][0] + runs[end - 1][2], pieces))
    return extents


def _read(descriptor: int, start: int, pieces: list[memoryview]) -> None:
    """Fill pieces of memory with the bytes that follow one another in a file."""
    while pieces:
        count = os.preadv(descriptor, pieces, start)
        if not count:
            raise ValueError(f"{sum(map(len, pieces))} bytes are missing at the end of the blocks")
        start += count
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][count:]


@dataclass(frozen=True, eq=False)
class _Served:
    """A model that shares memory; keeps tensors and versions, so that changes are noticed even after it is gone."""

    model: weakref.ref[nn.Module]
    name: str
    weights: list[tuple[Tensor, _TensorMemory, int]]

    @classmethod
    def of(cls, model: weakref.ref[nn.Module], name: str, weights: Iterable[tuple[Tensor, _TensorMemory]]) -> _Served:
        return cls(model, name, [(tensor, memory, tensor._version) for tensor, memory in weights])

    def refreshed(self) -> _Served:
        return _Served.of(self.model, self.name, [(tensor, memory) for tensor, memory, _ in self.weights])

    def changed(self) -> list[_TensorMemory]:
        return [memory for tensor, memory, version in self.weights if tensor._version != version]


def targets_in(model: nn.Module, layout: BlockLayout) -> dict[str, Tensor]:
    """{tensor of the layout: the model's parameter or buffer}.

    Raises:
        InputError: the model has other tensors, or they are not on the CPU.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    wanted = {tensor.name for tensor in layout.tensors}
    covered = {id(tensor) for name, tensor in state.items() if name in wanted}
    # As in safetensors files, only one of the names of a tied tensor needs to be present.
    targets = {name: tensor for name, tensor in state.items() if name in wanted or id(tensor) not in covered}
    specs = (
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sorted(targets.items())
    )
    if difference := layout.difference(replace(layout, tensors=tuple(specs))):
        raise InputError(f"model: another architecture: {difference}")
    for name, tensor in targets.items():
        if tensor.device.type != "cpu":
            raise InputError(f"model: tensor {name!r} is on {tensor.device}; models are served on the CPU")
    return targets


_NOTHING = -1


@dataclass(frozen=True, eq=False)
class _Content:
    """A tensor of a stored model, without its values.

    Attributes:
        spec: of the tensor.
        key: equal where name, shape, type and values are equal.
        numbers: [n] of its blocks; None for an extra, which has none.
    """

    spec: TensorSpec
    key: str
    numbers: NDArray[np.int64] | None


def _contents_of(manifest: Manifest) -> tuple[_Content, ...]:
    """All tensors of a model."""
    blocked, found = manifest.layout.blocked, []
    for spec in manifest.layout.tensors:
        if positions := blocked.get(spec.name):
            numbers = manifest.blocks[positions.start : positions.stop]
            found.append(_Content(spec, f"{spec} {hashlib.sha256(numbers.tobytes()).hexdigest()}", numbers))
        else:
            found.append(_Content(spec, f"{spec} {manifest.extras[spec.name]}", None))
    return tuple(found)


def _distinct_bytes(manifests: list[Manifest]) -> int:
    """The memory of these models if every tensor that some of them have in common is there once."""
    sizes = {
        content.key: _content_bytes(content, manifest.layout)
        for manifest in manifests
        for content in _contents_of(manifest)
    }
    return sum(sizes.values())


def _content_bytes(content: _Content, layout: BlockLayout) -> int:
    """The bytes of a tensor in memory, with its last block's padding."""
    if content.numbers is None:
        return content.spec.num_bytes
    return len(content.numbers) * layout.block_size * np.dtype(layout.dtype).itemsize


class _TensorMemory:
    """Memory for a tensor.

    Args:
        content: the first that it is meant for; later ones have the same shape and type.
        layout: of a model that has it.

    Attributes:
        values: [blocks, block_size], or those of an extra.
        tensor: shares the memory.
        content: what it is meant to hold.
        intact: whether it holds that.
    """

    def __init__(self, content: _Content, layout: BlockLayout) -> None:
        spec, numbers = content.spec, content.numbers
        shape = spec.shape if numbers is None else (len(numbers), layout.block_size)
        self.values = np.empty(shape, spec.dtype)
        self.tensor = torch.from_numpy(self.values.reshape(-1)[: spec.size].reshape(spec.shape))
        self.assign(content)
        self.forget()

    @property
    def num_bytes(self) -> int:
        """The bytes of the memory."""
        return self.values.nbytes

    def assign(self, content: _Content) -> None:
        """Make it memory for another content; what it holds so far is remembered."""
        self.content, self.intact = content, False

    def forget(self) -> None:
        """Remember nothing of what it holds, so that all of it is read again."""
        self._numbers = None if self.content.numbers is None else np.full(len(self.content.numbers), _NOTHING)
        self.intact = False

    def missing(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[k] positions, and [k] numbers, of the content's blocks that it does not hold yet; of an extra none."""
        if self.content.numbers is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        positions = np.flatnonzero(self._numbers != self.content.numbers)
        return positions, self.content.numbers[positions]

    def keep(self) -> None:
        """Note that it now holds its content."""
        self._numbers, self.intact = self.content.numbers, True

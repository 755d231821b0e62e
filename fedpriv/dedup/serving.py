"""Serving stored models from bounded memory: the most recently used ones are kept, ready for inference.

A model that is not in memory is built in place of the least recently used one. Only the blocks in which the two
differ, by their numbers, are copied.

Source: Guan et al. 2025, section 5.2.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.dedup.blocks import Layout, TensorSpec
from fedpriv.dedup.manifests import Manifest
from fedpriv.dedup.store import Store
from fedpriv.errors import InputError

_SHORT_RUN_BYTES = 4096
_CHUNK_BYTES = 2**20
_NOTHING = -1


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a registry has done so far.

    Attributes:
        hits: requests for models that were in memory.
        misses: requests for which blocks were copied.
        bytes_copied: from the store, extras included.
    """

    hits: int = 0
    misses: int = 0
    bytes_copied: int = 0


class Registry:
    """Serves the models of a store from bounded memory.

    Weights are read as they are stored: a registry does not check for damage, `Store.verify` does. Not thread-safe.

    Args:
        store: open for as long as the registry is used.
        memory_bytes: bound on the reconstructed models; the store's mapped blocks belong to the system's page cache
            and do not count.
    """

    def __init__(self, store: Store, memory_bytes: int) -> None:
        self._store = store
        self._memory_bytes = memory_bytes
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._served: list[_Served] = []
        self.statistics = Statistics()

    @property
    def names(self) -> list[str]:
        """The models in memory, least recently used first."""
        return list(self._slots)

    def get(self, name: str) -> dict[str, Tensor]:
        """The model's tensors, read-only and valid until the next call, which may reuse their memory.

        Raises:
            InputError: there is no such model, or it does not fit into memory.
            StoreError: the store is damaged.
        """
        return dict(self._slot(name, None).tensors)

    def load_into(self, model: nn.Module, name: str) -> None:
        """Give a built model the stored model's weights, in memory shared with the registry: for inference only.

        The weights stay in memory until the model is loaded with another name or is gone. If they have been changed
        in place in the meantime, they are loaded again.

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
        slot = self._slot(name, model)
        for tensor_name, target in targets.items():
            if target.data_ptr() != slot.tensors[tensor_name].data_ptr():
                target.data = slot.tensors[tensor_name]
        self._served = [served for served in self._served if served.model() is not model]
        self._served.append(_Served.of(weakref.ref(model), slot, tuple(targets.values())))

    def _slot(self, name: str, model: nn.Module | None) -> _Slot:
        """The memory that holds the model of this name, filled."""
        manifest = self._store.manifest(name)
        if manifest.basis is not None:
            raise InputError(f"model {name!r}: is stored by a shared basis, without blocks to copy; use Store.restore")
        self._forget_changed()
        slot = self._slots.get(name)
        if slot is None or slot.layout != manifest.layout:
            slot = self._allocate(name, manifest.layout, model)
        copied = slot.fill(self._store, manifest)
        self._slots[name] = slot
        self._slots.move_to_end(name)
        before = self.statistics
        self.statistics = replace(
            before,
            hits=before.hits + (not copied),
            misses=before.misses + bool(copied),
            bytes_copied=before.bytes_copied + copied,
        )
        return slot

    def _forget_changed(self) -> None:
        """Forget the content of memory that was written to, and models that are gone."""
        for served in self._served:
            if served.was_changed():
                served.slot.forget()
        self._served = [served.refreshed() for served in self._served if served.model() is not None]

    def _allocate(self, name: str, layout: Layout, model: nn.Module | None) -> _Slot:
        """Memory for a model: free, or taken from the least recently used models that are not being served."""
        if layout.padded_bytes > self._memory_bytes:
            raise InputError(f"memory_bytes = {self._memory_bytes}: model {name!r} alone needs {layout.padded_bytes}")
        pinned = {id(served.slot) for served in self._served if served.model() is not model}
        evictable = [other for other, slot in self._slots.items() if id(slot) not in pinned]
        used = sum(slot.layout.padded_bytes for slot in self._slots.values())
        for other in evictable:
            if used + layout.padded_bytes <= self._memory_bytes:
                break
            slot = self._slots.pop(other)
            if slot.layout == layout:
                return slot
            used -= slot.layout.padded_bytes
        if used + layout.padded_bytes > self._memory_bytes:
            raise InputError(
                f"memory_bytes = {self._memory_bytes}: no room for model {name!r} beside the "
                f"{len(self._slots)} models that are served"
            )
        return _Slot(layout)


class _Slot:
    """The memory of one model: the tensors that share it, and the blocks that it holds."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._blocks = np.empty((layout.num_blocks, layout.block_size), layout.dtype)
        self._extras = {extra.name: np.empty(extra.shape, extra.dtype) for extra in layout.extras}
        arrays = layout.from_blocks(self._blocks, self._extras)
        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.forget()

    def forget(self) -> None:
        """Make the next `fill` copy everything."""
        self._numbers = np.full(self.layout.num_blocks, _NOTHING)
        self._digests: dict[str, str] = {}

    def fill(self, store: Store, manifest: Manifest) -> int:
        """Load the model of a manifest of this layout; returns the number of bytes copied."""
        positions = np.flatnonzero(self._numbers != manifest.blocks)
        numbers = manifest.blocks[positions]
        source, rows = store.blocks, store.rows(numbers)
        self._numbers[positions] = _NOTHING  # in case the copy fails
        copy_rows(self._blocks, positions, source, rows)
        self._numbers[positions] = numbers
        return len(positions) * self._blocks.strides[0] + self._fill_extras(store, manifest)

    def _fill_extras(self, store: Store, manifest: Manifest) -> int:
        changed = [name for name, digest in manifest.extras.items() if self._digests.get(name) != digest]
        if not changed:
            return 0
        self._digests = {}
        extras = store.extras(manifest.name)
        for name in changed:
            self._extras[name][...] = extras[name]
        self._digests = dict(manifest.extras)
        return sum(extras[name].nbytes for name in changed)


@dataclass(frozen=True, eq=False)
class _Served:
    """A model that shares a slot's memory; keeps its tensors, so that changes are noticed even after it is gone."""

    model: weakref.ref[nn.Module]
    slot: _Slot
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, model: weakref.ref[nn.Module], slot: _Slot, tensors: tuple[Tensor, ...]) -> _Served:
        return cls(model, slot, tensors, tuple(tensor._version for tensor in tensors))

    def refreshed(self) -> _Served:
        return _Served.of(self.model, self.slot, self.tensors)

    def was_changed(self) -> bool:
        return any(tensor._version != version for tensor, version in zip(self.tensors, self.versions, strict=True))


def copy_rows(
    target: NDArray[Any], positions: NDArray[np.int64], source: NDArray[Any], rows: NDArray[np.int64]
) -> None:
    """Copy rows [k] of one array to positions [k] of another; runs that are contiguous in both are copied at once.

    Args:
        target: [n, values].
        positions: ascending.
        source: [m, values] of the same dtype.
        rows: as many as positions.
    """
    if not len(positions):
        return
    starts = np.flatnonzero(np.r_[True, (np.diff(positions) != 1) | (np.diff(rows) != 1)])
    if len(positions) * target.strides[0] < _SHORT_RUN_BYTES * len(starts):
        step = max(1, _CHUNK_BYTES // target.strides[0])
        for first in range(0, len(positions), step):
            target[positions[first : first + step]] = source[rows[first : first + step]]
        return
    lengths = np.diff(np.r_[starts, len(positions)])
    for position, row, length in zip(positions[starts].tolist(), rows[starts].tolist(), lengths.tolist(), strict=True):
        target[position : position + length] = source[row : row + length]


def targets_in(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
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

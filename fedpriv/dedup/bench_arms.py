"""The ways of serving that `fedpriv.dedup.bench` compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fedpriv.dedup.bench_plain_files import MappedFiles, PlainFiles
from fedpriv.dedup.serving import Registry, memory_for_models
from fedpriv.dedup.store import Store

ARMS = ("store", "safetensors", "straight", "mmap")
"""The store's registry; safetensors' `load_file`, copied into the model; the file read straight into the model's
memory; and the file mapped, its tensors taken as they are"""


IN_FLIGHT_BYTES = 16 * 2**20
"""What every arm gets beside its memory, for pages under way."""
_READ_AHEAD_BYTES = 32 * 2**20

Targets = Mapping[str, Mapping[str, Tensor]]


class Loader(Protocol):
    """One arm: loads variants and counts misses and bytes."""

    def load(self, name: str) -> Mapping[str, Tensor]:
        """The variant's tensors, which its workload's model then has, if there is one."""

    def counts(self) -> tuple[int, int]:
        """Variants that were not in memory, and bytes copied for them, so far."""


def give_up(targets: Iterable[Tensor]) -> None:
    """Give up the memory of weights that every load replaces, so that only what loads them holds it."""
    for target in targets:
        target.data = torch.zeros((), dtype=target.dtype).expand(target.shape)


class _Served:
    """The models that hold loaded weights: all of one architecture, since memory is reused for equal shapes only.

    A model of another one would keep memory that its arm has given up and no longer counts.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets, self._names = targets, set[str]()
        self._shapes = {
            name: {tensor: (value.shape, value.dtype) for tensor, value in own.items()} for name, own in targets.items()
        }

    def prepare(self, name: str) -> None:
        """Give up the weights of models of other architectures, before this variant is loaded."""
        if name in self._targets:
            for other in [each for each in self._names if self._shapes[each] != self._shapes[name]]:
                give_up(self._targets[other].values())
                self._names.remove(other)
            self._names.add(name)


class StoreArm:
    """A registry that loads into the workloads' models.

    Args:
        store: open.
        memory_bytes: for models and the system's cache of the store's files.
        models: {variant: the model that it is loaded into}; empty to load dicts of tensors.
        targets: {variant: {tensor: the model's parameter or buffer}}.
    """

    def __init__(self, store: Store, memory_bytes: int, models: Mapping[str, nn.Module], targets: Targets) -> None:
        self._models, self._targets = models, targets
        self.models_bytes = memory_for_models(store, memory_bytes)
        self._registry = Registry(store, self.models_bytes)
        self._used: nn.Module | None = None
        self._served = _Served(targets)

    def load(self, name: str) -> Mapping[str, Tensor]:
        if name not in self._models:
            return self._registry.get(name)
        if self._used not in (None, self._models[name]):
            self._registry.release(self._used)  # one model computes at a time, whatever its architecture
        self._used = self._models[name]
        self._served.prepare(name)
        self._registry.load_into(self._used, name)
        return self._targets[name]

    def counts(self) -> tuple[int, int]:
        return self._registry.statistics.misses, self._registry.statistics.bytes_copied


class PlainArm:
    """Files whose tensors become those of the workloads' models.

    Args:
        files: loads them.
        targets: as `StoreArm`; empty to load dicts of tensors.
    """

    def __init__(self, files: PlainFiles | MappedFiles, targets: Targets) -> None:
        self._files, self._targets, self._served = files, targets, _Served(targets)

    def load(self, name: str) -> Mapping[str, Tensor]:
        self._served.prepare(name)
        tensors = self._files.get(name)
        if name not in self._targets:
            return tensors
        for tensor_name, target in self._targets[name].items():
            target.data = tensors[tensor_name]
        return self._targets[name]

    def counts(self) -> tuple[int, int]:
        return self._files.misses, self._files.bytes_read


def plain_arm(
    arm: str, files: Mapping[str, Path], memory_bytes: int, targets: Targets, *, maps_count: bool
) -> PlainArm:
    """An arm that serves plain files, with its memory allocated and all headers read.

    Args:
        arm: one of `ARMS`, except the store.
        files: {variant: its safetensors file}.
        memory_bytes: for loaded models, and for pages of the file that is being read.
        targets: as `StoreArm`.
        maps_count: whether files that are mapped count as memory.
    """
    if arm == "mmap":
        return PlainArm(MappedFiles(files, memory_bytes if maps_count else None), targets)
    # What load_file maps, or the system reads ahead, must be used before it has to be given back, or it is read twice,
    # which costs more than one model less in memory.
    largest = max(path.stat().st_size for path in files.values())
    under_way = 0 if largest <= IN_FLIGHT_BYTES else largest if arm == "safetensors" else _READ_AHEAD_BYTES
    models_bytes = max(largest, memory_bytes - under_way)
    return PlainArm(PlainFiles(files, models_bytes, "safetensors" if arm == "safetensors" else "direct"), targets)

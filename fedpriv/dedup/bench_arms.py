"""The ways of serving that `fedpriv.dedup.bench` compares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from fedpriv.dedup.bench_plain_files import MappedFiles, PlainFiles
from fedpriv.dedup.blocks import Layout
from fedpriv.dedup.serving import Registry, memory_for_models, targets_in
from fedpriv.dedup.store import Store

ARMS = ("store", "safetensors", "straight", "mmap")
"""The store's registry; safetensors' `load_file`, copied into the model; the file read straight into the model's
memory; and the file mapped, its tensors taken as they are"""


class Loader(Protocol):
    """One arm: loads variants and counts misses and bytes."""

    def load(self, name: str) -> Mapping[str, Tensor]:
        """The variant's tensors, which its workload's model then has, if there is one."""

    def counts(self) -> tuple[int, int]:
        """Variants that were not in memory, and bytes copied for them, so far."""


class StoreArm:
    """A registry that loads into the workloads' models.

    Args:
        store: open.
        memory_bytes: for models and the system's cache of the store's files.
        models: {variant: the model that it is loaded into}; empty to load dicts of tensors.
    """

    def __init__(self, store: Store, memory_bytes: int, models: Mapping[str, nn.Module]) -> None:
        self._store, self._models = store, models
        self.models_bytes = memory_for_models(store, memory_bytes)
        self._registry = Registry(store, self.models_bytes)

    def load(self, name: str) -> Mapping[str, Tensor]:
        if name not in self._models:
            return self._registry.get(name)
        self._registry.load_into(self._models[name], name)
        return targets_in(self._models[name], self._store.manifest(name).layout)

    def counts(self) -> tuple[int, int]:
        return self._registry.statistics.misses, self._registry.statistics.bytes_copied


class PlainArm:
    """Files whose tensors become those of the workloads' models.

    Args:
        files: loads them.
        targets: {variant: {tensor: parameter or buffer of its workload's model}}; empty to load dicts of tensors.
    """

    def __init__(self, files: PlainFiles | MappedFiles, targets: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._files, self._targets = files, targets

    def load(self, name: str) -> Mapping[str, Tensor]:
        tensors = self._files.get(name)
        if name not in self._targets:
            return tensors
        for tensor_name, target in self._targets[name].items():
            target.data = tensors[tensor_name]
        return self._targets[name]

    def counts(self) -> tuple[int, int]:
        return self._files.misses, self._files.bytes_read


def plain_arm(
    arm: str,
    files: Mapping[str, Path],
    layouts: Mapping[str, Layout],
    memory_bytes: int,
    models: Mapping[str, nn.Module],
    *,
    maps_count: bool,
) -> PlainArm:
    """An arm that serves plain files, with its memory allocated and all headers read.

    Args:
        arm: one of `ARMS`, except the store.
        files: {variant: its safetensors file}.
        layouts: of the variants.
        memory_bytes: for loaded models; what they leave is for the system's cache.
        models: as `StoreArm`.
        maps_count: whether files that are mapped count as memory.
    """
    targets = {name: targets_in(model, layouts[name]) for name, model in models.items()}
    if arm == "mmap":
        return PlainArm(MappedFiles(files, memory_bytes if maps_count else None), targets)
    return PlainArm(PlainFiles(files, memory_bytes, "direct" if arm == "straight" else "safetensors"), targets)

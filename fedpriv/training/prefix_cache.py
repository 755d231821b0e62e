"""Frozen-prefix cache: below the first trainable layer, a record's hidden states never change.

They are computed once per record, kept in memory up to a limit and beyond it in a nameless memory-mapped file, and fed
to the first trainable layer; the layers below are then skipped.
"""

from __future__ import annotations

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
from fedpriv.training.shapes import Pass


@dataclass(frozen=True)
class Prefix:
    """The layers below the first trainable one.

    Attributes:
        parent: the module that contains the list of layers.
        name: the name of the list in that module.
        layers: all layers.
        length: number of layers before the first trainable one, >= 1.
    """

    parent: nn.Module
    name: str
    layers: nn.ModuleList
    length: int


class _StopForwardError(Exception):
    """Ends a forward pass once the prefix's output is known."""


def find_prefix(model: Any) -> Prefix | None:
    """The frozen prefix of a peft model; None if the first layer, or something before it, is trained."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad and ".modules_to_save." not in name]
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and trained and all(n.startswith(f"{path}.") for n in trained):
            first = min(int(name[len(path) + 1 :].split(".")[0]) for name in trained)
            parent_path, _, name = path.rpartition(".")
            return Prefix(model.get_submodule(parent_path), name, module, first) if first else None
    return None


@contextmanager
def prefix_output(prefix: Prefix) -> Iterator[list[Tensor]]:
    """Within this context a forward pass stops before the first trainable layer and appends its input to the list."""
    captured: list[Tensor] = []

    def stop(_module: nn.Module, args: Any) -> None:
        captured.append(args[0])
        raise _StopForwardError

    handle = prefix.layers[prefix.length].register_forward_pre_hook(stop)
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


class PrefixCache:
    """Hidden states below the first trainable layer, for any number of record sets.

    The states are float32 and unpadded, and computed in fixed shapes, so those of a record do not depend on the batch
    it is drawn in, nor on the other records. All states of a record set are computed at once and freed together with
    the records. A record whose states cannot be computed has NaN, and so a gradient that counts as zero.

    Args:
        forward: runs the model in eval mode on records, in a shape.
        passes: splits records into passes of fixed shapes.
        prefix: from `find_prefix`.
        width: of a hidden state.
        memory_limit: bytes to keep in memory; states beyond that go to a file without a name, which nobody else can
            open and which ends with this process, however it ends.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Item], BatchShape], object],
        passes: Callable[[Sequence[Item]], Iterable[Pass]],
        prefix: Prefix,
        *,
        width: int,
        memory_limit: int,
    ) -> None:
        self.prefix = prefix
        self.bytes_in_memory = 0
        self._forward = forward
        self._passes = passes
        self._width = width
        self._memory_limit = memory_limit
        self._states: weakref.WeakKeyDictionary[Records, tuple[Tensor, list[int]]] = weakref.WeakKeyDictionary()

    def hidden(self, items: Sequence[Item], shape: Sequence[int]) -> Tensor:
        """The states of the given records, padded with zeros to [rows, tokens], float32 [rows, tokens, width]."""
        states = torch.zeros(*shape, self._width)
        for row, (records, index) in enumerate(items):
            own = self._row(records, index)
            states[row, : len(own)] = own
        return states

    def _row(self, records: Records, index: int) -> Tensor:
        if records not in self._states:
            self._states[records] = self._compute(records)
        states, starts = self._states[records]
        return states[starts[index] : starts[index + 1]]

    @torch.no_grad()
    def _compute(self, records: Records) -> tuple[Tensor, list[int]]:
        items = records.items()
        starts = [0, *np.cumsum([num_tokens(item) for item in items]).tolist()]
        states = self._allocate(records, (starts[-1], self._width))
        for together in self._passes(items):
            run = partial(self._hidden_of, items, together.shape)
            for positions, hidden in isolated(run, together.positions):
                for row, index in enumerate(positions):
                    own = slice(starts[index], starts[index + 1])
                    states[own] = np.nan if hidden is None else hidden[row, : own.stop - own.start]
        return torch.from_numpy(states), starts

    def _hidden_of(self, items: Sequence[Item], shape: BatchShape, positions: list[int]) -> Any:
        with prefix_output(self.prefix) as captured:
            self._forward([items[position] for position in positions], shape)
        return captured[0].float().cpu().numpy()

    def _allocate(self, records: Records, shape: tuple[int, int]) -> Any:
        size = 4 * shape[0] * shape[1]
        if self.bytes_in_memory + size <= self._memory_limit:
            self.bytes_in_memory += size
            weakref.finalize(records, self._release, size)
            return np.empty(shape, dtype=np.float32)
        # Deleted before it is written to; the mapping keeps its contents until the states are freed.
        with tempfile.TemporaryFile(prefix="fedpriv-prefix-") as file:
            return np.memmap(file, dtype=np.float32, mode="w+", shape=shape)

    def _release(self, size: int) -> None:
        self.bytes_in_memory -= size

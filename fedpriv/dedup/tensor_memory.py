"""The memory of one tensor of stored models, and what it holds; models with an equal tensor can share it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.dedup.blocks import Layout, TensorSpec
from fedpriv.dedup.manifests import Manifest

_NOTHING = -1


@dataclass(frozen=True, eq=False)
class Content:
    """A tensor of a stored model, without its values.

    Attributes:
        spec: of the tensor.
        key: equal where name, shape, type and values are equal.
        numbers: [n] of its blocks; None for an extra, which has none.
    """

    spec: TensorSpec
    key: str
    numbers: NDArray[np.int64] | None


def contents_of(manifest: Manifest) -> tuple[Content, ...]:
    """All tensors of a model."""
    blocked, found = manifest.layout.blocked, []
    for spec in manifest.layout.tensors:
        if positions := blocked.get(spec.name):
            numbers = manifest.blocks[positions.start : positions.stop]
            found.append(Content(spec, f"{spec} {hashlib.sha256(numbers.tobytes()).hexdigest()}", numbers))
        else:
            found.append(Content(spec, f"{spec} {manifest.extras[spec.name]}", None))
    return tuple(found)


def distinct_bytes(manifests: list[Manifest]) -> int:
    """The memory of these models if every tensor that some of them have in common is there once."""
    sizes = {
        content.key: content_bytes(content, manifest.layout)
        for manifest in manifests
        for content in contents_of(manifest)
    }
    return sum(sizes.values())


def content_bytes(content: Content, layout: Layout) -> int:
    """Of a tensor in memory, with its last block's padding."""
    if content.numbers is None:
        return content.spec.num_bytes
    return len(content.numbers) * layout.block_size * np.dtype(layout.dtype).itemsize


class TensorMemory:
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

    def __init__(self, content: Content, layout: Layout) -> None:
        spec, numbers = content.spec, content.numbers
        shape = spec.shape if numbers is None else (len(numbers), layout.block_size)
        self.values = np.empty(shape, spec.dtype)
        self.tensor = torch.from_numpy(self.values.reshape(-1)[: spec.size].reshape(spec.shape))
        self.assign(content)
        self.forget()

    @property
    def num_bytes(self) -> int:
        """Of the memory."""
        return self.values.nbytes

    def assign(self, content: Content) -> None:
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

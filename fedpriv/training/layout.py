"""An adapter as one flat vector, so that one operation replaces many small ones on its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.adapters.arithmetic import Adapter


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The position of each tensor in the vector.

    Attributes:
        shapes: {tensor name: its shape}, in the adapter's order.
        columns: {tensor name: its slice of the vector}.
        parts: the slice of each clipping part; together they cover every column once.
    """

    shapes: dict[str, torch.Size]
    columns: dict[str, slice]
    parts: tuple[slice, ...]

    @staticmethod
    def of(shapes: Mapping[str, torch.Size], parts: Sequence[Sequence[str]]) -> Layout:
        """The layout in which each part is one slice.

        Args:
            shapes: {tensor name: its shape}.
            parts: groups of tensor names that contain every tensor once, from `clipping_parts`.

        Raises:
            ValueError: the parts do not contain every tensor once.
        """
        names = [name for part in parts for name in part]
        if len(names) != len(shapes) or set(names) != shapes.keys():
            raise ValueError("parts: must contain the name of every tensor once")
        columns: dict[str, slice] = {}
        slices, end = [], 0
        for part in parts:
            start = end
            for name in part:
                columns[name] = slice(end, end := end + math.prod(shapes[name]))
            slices.append(slice(start, end))
        return Layout(shapes=dict(shapes), columns=columns, parts=tuple(slices))

    @property
    def size(self) -> int:
        """The number of values in an adapter."""
        return max((part.stop for part in self.parts), default=0)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vectors [batch, size] of tensors {name: [batch, *shape]}."""
        return torch.cat([tensors[name].flatten(1) for name in self.columns], dim=1)

    def unflatten(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors {name: view [batch, *shape]} of vectors [batch, size], in the adapter's order."""
        return {name: rows[:, self.columns[name]].view(len(rows), *shape) for name, shape in self.shapes.items()}

    def flatten_one(self, adapter: Adapter) -> Tensor:
        """The vector [size] of one adapter.

        Raises:
            ValueError: its tensors differ from the layout in name or shape.
        """
        if adapter.keys() != self.shapes.keys():
            unmatched = sorted(adapter.keys() ^ self.shapes.keys())
            raise ValueError(f"adapter: tensors {', '.join(unmatched)} are on one side only")
        for name, shape in self.shapes.items():
            if adapter[name].shape != shape:
                raise ValueError(
                    f"adapter: {name} has shape {tuple(adapter[name].shape)}, the model's is {tuple(shape)}"
                )
        return torch.cat([adapter[name].flatten() for name in self.columns])

    def unflatten_one(self, vector: Tensor) -> Adapter:
        """The adapter of a vector [size]: copies, not views, in the adapter's order."""
        return {name: vector[self.columns[name]].reshape(shape).clone() for name, shape in self.shapes.items()}

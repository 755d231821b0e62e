"""Which tensors an update trains, and in which units: both follow from their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_A, _B = ".lora_A.", ".lora_B."

# What is not trained, by the parts of the names. The head is what is neither A nor B.
_LEFT_OUT: Mapping[str, tuple[str, ...]] = {"all": (), "head": (_A, _B), "lora-a": (_B,), "lora-b": (_A,)}


def trained_names(names: Iterable[str], trains: str) -> tuple[str, ...]:
    """The tensors that an update trains, in the order of the names.

    Args:
        names: of all tensors of the adapter, as peft stores them.
        trains: `all`, `head`, or `lora-a` or `lora-b`: A or B and the head.

    Raises:
        ValueError: trains is unknown, or there is no such tensor.
    """
    if trains not in _LEFT_OUT:
        raise ValueError(f"trains = {trains!r}: must be one of {', '.join(_LEFT_OUT)}")
    chosen = tuple(name for name in names if not any(part in name for part in _LEFT_OUT[trains]))
    if not chosen:
        raise ValueError(f"trains = {trains}: the adapter has no such tensor")
    return chosen


def num_trained_values(adapter: Mapping[str, Tensor], trains: str) -> int:
    """How many values an update trains; arguments and errors as for `trained_names`."""
    return sum(adapter[name].numel() for name in trained_names(adapter, trains))


def value_factors(shapes: Mapping[str, torch.Size], *, bias: float = 1.0, lora: float = 1.0) -> Tensor | None:
    """A factor for each value by the kind of its tensor, [values]; None if each is one.

    Args:
        shapes: {tensor name: its shape}, in the order of the values.
        bias: of the head's bias, its tensor of one dimension, > 0.
        lora: of A and B, > 0.
    """

    def factor(name: str, shape: torch.Size) -> float:
        if _A in name or _B in name:
            return lora
        return bias if len(shape) == 1 else 1.0

    factors = {name: factor(name, shape) for name, shape in shapes.items()}
    if all(value == 1 for value in factors.values()):
        return None
    return torch.cat([torch.full((shape.numel(),), factors[name]) for name, shape in shapes.items()])

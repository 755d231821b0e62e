"""Tensors in the records of messages, for tests that play one side."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedpriv.wire import packed, unpacked


def record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """The record that carries these tensors."""
    return packed({name: tensor.numpy() for name, tensor in tensors.items()})


def tensors_of(carried: ArrayRecord) -> dict[str, Tensor]:
    """The tensors that a record carries."""
    return {name: torch.from_numpy(array) for name, array in unpacked(carried).items()}

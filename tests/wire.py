"""Tensors in the records of messages, for tests that play one side."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedpriv.holder.wire.carrier import CARRIER, packed, unpacked


def record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """The record that carries these tensors."""
    return carried({name: tensor.numpy() for name, tensor in tensors.items()})


def carried(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """The record that carries these arrays."""
    return ArrayRecord({CARRIER: Array(**packed(arrays))})


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """The tensors that a record carries."""
    return {name: torch.from_numpy(array) for name, array in unpacked(record).items()}

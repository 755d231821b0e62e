"""Arithmetic on adapters: pure functions of {name: tensor}."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

Adapter = dict[str, Tensor]
"""{name of a trainable tensor: its values}."""


def difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Adapter:
    """left - right, tensor by tensor.

    Raises:
        ValueError: the names differ.
    """
    if left.keys() != right.keys():
        raise ValueError(f"adapters differ in {', '.join(sorted(left.keys() ^ right.keys()))}")
    return {name: left[name] - right[name] for name in left}


def norm(adapter: Mapping[str, Tensor]) -> float:
    """L2 norm over all tensors together."""
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in adapter.values()))

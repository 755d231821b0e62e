"""Named arrays as they travel in Flower's messages: one array of bytes a record, whatever the number of names.

Flower sends a record, each array of it and each array's content as objects of their own, with a request for each: an
adapter of eight tensors would be seventeen. Nothing of it is ever unpickled, and neither torch nor Flower is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from fedpriv.holder.wire.frames import pack_arrays, unpack_arrays

CARRIER = "arrays"
"""Name of the one array of a record."""

_FORMAT = "fedpriv-frame"


class Carrier(Protocol):
    """One of Flower's arrays, as far as it is read: the name of its format, and its bytes."""

    stype: str
    data: bytes


def packed(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The arguments of the one array of Flower's that carries these arrays.

    Raises:
        FrameError: an array has a type that no frame holds, or they are too long.
    """
    content = pack_arrays(arrays)
    return {"dtype": "uint8", "shape": (len(content),), "stype": _FORMAT, "data": content}


def unpacked(record: Mapping[str, Carrier]) -> dict[str, np.ndarray]:
    """The arrays that a record carries, writable and in the order in which they were packed.

    Raises:
        ValueError: the record is malformed.
    """
    if list(record) != [CARRIER] or record[CARRIER].stype != _FORMAT:
        raise ValueError(f"arrays: must be one array, {CARRIER!r}, in the format {_FORMAT!r}")
    return unpack_arrays(record[CARRIER].data)

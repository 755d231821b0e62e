"""Named arrays as they travel in Flower's messages: one array of bytes a record, whatever the number of names.

Flower sends a record, each array of it and each array's content as objects of their own, with a request for each: an
adapter of eight tensors would be seventeen. Nothing of it is ever unpickled, and `clients/pipe.py` needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord

from fedpriv.vault.frames import pack_arrays, unpack_arrays

_NAME = "arrays"
_FORMAT = "fedpriv-frame"


def packed(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """The record that carries these arrays.

    Raises:
        FrameError: an array has a type that no frame holds, or they are too long.
    """
    content = pack_arrays(arrays)
    return ArrayRecord({_NAME: Array("uint8", (len(content),), _FORMAT, content)})


def unpacked(record: ArrayRecord) -> dict[str, np.ndarray]:
    """The arrays that a record carries, writable and in the order in which they were packed.

    Raises:
        ValueError: the record is malformed.
    """
    if list(record) != [_NAME] or record[_NAME].stype != _FORMAT:
        raise ValueError(f"arrays: must be one array, {_NAME!r}, in the format {_FORMAT!r}")
    return {name: array.copy() for name, array in unpack_arrays(record[_NAME].data).items()}

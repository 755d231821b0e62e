"""Rows of a file read to scattered places in memory: in the file's order, many at once, and nothing that is not needed.

A memory map would bring in every page by a fault of its own or, read ahead, many that nobody asked for; and what was
not touched while a model was loaded would be read while it computes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GAP_BYTES = 2**14  # reading this much that is not needed takes as long as another call
_MOST_RUNS = 500  # in one call, which takes at most 1,024 pieces of memory, gaps included


@dataclass(frozen=True)
class OpenRows:
    """An open file of equal rows.

    Attributes:
        descriptor: of the file.
        offset: the byte at which the first row begins.
        row_bytes: of one row.
    """

    descriptor: int
    offset: int
    row_bytes: int


@dataclass(frozen=True, eq=False)
class Wanted:
    """Rows and where they belong.

    Attributes:
        target: [n, values], contiguous; a row has the file's `row_bytes`.
        positions: [k] int64, distinct, in [0, n).
        rows: [k] int64: the file's row for each position.
    """

    target: NDArray[Any]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Extent:
    """A piece of the file that is read at once.

    Attributes:
        start, end: bytes, counted from the first row.
        pieces: memory for these bytes, in the file's order.
    """

    start: int
    end: int
    pieces: list[memoryview]


def read_rows(file: OpenRows, wanted: Sequence[Wanted]) -> None:
    """Read rows to their positions.

    Raises:
        ValueError: the file ends too early, in one line.
        OSError: the file cannot be read.
    """
    unneeded = memoryview(bytearray(_GAP_BYTES))
    extents = [extent for each in wanted for extent in _extents(each, file.row_bytes, unneeded)]
    extents.sort(key=lambda extent: extent.start)
    if len(extents) > 1 and hasattr(os, "posix_fadvise"):  # not on macOS
        for extent in extents:  # all are under way before the first is waited for
            start, num_bytes = file.offset + extent.start, extent.end - extent.start
            os.posix_fadvise(file.descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
    for extent in extents:
        _read(file.descriptor, file.offset + extent.start, extent.pieces)


def _extents(wanted: Wanted, row_bytes: int, unneeded: memoryview) -> list[_Extent]:
    """The pieces to read: runs that are contiguous in the file and in the target, with short gaps between them."""
    if not len(wanted.rows):
        return []
    order = np.argsort(wanted.rows, kind="stable")
    rows, positions = wanted.rows[order], wanted.positions[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(rows) != 1) | (np.diff(positions) != 1)])
    lengths = np.diff(np.r_[starts, len(rows)])
    gaps = (rows[starts[1:]] - rows[starts[:-1]] - lengths[:-1]) * row_bytes
    apart = (gaps < 0) | (gaps > _GAP_BYTES) | (np.arange(1, len(starts)) % _MOST_RUNS == 0)
    target = wanted.target.reshape(-1).view(np.uint8).data
    begins = [0, *(1 + np.flatnonzero(apart)).tolist(), len(starts)]
    gaps = np.r_[0, gaps].tolist()
    runs = (row_bytes * np.stack([rows[starts], positions[starts], lengths], axis=1)).tolist()
    extents = []
    for begin, end in pairwise(begins):
        pieces: list[memoryview] = []
        for index in range(begin, end):
            if index > begin and gaps[index]:
                pieces.append(unneeded[: gaps[index]])
            _, first, size = runs[index]
            pieces.append(target[first : first + size])
        extents.append(_Extent(runs[begin][0], runs[end - 1][0] + runs[end - 1][2], pieces))
    return extents


def _read(descriptor: int, start: int, pieces: list[memoryview]) -> None:
    """Fill pieces of memory with the bytes that follow one another in a file."""
    while pieces:
        count = os.preadv(descriptor, pieces, start)
        if not count:
            raise ValueError(f"{sum(map(len, pieces))} bytes are missing at the end of the blocks")
        start += count
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][count:]

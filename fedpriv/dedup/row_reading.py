"""Rows of a file read to scattered places in memory: in the file's order, many at once, and nothing that is not needed.

A memory map would bring in every page by a fault of its own or, read ahead, many that nobody asked for; and what was
not touched while a model was loaded would be read while it computes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LONG_RUN_BYTES = 2**16
_GAP_BYTES = 2**14  # reading this much that is not needed takes as long as another call
_CHUNK_BYTES = 2**20


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
    """A piece of the file, [first, end) in rows, and the part of the wanted rows that it holds."""

    wanted: Wanted
    first: int
    end: int


def read_rows(file: OpenRows, wanted: Sequence[Wanted]) -> None:
    """Read rows to their positions.

    Raises:
        OSError: the file cannot be read, or ends too early.
    """
    extents = [extent for each in wanted for extent in _extents(each, file.row_bytes)]
    extents.sort(key=lambda extent: extent.first)
    if len(extents) > 1 and hasattr(os, "posix_fadvise"):
        for extent in extents:  # all are under way before the first is waited for
            length = (extent.end - extent.first) * file.row_bytes
            start = file.offset + extent.first * file.row_bytes
            os.posix_fadvise(file.descriptor, start, length, os.POSIX_FADV_WILLNEED)
    for extent in extents:
        _read_extent(file, extent)


def _extents(wanted: Wanted, row_bytes: int) -> list[_Extent]:
    """The pieces to read: a long run, contiguous in the file and in the target, or up to a chunk of shorter ones."""
    if not len(wanted.rows):
        return []
    order = np.argsort(wanted.rows, kind="stable")
    rows, positions = wanted.rows[order], wanted.positions[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(rows) != 1) | (np.diff(positions) != 1)])
    lengths = np.diff(np.r_[starts, len(rows)])
    long = lengths * row_bytes >= _LONG_RUN_BYTES
    gaps = rows[starts[1:]] - (rows[starts[:-1]] + lengths[:-1])
    chunks = rows[starts] * row_bytes // _CHUNK_BYTES
    apart = long[1:] | long[:-1] | (gaps * row_bytes > _GAP_BYTES) | (np.diff(chunks) != 0)
    bounds = [*starts[np.r_[True, apart]].tolist(), len(rows)]
    return [
        _Extent(Wanted(wanted.target, positions[first:end], rows[first:end]), int(rows[first]), int(rows[end - 1]) + 1)
        for first, end in itertools.pairwise(bounds)
    ]


def _read_extent(file: OpenRows, extent: _Extent) -> None:
    target, positions, rows = extent.wanted.target, extent.wanted.positions, extent.wanted.rows
    first, length = int(positions[0]), extent.end - extent.first
    if length == len(rows) and (positions == np.arange(first, first + length)).all():
        _read(file, extent.first, target[first : first + length])
        return
    piece = np.empty((length, *target.shape[1:]), target.dtype)
    _read(file, extent.first, piece)
    target[positions] = piece[rows - extent.first]


def _read(file: OpenRows, first: int, target: NDArray[Any]) -> None:
    """Fill a contiguous array from the file's row `first` on."""
    start, unread = file.offset + first * file.row_bytes, target.reshape(-1).view(np.uint8).data
    while len(unread):
        count = os.preadv(file.descriptor, [unread], start)
        if not count:
            raise OSError(0, f"{len(unread)} bytes are missing at the end of the blocks")
        start, unread = start + count, unread[count:]

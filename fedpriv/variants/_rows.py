"""Rows of equal size in a file: appended durably, mapped, and read to scattered places in memory.

The rows of blocks are in NumPy's .npy format, which np.load can read and the system can map. To load a model they are
read to scattered places in memory: in the file's order, many at once, and nothing that is not needed. A memory map
would bring in every page by a fault of its own or, read ahead, many that were not asked for; and pages that were not
touched while a model was loaded would be read while it computes.
"""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowFile:
    """A file of rows.

    Attributes:
        path: of the file.
        dtype: of a row's values.
        row_shape: shape of one row; () where a row is one value.
    """

    path: Path
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return self.dtype.itemsize * int(np.prod(self.row_shape))

    def header(self, num_rows: int) -> bytes:
        """The file's header; its length does not depend on the number of rows, since NumPy leaves room for growth."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (num_rows, *self.row_shape),
        }
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, header)
        return buffer.getvalue()

    def size(self, num_rows: int) -> int:
        """Bytes of a file with this many rows."""
        return len(self.header(num_rows)) + num_rows * self.row_bytes

    def write(self, first: int, chunks: Iterable[NDArray[Any]]) -> None:
        """Write rows from index `first` on, replacing all that follow; durable when this returns.

        Earlier rows are not touched, and at any instant the header counts either them alone or all rows written.
        """
        # Never through a link: what it leads to may be another's file.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            file.write(self.header(first))
            file.seek(self.size(first))
            num_rows = first
            for chunk in chunks:
                num_rows += file.write(np.ascontiguousarray(chunk).data) // self.row_bytes
            file.truncate()
            file.seek(0)
            file.write(self.header(num_rows))
            file.flush()
            os.fsync(file.fileno())

    def open(self) -> OpenRows | None:
        """The file, open for reading as long as the result is kept; None if it is missing."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        rows = OpenRows(descriptor, len(self.header(0)), self.row_bytes)
        weakref.finalize(rows, os.close, descriptor)
        return rows

    def trim(self, num_rows: int) -> None:
        """Cut off what a killed writer left after this many rows; a file with fewer rows stays as it is."""
        size = self.path.stat().st_size if self.path.exists() else -1
        if size >= self.size(num_rows) and (size, self._read_header()) != (self.size(num_rows), self.header(num_rows)):
            self.write(num_rows, [])

    def map(self, num_rows: int) -> NDArray[Any]:
        """The first rows, mapped read-only from the file; fewer if the file is too short."""
        offset = len(self.header(0))
        if num_rows and self.path.exists():
            num_rows = min(num_rows, (self.path.stat().st_size - offset) // self.row_bytes)
        if num_rows <= 0 or not self.path.exists():
            return np.empty((0, *self.row_shape), self.dtype)
        mapped = np.memmap(self.path, self.dtype, "r", offset, (num_rows, *self.row_shape))
        return np.asarray(mapped)  # a plain array, since slicing a memmap is slower

    def damage(self, num_rows: int) -> str | None:
        """Say how a file that should hold at least this many rows is damaged, without reading them; or None."""
        if not self.path.exists():
            return "is missing" if num_rows else None
        size = self.path.stat().st_size
        if size < self.size(num_rows):
            return f"is truncated: {size} bytes instead of {self.size(num_rows)}"
        # A writer that was killed while appending has left more rows.
        num_present = (size - self.size(0)) // self.row_bytes
        if self._read_header() not in (self.header(num_rows), self.header(num_present)):
            return "has a damaged header"
        return None

    def _read_header(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(self.size(0))


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

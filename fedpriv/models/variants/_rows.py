"""Rows of equal size in a file: appended durably, and mapped.

The format is NumPy's .npy, which np.load can read and the system can map.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
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

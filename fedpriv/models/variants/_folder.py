"""The folder of a store: refused, made, read, and searched for damage; and the file of its blocks.

Blocks are rows of equal size in a file, appended durably, and mapped. Its format is NumPy's .npy, which np.load can
read and the system can map. Damage is found by the SHA-256 of every block, manifest, extra tensor and basis.
"""

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.models.variants._index import FILE, NEW, Index, State
from fedpriv.models.variants.blocks import Manifest, array_sha256, rows_of, tensors_in
from fedpriv.models.variants.lossless import Reference

LOCK = "lock"
_UNDER_WAY = (NEW, f"{NEW}-journal")
_BLOCKS = re.compile(r"blocks\.([0-9]+)\.npy")


@dataclass(frozen=True)
class RowFile:
    """A file of rows, each of `row_shape`, which is () where a row is one value."""

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


def is_store(path: Path) -> bool:
    """Whether a folder holds a store."""
    return (path / FILE).is_file()


def check_folder(path: Path, *, read_only: bool) -> None:
    """Refuse, with an InputError, a folder that is not a store and must not become one."""
    if path.exists() and not path.is_dir():
        raise InputError(f"store = {path}: a file; a store is a folder")
    if is_store(path):
        return
    if read_only:
        raise InputError(f"store = {path}: no store: there is no {path / FILE}")
    # A writer that was killed before it had made an index leaves a lock and a part of the index.
    if path.exists() and not {each.name for each in path.iterdir()} <= {LOCK, *_UNDER_WAY}:
        raise InputError(f"store = {path}: no store, yet not empty: it lacks {FILE}; give another folder")


def own_files(path: Path, state: State | None) -> Iterator[str]:
    """The names of files that a store wrote and does not need; with no state, all but its lock and the charges."""
    yield from _UNDER_WAY
    if state is not None:  # a compaction that was killed has left the old blocks or the new ones
        yield from (f"blocks.{state.generation + step}.npy" for step in (-1, 1))
    else:
        yield from [each.name for each in path.iterdir() if _BLOCKS.fullmatch(each.name)]
        yield from (f"{FILE}-journal", FILE)


def problems(index: Index, rows: RowFile | None) -> list[str]:
    """One line for each damaged tensor or file; [] for a sound store, whose `rows` are None before the first model."""
    lines, num_rows, catalogue = [], index.state.num_rows, index.catalogue
    if damage := index.damage():
        lines.append(f"{FILE} is damaged: {damage}")
    if rows is not None and (damage := rows.damage(num_rows)):
        lines.append(f"{rows.path.name} {damage}")
    if array_sha256(catalogue) == index.state.catalogue and rows is not None:
        damaged = damaged_rows(rows.map(num_rows), catalogue)
    else:
        damaged = np.zeros(0, bool)
        if num_rows:
            lines.append(f"{FILE} is damaged in its catalogue: no block can be checked")
    used = np.zeros(len(damaged), bool)
    for name in index.models:
        try:
            manifest = index.manifest(name)
        except ValueError as error:
            lines.append(f"model {name!r}: {error}; none of its tensors can be restored")
            continue
        lines += _damaged_extras(index, manifest)
        lines += _damaged_rest(index, manifest)
        if len(damaged):
            own = rows_of(catalogue, manifest.blocks)
            used[own] = True
            lines += damaged_tensors(manifest, damaged[own])
    return lines + [
        f"block {catalogue['block'][row]}: damaged; no model uses it" for row in np.flatnonzero(damaged & ~used)
    ]


def damaged_rows(blocks: NDArray[Any], catalogue: NDArray[Any]) -> NDArray[np.bool_]:
    """[k] Which rows do not match their SHA-256 in the catalogue; of too short a file, also those that are missing."""
    damaged = np.ones(len(catalogue), bool)
    for row, block in enumerate(np.ascontiguousarray(blocks).view(np.uint8)):
        damaged[row] = hashlib.sha256(block).digest() != catalogue["sha256"][row].tobytes()
    return damaged


def damaged_tensors(manifest: Manifest, damaged: NDArray[np.bool_]) -> list[str]:
    """One line for each tensor of a model that has damaged blocks."""
    lines = []
    for name, positions in manifest.layout.blocked.items():
        if (bad := np.flatnonzero(damaged[positions.start : positions.stop])).size:
            first = manifest.blocks[positions.start + bad[0]]
            count = f"{bad.size} of its {len(positions)} blocks damaged, the first is block {first}"
            lines.append(f"model {manifest.name!r}, tensor {name!r}: {count}")
    return lines


def _damaged_extras(index: Index, manifest: Manifest) -> list[str]:
    """One line for each damaged extra tensor of a model, or one for all of them."""
    try:
        index.extras(manifest.name)
        return []
    except ValueError as error:
        reason = str(error)
    try:
        extras = tensors_in(index.raw_extras(manifest.name))
    except ValueError:
        return [f"model {manifest.name!r}: {reason}; holds {', '.join(map(repr, manifest.extras)) or 'no tensor'}"]
    bad = [name for name, known in manifest.extras.items() if name not in extras or array_sha256(extras[name]) != known]
    where = [f"model {manifest.name!r}, tensor {name!r}: {reason}" for name in bad]
    return where or [f"model {manifest.name!r}: {reason}, outside the values"]


def _damaged_rest(index: Index, manifest: Manifest) -> list[str]:
    """A line if the description of a model is damaged, and one if its basis is, and it cannot be restored."""
    lines = []
    try:
        index.description(manifest)
    except (ValueError, KeyError, TypeError) as error:
        lines.append(f"model {manifest.name!r}: {error}")
    if manifest.basis is not None:
        try:
            Reference.from_bytes(index.basis(manifest.basis), manifest.layout)
        except ValueError as error:
            lines.append(f"model {manifest.name!r}: {error}; none of its tensors can be restored")
    return lines

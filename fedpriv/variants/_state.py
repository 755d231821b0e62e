"""The state of a store on the disk: read as a whole, and replaced as a whole by its single writer.

Damage is found by the SHA-256 of every block, manifest, extra tensor and shared basis.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedpriv.errors import InputError, StoreError
from fedpriv.files import replace_file as replace_file
from fedpriv.variants._folder import Folder, OpenRows, RowFile, read, sync
from fedpriv.variants._manifests import Files, Index, Manifest, NumberedBlocks, array_sha256, rows_of
from fedpriv.variants.blocks import BlockLayout
from fedpriv.variants.shared_basis import SharedBasis


class State:
    """The index of a store, and the rows that it names, mapped.

    Args:
        folder: of the store; created if missing, otherwise empty or a store.
        read_only: take no lock and write nothing; the folder must be a store.

    Attributes:
        index: the committed state.
        mapped_blocks: [rows, block_size], mapped read-only; fewer rows than the index names if the file is too short.

    Raises:
        StoreError: another process is writing to it, or its index is damaged or has another version.
        InputError: the folder is missing, or holds something else.
    """

    def __init__(self, folder: Folder, *, read_only: bool) -> None:
        self.folder = folder
        self.index = Index()
        self._writer: int | None = None
        self._open_blocks: OpenRows | None = None
        _check_folder(folder, read_only=read_only)
        try:
            if not read_only:
                self._open_to_write()
            self._refresh()
            if not read_only:
                self.tidy()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock for the next writer."""
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    @property
    def blocks(self) -> NDArray[Any]:
        """[rows, block_size], mapped read-only.

        Raises:
            StoreError: the file is too short.
        """
        return self._checked_length(self.mapped_blocks, self.folder.blocks(self.index))

    @property
    def catalogue(self) -> NDArray[Any]:
        """[rows] Number and SHA-256 of each row of blocks, mapped read-only.

        Raises:
            StoreError: the file is too short.
        """
        return self._checked_length(self._mapped_catalogue, self.folder.catalogue(self.index))

    @property
    def open_blocks(self) -> OpenRows:
        """The file of the blocks, opened with the state: it stays readable when a compaction replaces it by another.

        Raises:
            StoreError: the file is missing or too short.
        """
        file = self.folder.blocks(self.index)
        self._checked_length(self.mapped_blocks, file)
        if self._open_blocks is None:
            raise StoreError(f"{file.path} is missing")
        return self._open_blocks

    def check_writable(self) -> None:
        """Refuse to proceed without the lock."""
        if self._writer is None:
            raise StoreError(f"{self.folder.path}: not open for writing")

    def commit(self, index: Index) -> None:
        """Replace the old state by the new one, durably; all files that it names must already be on the disk."""
        sync(self.folder.path)
        try:
            replace_file(self.folder.index, index.to_json())
            sync(self.folder.path)
        finally:
            self._refresh()

    def append(self, added: Manifest, numbered: NumberedBlocks, contents: tuple[bytes, bytes]) -> None:
        """Write a model's files and rows, and then the index that names them.

        Args:
            added: of the model, whose layout has the store's blocks.
            numbered: its blocks.
            contents: of its two files: manifest and extras.
        """
        layout, name = added.layout, added.name
        index = replace(self.index, block_size=layout.block_size, dtype=layout.dtype)
        for path, content in zip((self.folder.manifest(name), self.folder.extras(name)), contents, strict=True):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, content)
            sync(path.parent)
        self.folder.blocks(index).write(index.num_rows, [numbered.new])
        self.folder.catalogue(index).write(index.num_rows, [numbered.catalogue])
        manifest, extras = (hashlib.sha256(content).hexdigest() for content in contents)
        self.commit(
            replace(
                index,
                num_rows=index.num_rows + len(numbered.new),
                next_block=index.next_block + len(numbered.new),
                catalogue=array_sha256(np.concatenate([self.catalogue, numbered.catalogue])),
                models={**index.models, name: Files(manifest=manifest, extras=extras, basis=added.basis)},
            )
        )

    def tidy(self) -> None:
        """Delete stray files and rows."""
        with self.one_line_errors():
            for path in self.folder.strays(self.index):
                path.unlink()
            for file in self.folder.row_files(self.index):
                file.trim(self.index.num_rows)

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn errors of the files and the file system into a `StoreError` of one line."""
        try:
            yield
        except ValueError as error:
            raise StoreError(f"{self.folder.path}: {error}") from None
        except OSError as error:
            where = error.filename or self.folder.path
            raise StoreError(f"{where}: cannot be used ({error.strerror}); the store stays as it was") from None

    def _open_to_write(self) -> None:
        with self.one_line_errors():
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self._writer = os.open(self.folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{self.folder.path}: another process is writing to it; a store has one writer at a time"
                ) from None
            if not self.folder.index.exists():
                self.commit(self.index)

    def _refresh(self) -> None:
        """Read the state from the disk."""
        with self.one_line_errors():
            try:
                self.index = Index.from_json(self.folder.index.read_bytes())
            except ValueError as error:
                raise StoreError(f"{self.folder.index}: {error}") from None
            self._open_blocks = _opened(self.folder.blocks(self.index))
            self.mapped_blocks = self.folder.blocks(self.index).map(self.index.num_rows)
            self._mapped_catalogue = self.folder.catalogue(self.index).map(self.index.num_rows)

    def _checked_length(self, rows: NDArray[Any], file: RowFile) -> NDArray[Any]:
        if len(rows) < self.index.num_rows:
            raise StoreError(f"{file.path} {file.damage(self.index.num_rows)}; `verify` shows what is affected")
        return rows


def _opened(file: RowFile) -> OpenRows | None:
    """The file, open for reading as long as the result is kept; None if it is missing."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    rows = OpenRows(descriptor, len(file.header(0)), file.row_bytes)
    weakref.finalize(rows, os.close, descriptor)
    return rows


def _check_folder(folder: Folder, *, read_only: bool) -> None:
    """Refuse a folder that is not a store and must not become one."""
    path = folder.path
    if path.exists() and not path.is_dir():
        raise InputError(f"store = {path}: a file; a store is a folder")
    if folder.index.exists():
        return
    if read_only:
        raise InputError(f"store = {path}: no store: there is no {folder.index}")
    if path.exists() and not folder.looks_new():
        raise InputError(f"store = {path}: no store, yet not empty: it lacks {folder.index.name}; give another folder")


class BasisFiles:
    """The bases in a store's folder, each read once.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._read: dict[str, SharedBasis] = {}

    def read(self, sha256: str, layout: BlockLayout) -> SharedBasis:
        """The basis of that SHA-256, of models of this layout.

        Raises:
            ValueError: in one line, what is wrong with it.
        """
        if sha256 not in self._read:
            self._read[sha256] = _read_basis(self._folder, sha256, layout)
        return self._read[sha256]

    def write(self, basis: SharedBasis) -> str:
        """Put a basis on the disk durably, unless it is there; returns its SHA-256.

        It is valid as soon as the index names it; until then the next writer deletes it.
        """
        content = basis.to_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        path = self._folder.basis(sha256)
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, content)
            sync(path.parent)
        return sha256


def _read_basis(folder: Folder, sha256: str, layout: BlockLayout) -> SharedBasis:
    """A basis from its file.

    Raises:
        ValueError: the file is missing or damaged, or its basis is not of this layout; one line that names it.
    """
    return SharedBasis.from_bytes(read(folder.basis(sha256), sha256), layout)


def problems(folder: Folder, index: Index) -> list[str]:
    """One line for each damaged tensor of a model, or damaged file; [] for a sound store.

    Args:
        folder: of the store.
        index: its state.
    """
    lines = []
    for file in folder.row_files(index):
        if damage := file.damage(index.num_rows):
            lines.append(f"{file.path.name} {damage}")
    catalogue = folder.catalogue(index).map(index.num_rows)
    if array_sha256(catalogue) == index.catalogue:
        damaged = damaged_rows(folder.blocks(index).map(index.num_rows), catalogue)
        used = np.zeros(len(catalogue), bool)
    else:
        lines.append(f"{folder.catalogue(index).path.name} is damaged: no block can be checked")
        damaged = used = np.zeros(0, bool)
    for name, files in sorted(index.models.items()):
        try:
            manifest = folder.read_manifest(name, files.manifest)
        except ValueError as error:
            lines.append(f"model {name!r}: {error}; none of its tensors can be restored")
            continue
        lines += _damaged_extras(folder, manifest, files)
        lines += _damaged_basis(folder, manifest)
        if len(damaged):
            rows = rows_of(catalogue, manifest.blocks)
            used[rows] = True
            lines += damaged_tensors(manifest, damaged[rows])
    return lines + [
        f"block {catalogue['block'][row]}: damaged; no model uses it" for row in np.flatnonzero(damaged & ~used)
    ]


def damaged_rows(blocks: NDArray[Any], catalogue: NDArray[Any]) -> NDArray[np.bool_]:
    """[k] Which rows do not match their SHA-256 in the catalogue.

    Args:
        blocks: [k, block_size]; fewer rows if the file is too short, and the missing ones count as damaged.
        catalogue: [k] of these blocks.
    """
    damaged = np.ones(len(catalogue), bool)
    for row, block in enumerate(blocks):
        damaged[row] = hashlib.sha256(block).digest() != catalogue["sha256"][row].tobytes()
    return damaged


def damaged_tensors(manifest: Manifest, damaged: NDArray[np.bool_]) -> list[str]:
    """One line for each tensor of a model that has damaged blocks.

    Args:
        manifest: of the model.
        damaged: [num_blocks].
    """
    lines = []
    for name, positions in manifest.layout.blocked.items():
        if (bad := np.flatnonzero(damaged[positions.start : positions.stop])).size:
            first = manifest.blocks[positions.start + bad[0]]
            count = f"{bad.size} of its {len(positions)} blocks damaged, the first is block {first}"
            lines.append(f"model {manifest.name!r}, tensor {name!r}: {count}")
    return lines


def _damaged_extras(folder: Folder, manifest: Manifest, files: Files) -> list[str]:
    """One line for each damaged extra tensor of a model, or one for the whole file."""
    try:
        read(folder.extras(manifest.name), files.extras)
        return []
    except ValueError as error:
        reason = str(error)
    path = folder.extras(manifest.name)
    try:
        extras = safetensors.numpy.load(path.read_bytes())
    except (OSError, SafetensorError):
        return [f"model {manifest.name!r}: {reason}; holds {', '.join(map(repr, manifest.extras)) or 'no tensor'}"]
    bad = [name for name, known in manifest.extras.items() if name not in extras or array_sha256(extras[name]) != known]
    where = [f"model {manifest.name!r}, tensor {name!r}: {reason}" for name in bad]
    return where or [f"model {manifest.name!r}: {reason}, outside the values"]


def _damaged_basis(folder: Folder, manifest: Manifest) -> list[str]:
    """A line if the shared basis of a model is damaged, and it cannot be restored."""
    if manifest.basis is None:
        return []
    try:
        _read_basis(folder, manifest.basis, manifest.layout)
        return []
    except ValueError as error:
        return [f"model {manifest.name!r}: {error}; none of its tensors can be restored"]

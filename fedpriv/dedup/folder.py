"""The files of a store.

index.json: names all valid files, and is replaced as a whole once everything else is on the disk
blocks.GENERATION.npy: [rows, block_size], append-only; rows that no model uses any more stay until compaction
catalogue.GENERATION.npy: for each of these rows, the block's number and the SHA-256 of its values
manifests/NAME.json: tensors, block numbers, privacy and provenance of a model
extras/NAME.safetensors: the tensors of a model that are not cut into blocks; what a model adds to its shared basis
bases/SHA-256.safetensors: a shared basis, for as long as a model needs it
charges.json: what validating variants has cost private records (`fedpriv.dedup.charges`)
lock: held by the one process that writes
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpriv.dedup.catalogue import CATALOGUE
from fedpriv.dedup.manifests import Index, Manifest
from fedpriv.dedup.rows import RowFile


@dataclass(frozen=True)
class Folder:
    """The files of a store.

    Attributes:
        path: of the folder.
    """

    path: Path

    @property
    def index(self) -> Path:
        """The file that says which others are valid."""
        return self.path / "index.json"

    @property
    def lock(self) -> Path:
        """The file that the writer locks."""
        return self.path / "lock"

    @property
    def charges(self) -> Path:
        """What private records were charged; independent of the index, since it outlives the models."""
        return self.path / "charges.json"

    def manifest(self, name: str) -> Path:
        """The manifest of a model."""
        return self.path / "manifests" / f"{name}.json"

    def extras(self, name: str) -> Path:
        """The extra tensors of a model."""
        return self.path / "extras" / f"{name}.safetensors"

    def basis(self, sha256: str) -> Path:
        """A shared basis."""
        return self.path / "bases" / f"{sha256}.safetensors"

    def blocks(self, index: Index) -> RowFile:
        """The rows of block values."""
        return RowFile(self.path / f"blocks.{index.generation}.npy", np.dtype(index.dtype), (index.block_size,))

    def catalogue(self, index: Index) -> RowFile:
        """Number and digest of each row."""
        return RowFile(self.path / f"catalogue.{index.generation}.npy", CATALOGUE, ())

    def row_files(self, index: Index) -> tuple[RowFile, ...]:
        """Both row files; none before the first model is stored, when the block size is not fixed yet."""
        return (self.blocks(index), self.catalogue(index)) if index.block_size else ()

    def files(self, index: Index) -> list[Path]:
        """All valid files except the index."""
        models = [path for name in index.models for path in (self.manifest(name), self.extras(name))]
        bases = sorted({self.basis(files.basis) for files in index.models.values() if files.basis})
        return [*(file.path for file in self.row_files(index)), *bases, *models]

    def strays(self, index: Index) -> list[Path]:
        """Files that are not valid, left behind by a writer that was killed."""
        present = {path for pattern in ("*", "*/*") for path in self.path.glob(pattern) if path.is_file()}
        return sorted(present - {self.index, self.lock, self.charges, *self.files(index)})

    def looks_new(self) -> bool:
        """Whether the folder is empty, or holds only what a writer killed before its first commit leaves behind."""
        return all(path == self.lock or path.name.startswith(f".{self.index.name}.") for path in self.path.iterdir())

    def read_manifest(self, name: str, sha256: str) -> Manifest:
        """The manifest of a model.

        Raises:
            ValueError: in one line, what is wrong with it.
        """
        return Manifest.from_json(read(self.manifest(name), sha256))


def read(path: Path, sha256: str) -> bytes:
    """The content of a file.

    Raises:
        ValueError: the file is missing or has another SHA-256; one line that names folder and file.
    """
    name = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise ValueError(f"{name} is missing")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{name} is damaged: its SHA-256 does not match")
    return content


def sync(folder: Path) -> None:
    """Flush a folder's list of files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

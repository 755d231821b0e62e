"""A store of models that share blocks: a folder that at any instant is in either its old or its new state.

`fedpriv.variants._folder` tells what its files are. Source: Guan et al., SIGMOD 2025, sections 4.5 and 6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedpriv.errors import InputError, StoreError
from fedpriv.variants._folder import Folder, Wanted, read, read_rows
from fedpriv.variants._manifests import (
    CATALOGUE,
    Files,
    Manifest,
    NumberedBlocks,
    array_sha256,
    number_blocks,
    numbers_by_digest,
    rows_of,
)
from fedpriv.variants._state import BasisFiles, State, damaged_rows, damaged_tensors, problems
from fedpriv.variants.blocks import BlockLayout, Tensors, layout_of
from fedpriv.variants.shared_basis import Encoded, SharedBasis

__all__ = ["Store", "StoreError", "Variant"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
_CHUNK = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class Variant:
    """A model described by its difference from a base: the base's blocks, with some positions replaced.

    Attributes:
        base: name of a stored model of the same layout, which may be removed later.
        positions: [k] int, distinct.
        blocks: the replacements: [k] int, numbers of stored blocks, or [k, block_size], values.
    """

    base: str
    positions: NDArray[np.integer[Any]]
    blocks: NDArray[Any]


class Store:
    """A store in a folder, open for one writer or for reading; a context manager.

    A reader sees the store as it was when opened.

    Args:
        path: of the folder; created if missing, otherwise empty or a store.
        read_only: take no lock and write nothing; the folder must be a store.

    Raises:
        StoreError: another process is writing to it, or its index is damaged or has another version.
        InputError: the folder is missing, or holds something else.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._folder = Folder(path)
        self._state = State(self._folder, read_only=read_only)
        self._manifests: dict[Files, Manifest] = {}
        self._bases = BasisFiles(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock for the next writer."""
        self._state.close()

    @property
    def names(self) -> list[str]:
        """The stored models, sorted."""
        return sorted(self._state.index.models)

    @property
    def blocks(self) -> NDArray[Any]:
        """[rows, block_size] of the store's dtype, mapped read-only; `rows` gives the row of a block."""
        return self._state.blocks

    @property
    def reference_counts(self) -> NDArray[np.int64]:
        """[rows] The number of positions, over all models, at which each row is used."""
        used = [self.rows(self.manifest(name).blocks) for name in self._state.index.models]
        return np.bincount(np.concatenate([np.empty(0, np.int64), *used]), minlength=self._state.index.num_rows)

    def rows(self, blocks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """[k] The rows of blocks with the given numbers [k].

        Raises:
            InputError: no such block is stored.
        """
        catalogue = self._state.catalogue
        rows = rows_of(catalogue, blocks)
        if (rows < 0).any():
            raise InputError(f"block {blocks[rows < 0][0]}: not stored; {self.path} holds {len(catalogue)} blocks")
        return rows

    def read_blocks(self, wanted: Sequence[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.integer[Any]]]]) -> None:
        """Read stored blocks from the file into memory; not checked for damage.

        Args:
            wanted: for each array [n, block_size] of the store's dtype: the array, the positions [k] in it, and the
                numbers [k] of the blocks that belong there.

        Raises:
            InputError: no such block is stored.
            StoreError: the file is damaged, or cannot be read.
        """
        rows = self.rows(np.concatenate([np.empty(0, np.int64), *(numbers for *_, numbers in wanted)]))
        parts = np.split(rows, np.cumsum([len(numbers) for *_, numbers in wanted])[:-1])
        targets = [Wanted(array, positions, part) for (array, positions, _), part in zip(wanted, parts, strict=True)]
        with self._state.one_line_errors():
            read_rows(self._state.open_blocks, targets)

    def manifest(self, name: str) -> Manifest:
        """The manifest of a model: always the same object while the model is stored.

        Raises:
            InputError: there is no such model.
            StoreError: its manifest is damaged.
        """
        files = self._files(name)
        if files not in self._manifests:
            with self._state.one_line_errors():
                self._manifests[files] = self._folder.read_manifest(name, files.manifest)
        return self._manifests[files]

    def extras(self, name: str) -> Tensors:
        """The tensors of a model that are not cut into blocks.

        Raises:
            InputError: there is no such model.
            StoreError: their file is damaged.
        """
        files = self._files(name)
        with self._state.one_line_errors():
            return safetensors.numpy.load(read(self._folder.extras(name), files.extras))

    def restore(self, name: str) -> Tensors:
        """The model's tensors: bit for bit as they were added, or as its shared basis restores them.

        Raises:
            InputError: there is no such model.
            StoreError: a block, a basis or a file of it is damaged; names model, and tensor or file.
        """
        manifest, extras = self.manifest(name), self.extras(name)
        if manifest.basis is not None:
            try:
                encoded, extras = Encoded.from_tensors(extras, manifest.layout)
                return {**self._bases.read(manifest.basis, manifest.layout).restore(encoded), **extras}
            except ValueError as error:
                raise StoreError(f"{self.path}: model {name!r}: {error}") from None
        rows = self.rows(manifest.blocks)
        present = rows < len(self._state.mapped_blocks)
        blocks = np.zeros((len(rows), manifest.layout.block_size), manifest.layout.dtype)
        blocks[present] = self._state.mapped_blocks[rows[present]]
        if damaged := damaged_tensors(manifest, ~present | damaged_rows(blocks, self._state.catalogue[rows])):
            raise StoreError(f"{self.path}: {damaged[0]}")
        return manifest.layout.from_blocks(blocks, extras)

    def add(
        self,
        name: str,
        layout: BlockLayout,
        blocks: NDArray[Any] | Variant,
        extras: Mapping[str, NDArray[Any]],
        *,
        privacy: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Store a model, durably when this returns; blocks equal to stored ones are not stored again.

        Args:
            name: not in the store yet; letters, digits and . _ = + -, at most 100 characters.
            layout: of the model; all models of a store have blocks of one size and dtype.
            blocks: [num_blocks, block_size], values; or [num_blocks] int, numbers of stored blocks; or a variant.
            extras: the extra tensors of the layout.
            privacy: plain values, kept as they are.
            provenance: plain values, kept as they are.

        Raises:
            InputError: an argument cannot be used.
            StoreError: the store is damaged, or cannot be written.
        """
        self._check_new(name, layout)
        numbered = self._number_model(layout, blocks)
        if mismatch := layout.mismatch(_placeholder_blocks(layout, len(numbered.numbers)), extras):
            raise InputError(f"model {name!r}: {mismatch}")
        manifest = Manifest.of(name, layout, numbered.numbers, extras, privacy, provenance)
        self._add(manifest, numbered, extras)

    def add_from_basis(
        self,
        name: str,
        layout: BlockLayout,
        basis: SharedBasis,
        encoded: Encoded,
        extras: Mapping[str, NDArray[Any]],
        *,
        privacy: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Store a model by its share of a basis, durably when this returns; equal bases are stored once.

        Args:
            name: as for `add`.
            layout: of the model; block size and dtype are those of the store.
            basis: of models of this layout.
            encoded: the model's share of it.
            extras: the tensors that a basis does not hold.
            privacy: plain values, kept as they are.
            provenance: likewise.

        Raises:
            InputError: an argument cannot be used.
            StoreError: the store is damaged, or cannot be written.
        """
        self._check_new(name, layout)
        given = layout_of({**basis.restore(encoded), **extras}, layout.block_size, layout.dtype)
        if difference := layout.difference(given):
            raise InputError(f"model {name!r}: {difference}")
        held = {**extras, **encoded.to_tensors()}
        with self._state.one_line_errors():
            digest = self._bases.write(basis)
        manifest = Manifest.of(name, layout, np.empty(0, np.int64), held, privacy, provenance, digest)
        nothing = NumberedBlocks(manifest.blocks, np.empty((0, layout.block_size)), np.empty(0, CATALOGUE))
        self._add(manifest, nothing, held)

    def remove(self, *names: str) -> None:
        """Remove models, all or none; blocks that others use stay, and the space of the rest is freed by `compact`.

        Raises:
            InputError: there is no such model.
            StoreError: the store cannot be written.
        """
        self._state.check_writable()
        for name in names:
            self._files(name)
        models = {other: files for other, files in self._state.index.models.items() if other not in names}
        with self._state.one_line_errors():
            self._state.commit(replace(self._state.index, models=models))
            self._state.tidy()

    def compact(self) -> int:
        """Free the space of blocks that no model uses; the numbers of the others stay the same.

        Returns:
            How many blocks were dropped.

        Raises:
            StoreError: the store is damaged, or cannot be written.
        """
        self._state.check_writable()
        kept, blocks = np.flatnonzero(self.reference_counts), self.blocks
        if dropped := self._state.index.num_rows - len(kept):
            catalogue = self._state.catalogue[kept]
            generation = self._state.index.generation + 1
            index = replace(
                self._state.index, generation=generation, num_rows=len(kept), catalogue=array_sha256(catalogue)
            )
            chunks = (blocks[kept[first : first + _CHUNK]] for first in range(0, len(kept), _CHUNK))
            with self._state.one_line_errors():
                self._folder.blocks(index).write(0, chunks)
                self._folder.catalogue(index).write(0, [catalogue])
                self._state.commit(index)
                self._state.tidy()
        return dropped

    def verify(self) -> list[str]:
        """List the damage, one line per model and tensor, or per file; [] for a sound store. Reads everything."""
        return problems(self._folder, self._state.index)

    @property
    def bytes_stored(self) -> int:
        """The bytes of all files except the index."""
        return sum(path.stat().st_size for path in self._folder.files(self._state.index) if path.exists())

    @property
    def bytes_logical(self) -> int:
        """The bytes of all tensors of all models, as if they shared nothing."""
        return sum(self.manifest(name).layout.num_bytes for name in self._state.index.models)

    @property
    def compression_ratio(self) -> float:
        """bytes_stored / bytes_logical; smaller is better, and 1 for an empty store."""
        return self.bytes_stored / self.bytes_logical if self.bytes_logical else 1.0

    def check_blocks(self, name: str, layout: BlockLayout) -> None:
        """Refuse a model whose blocks are not of the size and dtype of those that are stored.

        Raises:
            InputError: they are not.
        """
        known = self._state.index.block_size, self._state.index.dtype
        if known[0] and known != (layout.block_size, layout.dtype):
            raise InputError(
                f"model = {name!r}: blocks of {layout.block_size} {layout.dtype}, but {self.path} has blocks of "
                f"{known[0]} {known[1]}; use these, or another store"
            )

    def _add(self, manifest: Manifest, numbered: NumberedBlocks, extras: Mapping[str, NDArray[Any]]) -> None:
        """Store a model that fits the store."""
        try:
            contents = manifest.to_json(), safetensors.numpy.save(dict(extras))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"model {manifest.name!r}: privacy and provenance are plain JSON values ({error})"
            ) from None
        with self._state.one_line_errors():
            self._state.append(manifest, numbered, contents)

    def _number_model(self, layout: BlockLayout, blocks: NDArray[Any] | Variant) -> NumberedBlocks:
        """The blocks of a model with their numbers."""
        if not isinstance(blocks, Variant):
            return self._number(layout, blocks)
        base = self.manifest(blocks.base)
        if base.basis is not None:
            raise InputError(f"base {blocks.base!r}: has no blocks, since it is stored by a shared basis")
        if difference := base.layout.difference(layout):
            raise InputError(f"base {blocks.base!r}: another architecture: {difference}")
        positions, replaced = blocks.positions, self._number(layout, blocks.blocks)
        valid = set(positions.tolist()) & set(range(layout.num_blocks))
        if not len(valid) == len(positions) == len(replaced.numbers):
            raise InputError(
                f"positions: {len(positions)} for {len(replaced.numbers)} blocks; each block needs one of its own, "
                f"from 0 to {layout.num_blocks - 1}"
            )
        numbers = base.blocks.copy()
        numbers[positions] = replaced.numbers
        return replace(replaced, numbers=numbers)

    def _number(self, layout: BlockLayout, blocks: NDArray[Any]) -> NumberedBlocks:
        """Blocks given by number [k] or by value [k, block_size], with their numbers."""
        if blocks.ndim == 1 and np.issubdtype(blocks.dtype, np.integer):
            self.rows(blocks)
            return NumberedBlocks(blocks.astype(np.int64), np.empty((0, layout.block_size)), np.empty(0, CATALOGUE))
        if blocks.dtype != layout.dtype or blocks.shape[1:] != (layout.block_size,):
            raise InputError(
                f"blocks: {blocks.dtype} {list(blocks.shape)}; give values, {layout.dtype} [blocks, "
                f"{layout.block_size}], or the numbers of stored blocks"
            )
        numbered = number_blocks(blocks, numbers_by_digest(self._state.catalogue), self._state.index.next_block)
        self._check_stored(blocks, numbered.numbers)
        return numbered

    def _check_stored(self, blocks: NDArray[Any], numbers: NDArray[np.int64]) -> None:
        """Refuse to reuse a stored block that no longer matches its SHA-256."""
        (indices,) = np.nonzero(numbers < self._state.index.next_block)
        rows = self.rows(numbers[indices])
        for index, row in zip(indices, rows, strict=True):
            if self.blocks[row].tobytes() != blocks[index].tobytes():
                raise StoreError(f"{self.path}: block {numbers[index]} is damaged; `verify` shows what is affected")

    def _check_new(self, name: str, layout: BlockLayout) -> None:
        self._state.check_writable()
        if not _NAME.fullmatch(name):
            raise InputError(f"model = {name!r}: a name has letters, digits and . _ = + -, 1 to 100 of them")
        if name in self._state.index.models:
            raise InputError(f"model = {name!r}: stored already; remove it first, or take another name")
        self.check_blocks(name, layout)

    def _files(self, name: str) -> Files:
        if name not in self._state.index.models:
            raise InputError(f"model = {name!r}: not in {self.path}; it has {', '.join(self.names) or 'none'}")
        return self._state.index.models[name]


def _placeholder_blocks(layout: BlockLayout, num_blocks: int) -> NDArray[Any]:
    """[num_blocks, block_size] zeros that take no memory."""
    return np.broadcast_to(np.zeros((), layout.dtype), (num_blocks, layout.block_size))

"""A store of models that share blocks: a folder that at any instant is in either its old or its new state.

index.sqlite: says what is valid, and holds all but the blocks (`fedpriv.models.variants._index`)
blocks.GENERATION.npy: [rows, block_size], append-only; rows that no model uses any more stay until compaction
charges.json: the charges of private records for validating variants (`fedpriv.models.dedup.planning`)
lock: held by the one process that writes

Source: Guan et al., SIGMOD 2025, sections 4.5 and 6.
"""

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedpriv.errors import InputError, StoreError
from fedpriv.files import remove_files, sync_folder
from fedpriv.models.variants import _folder
from fedpriv.models.variants._index import FILE, MOST_BYTES, Digests, Index, State
from fedpriv.models.variants.blocks import (
    BlockLayout,
    Manifest,
    Tensors,
    array_sha256,
    layout_of,
    number_blocks,
    numbers_by_digest,
    rows_of,
    tensors_in,
    unproven,
    utilities,
)
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.lossless import Reference

CHARGES_FILE = "charges.json"
"""A file that outlives the models of a store, for the charges of private records that validated them"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
_CHUNK = 1024


class Store:
    """A store in a folder, open for one writer or for reading; a context manager.

    A reader sees the store as it was when opened. A method that takes the name of a model raises an InputError if there
    is no such model, and a StoreError, which names what is affected, if what it needs of the model is damaged; one that
    writes raises a StoreError too if the store cannot be written.

    Args:
        path: of the folder; created if missing, otherwise empty or a store.
        read_only: take no lock and write nothing; the folder must be a store.
        empty: begin without models, whatever is in the folder; of that only the files of a store go, sound or damaged,
            but for the charges.

    Raises:
        StoreError: another process is writing to it, or its index is damaged or has another version.
        InputError: the folder is missing, or holds something else.
    """

    def __init__(self, path: Path, *, read_only: bool = False, empty: bool = False) -> None:
        self.path = path
        self._writer: int | None = None
        self._manifests: dict[Digests, Manifest] = {}
        self._shared: dict[tuple[str, BlockLayout], Reference] = {}
        if not empty:
            _folder.check_folder(path, read_only=read_only)
        try:
            with self._one_line_errors():
                if not read_only:
                    self._lock()
                if empty:
                    remove_files(path, _folder.own_files(path, None))
                self._index = Index(
                    path / FILE, is_new=not read_only and not _folder.is_store(path), read_only=read_only
                )
                self._look()
                if not read_only:
                    self._tidy()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock for the next writer; what was mapped or opened for reading stays readable."""
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
            if hasattr(self, "_index"):
                self._index.close()

    @property
    def names(self) -> list[str]:
        """The stored models, sorted."""
        return sorted(name for name, digests in self._index.models.items() if not digests.is_retired)

    @property
    def blocks(self) -> NDArray[Any]:
        """[rows, block_size] of the store's dtype, mapped read-only; `rows` gives the row of a block."""
        if len(self._mapped) < self._index.state.num_rows:
            file = self._rows_file
            damage = file.damage(self._index.state.num_rows)
            raise StoreError(f"{file.path} {damage}; `verify` shows what is affected")
        return self._mapped

    @property
    def reference_counts(self) -> NDArray[np.int64]:
        """[rows] The number of positions, over all models, at which each row is used."""
        used = [self.rows(self.manifest(name).blocks) for name in self._index.models]
        return np.bincount(np.concatenate([np.empty(0, np.int64), *used]), minlength=self._index.state.num_rows)

    def rows(self, blocks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """[k] The rows of blocks with the given numbers [k]; InputError if no such block is stored."""
        catalogue = self._catalogue
        rows = rows_of(catalogue, blocks)
        if (rows < 0).any():
            raise InputError(f"block {blocks[rows < 0][0]}: not stored; {self.path} holds {len(catalogue)} blocks")
        return rows

    def manifest(self, name: str) -> Manifest:
        """The manifest of a model: always the same object while the model is stored."""
        digests = self._digests(name)
        if digests not in self._manifests:
            with self._one_line_errors(name):
                self._manifests[digests] = self._index.manifest(name)
        return self._manifests[digests]

    def extras(self, name: str) -> Tensors:
        """The tensors of a model that are not cut into blocks."""
        self._check_held(name)
        with self._one_line_errors(name):
            return tensors_in(self._index.extras(name))

    def describe(self, name: str) -> Described | None:
        """The description that a model was added with, if any: its history, which tells its cost, and how it is used.

        What was stored may have taken blocks of other models; `sources` names these.
        """
        manifest = self.manifest(name)
        with self._one_line_errors(name):
            return self._index.description(manifest)

    def memory_bytes(self, name: str) -> int:
        """The memory that a model's tensors take, as its layout says; nothing of them is read."""
        return self.manifest(name).layout.num_bytes

    def sources(self, name: str) -> list[str]:
        """The model itself, and all whose values it may hold, directly or indirectly, as its provenance says."""
        found, waiting = [name], list(self.manifest(name).bases)
        while waiting:
            other = waiting.pop(0)
            if other not in found:
                found.append(other)
                waiting += self.manifest(other).bases if other in self._index.models else ()
        return found

    def is_chosen_privately(self, name: str) -> bool:
        """Whether private records decided which values of its sources a model holds, which no upload tells of."""
        known = [self.manifest(each) for each in self.sources(name) if each in self._index.models]
        return any(each.bases and utilities(each.outcome) is None for each in known)

    def unproven(self, name: str) -> str:
        """The way in which values of others were accepted for a model without a proof; empty for a proof, or none."""
        return unproven(self.manifest(name).outcome.get("acceptance"))

    def tensors(self, name: str) -> Tensors:
        """The model's tensors: bit for bit as they were added, or as its basis restores them."""
        manifest, extras = self.manifest(name), self.extras(name)
        if manifest.basis is not None:
            with self._one_line_errors(name):
                return self._basis(manifest.basis, manifest.layout).tensors(extras)
        rows = self.rows(manifest.blocks)
        present = rows < len(self._mapped)
        if are_present := bool(present.all()):
            blocks = self._mapped[rows]
        else:
            blocks = np.zeros((len(rows), manifest.layout.block_size), manifest.layout.dtype)
            blocks[present] = self._mapped[rows[present]]
        if not are_present or array_sha256(blocks) != manifest.blocks_sha256:
            damaged = _folder.damaged_tensors(manifest, ~present | _folder.damaged_rows(blocks, self._catalogue[rows]))
            # Rows may be sound, yet not those of the model: then the catalogue is damaged.
            raise StoreError(f"{self.path}: {[*damaged, f'model {name!r}: its blocks are not those of its digest'][0]}")
        return manifest.layout.from_blocks(blocks, extras)

    def add(
        self,
        name: str,
        layout: BlockLayout,
        values: NDArray[Any] | Reference,
        extras: Mapping[str, NDArray[Any]],
        *,
        described: Described | None = None,
        privacy: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Store a model, durably when this returns; blocks and bases equal to stored ones are not stored again.

        Args:
            name: not in the store yet; letters, digits and . _ = + -, at most 100 characters.
            layout: of the model; all models of a store have blocks of one size and dtype.
            values: [num_blocks, block_size], of its blocks; or the basis that it is restored from, which is stored once
                for all its models.
            extras: the extra tensors of the layout; with a basis, what the basis restores the model from.
            privacy: plain values, kept as they are.
            provenance: plain values, kept as they are; `bases` are the models whose values it may hold.

        Raises:
            InputError: an argument cannot be used.
            StoreError: the store is damaged, or cannot be written.
        """
        self._check_new(name, layout)
        before = self._index.state
        if isinstance(values, Reference):
            if difference := layout.difference(layout_of(values.tensors(extras), layout.block_size, layout.dtype)):
                raise InputError(f"model {name!r}: {difference}")
            basis, blocks_sha256 = values.to_bytes(), None
            numbered = number_blocks(np.empty((0, layout.block_size), layout.dtype), {}, before.next_block)
        else:
            if mismatch := layout.mismatch(values, extras):
                raise InputError(f"model {name!r}: {mismatch}")
            basis, blocks_sha256 = None, array_sha256(values)
            numbered = number_blocks(values, numbers_by_digest(self._catalogue), before.next_block)
            self._check_stored(values, numbered.numbers)
        manifest = Manifest(
            name=name,
            layout=layout,
            blocks=numbered.numbers,
            extras={tensor: array_sha256(own) for tensor, own in extras.items()},
            privacy=dict(privacy or {}),
            provenance=dict(provenance or {}),
            blocks_sha256=blocks_sha256,
        )
        try:
            manifest.to_json()
        except (TypeError, ValueError) as error:
            raise InputError(f"model {name!r}: privacy and provenance are plain JSON values ({error})") from None
        after = replace(
            before,
            block_size=layout.block_size,
            dtype=layout.dtype,
            num_rows=before.num_rows + len(numbered.new),
            next_block=before.next_block + len(numbered.new),
        )
        content = safetensors.numpy.save(dict(extras))
        if (largest := max(len(content), len(basis or b""))) > MOST_BYTES:
            raise InputError(
                f"model {name!r}: {largest} bytes in one piece; an index holds pieces of {MOST_BYTES} bytes at most, "
                f"so keep this model as a file, or in blocks"
            )
        with self._changing():
            file = _rows_file(self.path, after)
            file.write(before.num_rows, [numbered.new])
            sync_folder(file.path)
            self._index.add(after, manifest, content, numbered.catalogue, basis=basis, described=described)

    def remove(self, *names: str) -> None:
        """Remove models, all or none; blocks that others use stay, and the space of the rest is freed by `compact`.

        Of a base the description stays as long as a model with its blocks does, whose epsilon counts it and is checked
        by it; until then its name cannot be given to another.
        """
        self._check_writable()
        for name in names:
            self._check_held(name)
        known = self.names
        needed = {source for name in known if name not in names for source in self.sources(name)}
        gone = [name for name in self._index.models if name not in known and name not in needed]
        with self._changing():
            self._index.remove([*names, *gone], [self._retired(name) for name in names if name in needed])

    def _retired(self, name: str) -> Manifest:
        """The manifest of a model of which nothing stays but its description, which no longer says how it is used."""
        manifest = self.manifest(name)
        return replace(
            manifest,
            layout=replace(manifest.layout, tensors=()),
            blocks=np.empty(0, np.int64),
            extras={},
            basis=None,
            blocks_sha256=None,
            described=manifest.described and {**manifest.described, "files": {}},
        )

    def compact(self) -> int:
        """Free the space of blocks that no model uses; the numbers of the others stay the same.

        Returns:
            How many blocks were dropped.

        Raises:
            StoreError: the store is damaged, or cannot be written.
        """
        self._check_writable()
        kept, blocks, before = np.flatnonzero(self.reference_counts), self.blocks, self._index.state
        if dropped := before.num_rows - len(kept):
            after = replace(before, generation=before.generation + 1, num_rows=len(kept))
            chunks = (blocks[kept[first : first + _CHUNK]] for first in range(0, len(kept), _CHUNK))
            with self._changing():
                file = _rows_file(self.path, after)
                file.write(0, chunks)
                sync_folder(file.path)
                self._index.replace_rows(after, self._catalogue[kept])
            with self._one_line_errors():
                self._tidy()
        with self._one_line_errors():
            self._index.shrink()
        return dropped

    def verify(self) -> list[str]:
        """List the damage, one line per model and tensor, or per file; [] for a sound store. Reads everything."""
        with self._one_line_errors():
            return _folder.problems(self._index, self._rows_file if self._index.state.block_size else None)

    @property
    def bytes_stored(self) -> int:
        """The bytes of all blocks and of all that is in the index, without what SQLite adds to it."""
        file = self._rows_file.path
        with self._one_line_errors():
            return self._index.num_bytes() + (file.stat().st_size if file.exists() else 0)

    def num_bytes_of(self, name: str) -> int:
        """The bytes that the removal of a model alone frees, its blocks not counted."""
        self._digests(name)
        with self._one_line_errors():
            return self._index.num_bytes_of(name)

    @property
    def bytes_logical(self) -> int:
        """The bytes of all models as plain files, as if they shared nothing: tensors with their heads, descriptions."""
        with self._one_line_errors():
            return sum(self.manifest(name).plain_bytes + self._index.upload_bytes(name) for name in self.names)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors of all models, as if they shared nothing."""
        return sum(self.manifest(name).layout.num_bytes for name in self._index.models)

    @property
    def compression_ratio(self) -> float:
        """bytes_stored / tensor_bytes, as the paper counts; smaller is better, and 1 for an empty store."""
        return self.bytes_stored / self.tensor_bytes if self._index.models else 1.0

    def check_blocks(self, name: str, layout: BlockLayout) -> None:
        """Refuse, with an InputError, a model whose blocks are not of the size and dtype of those that are stored."""
        known = self._index.state.block_size, self._index.state.dtype
        if known[0] and known != (layout.block_size, layout.dtype):
            raise InputError(
                f"model = {name!r}: blocks of {layout.block_size} {layout.dtype}, but {self.path} has blocks of "
                f"{known[0]} {known[1]}; use these, or another store"
            )

    def _check_stored(self, blocks: NDArray[Any], numbers: NDArray[np.int64]) -> None:
        """Refuse to reuse a stored block that no longer matches its SHA-256."""
        (indices,) = np.nonzero(numbers < self._index.state.next_block)
        rows = self.rows(numbers[indices])
        for index, row in zip(indices, rows, strict=True):
            if self.blocks[row].tobytes() != blocks[index].tobytes():
                raise StoreError(f"{self.path}: block {numbers[index]} is damaged; `verify` shows what is affected")

    def _check_new(self, name: str, layout: BlockLayout) -> None:
        self._check_writable()
        check_name(name)
        if name in self._index.models:
            if self._index.models[name].is_retired:
                raise InputError(f"model = {name!r}: was removed, but others hold its blocks; take another name")
            raise InputError(f"model = {name!r}: stored already; remove it first, or take another name")
        self.check_blocks(name, layout)

    def _check_writable(self) -> None:
        if self._writer is None:
            raise StoreError(f"{self.path}: not open for writing")

    def _digests(self, name: str) -> Digests:
        if name not in self._index.models:
            raise InputError(f"model = {name!r}: not in {self.path}; it has {', '.join(self.names) or 'none'}")
        return self._index.models[name]

    def _check_held(self, name: str) -> None:
        if self._digests(name).is_retired:
            raise InputError(f"model = {name!r}: was removed from {self.path}; its description alone is kept")

    @property
    def _rows_file(self) -> _folder.RowFile:
        return _rows_file(self.path, self._index.state)

    @property
    def _catalogue(self) -> NDArray[Any]:
        """[rows] Number and SHA-256 of each row of blocks."""
        if len(self._index.catalogue) < self._index.state.num_rows:
            raise StoreError(f"{self.path / FILE}: damaged in its catalogue; `verify` shows what is affected")
        return self._index.catalogue

    def _basis(self, sha256: str, layout: BlockLayout) -> Reference:
        """A basis, which is read once."""
        key = sha256, layout  # a file has no shapes: one of zeros is that of any architecture
        if key not in self._shared:
            self._shared[key] = Reference.from_bytes(self._index.basis(sha256), layout)
        return self._shared[key]

    def _lock(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._writer = os.open(self.path / _folder.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{self.path}: another process is writing to it; a store has one writer at a time"
            ) from None

    def _look(self) -> None:
        """Read the state from the disk, and map the rows that it names before a compaction can replace them."""
        with self._index.reading() as state:
            self._mapped = _rows_file(self.path, state).map(state.num_rows)

    def _tidy(self) -> None:
        """Delete the files and rows that a writer which was killed left behind."""
        rows = self._rows_file
        remove_files(self.path, _folder.own_files(self.path, self._index.state))
        if self._index.state.block_size:
            rows.trim(self._index.state.num_rows)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Within this context the store is changed; what it then is, is read from the disk."""
        try:
            with self._one_line_errors():
                yield
        finally:
            with self._one_line_errors():
                self._look()

    @contextmanager
    def _one_line_errors(self, name: str = "") -> Iterator[None]:
        """Turn errors of files, SQLite and the file system into a `StoreError` of one line, about a model if given."""
        of = f"model {name!r}: " if name else ""
        try:
            yield
        except ValueError as error:
            raise StoreError(f"{self.path}: {of}{error}") from None
        except OSError as error:
            where = error.filename or self.path
            raise StoreError(f"{where}: cannot be used ({error.strerror}); the store stays as it was") from None
        except sqlite3.OperationalError as error:
            where = self.path / FILE
            raise StoreError(f"{where}: cannot be used ({error}); the store stays as it was") from None
        except sqlite3.Error as error:
            raise StoreError(f"{self.path / FILE}: damaged ({error})") from None


def check_name(name: str) -> None:
    """Refuse, with an InputError, what cannot be the name of a stored model."""
    if not _NAME.fullmatch(name):
        raise InputError(f"model = {name!r}: a name has letters, digits and . _ = + -, 1 to 100 of them")


def _rows_file(path: Path, state: State) -> _folder.RowFile:
    return _folder.RowFile(path / f"blocks.{state.generation}.npy", np.dtype(state.dtype), (state.block_size,))

"""The index of a store: one SQLite file that says which rows of blocks are valid and what each model is made of.

Every change is one transaction, after the rows that it names are on the disk; so a writer that is killed leaves the old
index or the new one. A seal, the SHA-256 of the state and of every model's digests, is checked when it is read.
"""

import hashlib
import json
import sqlite3
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedpriv.files import remove_files, sync_folder
from fedpriv.models.variants.blocks import CATALOGUE, Manifest, array_sha256
from fedpriv.models.variants.folders import Described, from_json, to_json

FILE = "index.sqlite"
VERSION = 1

MOST_BYTES = 10**9 - 10**6
"""The largest extras or basis: SQLite's limit for a value, less what is in its row beside it"""

NEW = f".{FILE}.new"
"""The file that becomes the index once it is whole"""

RETIRED = safetensors.numpy.save({}, metadata={"model": "removed"})
"""The extras of a model that was removed, of which the description stays"""

_LOCKED_SECONDS = 30.0
_SCHEMA = """
    CREATE TABLE state (
        generation INTEGER NOT NULL, block_size INTEGER NOT NULL, dtype TEXT NOT NULL, num_rows INTEGER NOT NULL,
        next_block INTEGER NOT NULL, catalogue TEXT NOT NULL, seal TEXT NOT NULL
    );
    CREATE TABLE catalogue (first INTEGER PRIMARY KEY, rows BLOB NOT NULL);
    CREATE TABLE models (
        name TEXT NOT NULL UNIQUE, manifest_sha256 TEXT NOT NULL, extras_sha256 TEXT NOT NULL, basis TEXT,
        manifest BLOB NOT NULL, extras BLOB NOT NULL
    );
    CREATE TABLE bases (sha256 TEXT NOT NULL UNIQUE, content BLOB NOT NULL);
    CREATE TABLE uploads (number INTEGER PRIMARY KEY, content TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Digests:
    """SHA-256 of a model's manifest and of its extras, and of the basis that it is restored from, if any."""

    manifest: str
    extras: str
    basis: str | None = None

    @property
    def is_retired(self) -> bool:
        """Whether it was removed, and only its description stays."""
        return self.extras == _RETIRED_SHA256


_RETIRED_SHA256 = hashlib.sha256(RETIRED).hexdigest()


@dataclass(frozen=True)
class State:
    """The state of a store: only the rows counted here are valid.

    Attributes:
        generation: of the file of blocks; every compaction starts a new one.
        block_size: values in a block; 0 before the first model.
        num_rows: valid rows in this file.
        catalogue: SHA-256 of the catalogue's rows.
    """

    generation: int = 0
    block_size: int = 0
    dtype: str = "float32"
    num_rows: int = 0
    next_block: int = 0
    catalogue: str = hashlib.sha256().hexdigest()


class Index:
    """An open index; what reads of it raises a ValueError of one line where it is damaged.

    Args:
        is_new: make it, durably when this returns.

    Raises:
        ValueError: it is damaged or has another version; one line.
        OSError, sqlite3.Error: it cannot be used.

    Attributes:
        state: as it was when last read.
        models: {name: its digests}, likewise.
        catalogue: [rows] of `CATALOGUE`, likewise.
    """

    def __init__(self, file: Path, *, is_new: bool, read_only: bool) -> None:
        self._db = _made(file) if is_new else _connected(file, read_only=read_only)
        self._close = weakref.finalize(self, self._db.close)
        self.state, self.models = State(), dict[str, Digests]()
        self.catalogue = np.empty(0, CATALOGUE)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            said = f"version {version}: this fedpriv reads version {VERSION}" if version else "damaged: it is empty"
            raise ValueError(f"{FILE}: {said}")

    def close(self) -> None:
        """Give up the file."""
        self._close()

    @contextmanager
    def reading(self) -> Iterator[State]:
        """Read the state; within this context no writer replaces it."""
        self._db.execute("BEGIN")
        try:
            (*values, seal) = self._db.execute("SELECT * FROM state").fetchone() or [None]
            models = _models(self._db)
            if seal is None or seal != _seal(values, models):
                raise ValueError(f"{FILE}: damaged: its SHA-256 does not match")
            parts = self._db.execute("SELECT rows FROM catalogue ORDER BY first").fetchall()
            rows = b"".join(_as_bytes(part) for (part,) in parts)
            self.catalogue = np.frombuffer(rows[: len(rows) - len(rows) % CATALOGUE.itemsize], CATALOGUE)
            self.state, self.models = State(*values), models
            yield self.state
        finally:
            self._db.rollback()

    def manifest(self, name: str) -> Manifest:
        """The manifest of a model; a ValueError also if it was replaced since the state was read."""
        return Manifest.from_json(self._checked(name, "manifest", self.models[name].manifest))

    def extras(self, name: str) -> bytes:
        """The safetensors of a model's extras; errors as of `manifest`."""
        return self._checked(name, "extras", self.models[name].extras)

    def raw_extras(self, name: str) -> bytes:
        """The same, damaged or not."""
        return self._content("SELECT extras FROM models WHERE name = ?", name)

    def basis(self, sha256: str) -> bytes:
        """The file of a basis."""
        content = self._content("SELECT content FROM bases WHERE sha256 = ?", sha256)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"its basis {sha256[:12]} in {FILE} is damaged or missing")
        return content

    def description(self, manifest: Manifest) -> Described | None:
        """The description of a model, with its uploads; None if none was stored."""
        if manifest.described is None:
            return None
        kept = manifest.described
        fields = dict(kept["fields"])
        if kept["uploads"] is not None:
            texts = self._uploads(kept["uploads"])
            if _texts_sha256(texts) != kept["uploads_sha256"]:
                raise ValueError(f"the uploads of its description in {FILE} are damaged")
            fields["uploads"] = [json.loads(text) for text in texts]
        return from_json(fields, kept["files"])

    def add(
        self,
        state: State,
        manifest: Manifest,
        extras: bytes,
        catalogue: NDArray[Any],
        *,
        basis: bytes | None,
        described: Described | None,
    ) -> None:
        """Add a model, durably when this returns.

        Args:
            state: afterwards; its catalogue's digest is found here.
            manifest: of the model, without description and basis.
            catalogue: [n] of its new blocks, whose rows are on the disk.
            basis: the file of its basis, which is kept once; None without one.
            described: its description, kept where given.
        """
        whole = array_sha256(np.concatenate([self.catalogue, catalogue]))
        sha256 = None if basis is None else hashlib.sha256(basis).hexdigest()
        with self._changing(replace(state, catalogue=whole)):
            if len(catalogue):
                rows = self.state.num_rows, catalogue.tobytes()
                self._db.execute("INSERT INTO catalogue VALUES (?, ?)", rows)
            if basis is not None:
                self._db.execute("INSERT OR IGNORE INTO bases VALUES (?, ?)", (sha256, basis))
            kept = None if described is None else self._kept(described)
            self._insert(replace(manifest, basis=sha256, described=kept), extras)

    def _insert(self, manifest: Manifest, extras: bytes) -> None:
        content = manifest.to_json()
        digests = Digests(hashlib.sha256(content).hexdigest(), hashlib.sha256(extras).hexdigest(), manifest.basis)
        row = manifest.name, *astuple(digests), zlib.compress(content), extras
        self._db.execute("INSERT INTO models VALUES (?, ?, ?, ?, ?, ?)", row)

    def remove(self, names: Iterable[str], retired: Sequence[Manifest] = ()) -> None:
        """Remove models, and what only they needed but blocks, durably; of some a manifest without tensors stays."""
        removed, kept = list(names), [manifest.name for manifest in retired]
        staying = [name for name in self.models if name not in removed or name in kept]
        used = {number for name in staying for number in self.upload_numbers(name)}
        with self._changing(self.state):
            self._db.executemany("DELETE FROM models WHERE name = ?", [(name,) for name in removed])
            for manifest in retired:
                self._insert(manifest, RETIRED)
            self._db.execute("DELETE FROM bases WHERE sha256 NOT IN (SELECT basis FROM models WHERE basis IS NOT NULL)")
            known = [number for (number,) in self._db.execute("SELECT number FROM uploads")]
            gone = [(number,) for number in known if number not in used]
            self._db.executemany("DELETE FROM uploads WHERE number = ?", gone)

    def replace_rows(self, state: State, catalogue: NDArray[Any]) -> None:
        """Name another file of rows, which is on the disk, durably when this returns; the catalogue is of all."""
        with self._changing(replace(state, catalogue=array_sha256(catalogue))):
            self._db.execute("DELETE FROM catalogue")
            if len(catalogue):
                self._db.execute("INSERT INTO catalogue VALUES (0, ?)", (catalogue.tobytes(),))

    def shrink(self) -> None:
        """Give back the space of what was removed."""
        self._db.execute("VACUUM")

    def upload_numbers(self, name: str) -> list[int]:
        """The numbers of the uploads in a model's description."""
        kept = self.manifest(name).described or {}
        return [number for first, count in kept.get("uploads") or () for number in range(first, first + count)]

    def upload_bytes(self, name: str) -> int:
        """The bytes of the uploads in a model's description, as a plain file lists them."""
        query = "SELECT coalesce(sum(length(content)), 0) FROM uploads WHERE number BETWEEN ? AND ?"
        ranges = (self.manifest(name).described or {}).get("uploads") or ()
        return sum(size for first, num in ranges for (size,) in self._db.execute(query, (first, first + num - 1)))

    def num_bytes(self) -> int:
        """The bytes of all that is in the index, without what SQLite adds."""
        sizes = (
            "SELECT length(manifest) + length(extras) FROM models",
            "SELECT length(rows) FROM catalogue",
            "SELECT length(content) FROM bases",
            "SELECT length(content) FROM uploads",
        )
        return sum(size for query in sizes for (size,) in self._db.execute(query))

    def num_bytes_of(self, name: str) -> int:
        """The bytes in the index that the removal of a model alone frees."""
        query = "SELECT length(manifest) + length(extras) FROM models WHERE name = ?"
        (found,) = self._db.execute(query, (name,)).fetchone()
        others = [other for other in self.models if other != name]
        basis = self.models[name].basis
        if basis and basis not in {self.models[other].basis for other in others}:
            found += len(self.basis(basis))
        only_here = set(self.upload_numbers(name)) - {n for other in others for n in self.upload_numbers(other)}
        sizes = dict(self._db.execute("SELECT number, length(content) FROM uploads"))
        return int(found) + sum(int(sizes[number]) for number in only_here)

    def damage(self) -> str | None:
        """Say how the file is damaged in a way that SQLite can tell; or None."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        return None if found == "ok" else " ".join(found.split())

    @contextmanager
    def _changing(self, state: State) -> Iterator[None]:
        """A transaction at whose end the index has this state; nothing has changed if it fails."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            _put_state(self._db, state)
            commit(self._db)
        except BaseException:
            self._db.rollback()
            raise

    def _checked(self, name: str, column: str, sha256: str) -> bytes:
        content = self._content(f"SELECT {column} FROM models WHERE name = ?", name)
        if column == "manifest":
            try:
                content = zlib.decompressobj().decompress(content, MOST_BYTES)
            except zlib.error:
                content = b""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"its {column} in {FILE}: damaged, or changed since the store was opened")
        return content

    def _content(self, query: str, key: str) -> bytes:
        """The content of one row; empty where there is none."""
        found = self._db.execute(query, (key,)).fetchone()
        return _as_bytes(found[0]) if found else b""

    def _kept(self, described: Described) -> dict[str, Any]:
        """A description as plain values, its uploads by number; those that are new are added."""
        fields = to_json(described)
        uploads, ranges, sha256 = fields.pop("uploads"), None, None
        if uploads is not None:
            texts = [json.dumps(upload) for upload in uploads]
            known = {content: number for number, content in self._db.execute("SELECT number, content FROM uploads")}
            for text in texts:
                if text not in known:
                    known[text] = self._db.execute("INSERT INTO uploads (content) VALUES (?)", (text,)).lastrowid
            ranges = _ranges(sorted(known[text] for text in texts))
            sha256 = _texts_sha256(self._uploads(ranges))
        files = {file: dict(values) for file, values in described.files.items()}
        return {"fields": {**fields, "uploads": None}, "files": files, "uploads": ranges, "uploads_sha256": sha256}

    def _uploads(self, ranges: Sequence[Sequence[int]]) -> list[str]:
        query = "SELECT content FROM uploads WHERE number BETWEEN ? AND ? ORDER BY number"
        return [text for first, count in ranges for (text,) in self._db.execute(query, (first, first + count - 1))]


def commit(db: sqlite3.Connection) -> None:
    """End a transaction; it is on the disk when this returns."""
    db.execute("COMMIT")


def _connected(file: Path, *, read_only: bool) -> sqlite3.Connection:
    """A connection; one for reading changes nothing, but may undo what a killed writer left half done."""
    # Where the file may not be written, SQLite opens it for reading.
    uri = f"{file.absolute().as_uri()}?mode=rw"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_LOCKED_SECONDS, check_same_thread=False)
    try:
        db.execute("PRAGMA synchronous = EXTRA")
        db.execute(f"PRAGMA query_only = {'ON' if read_only else 'OFF'}")
    except BaseException:
        db.close()
        raise
    return db


def _made(file: Path) -> sqlite3.Connection:
    """A new index, open; its file is there whole or not at all."""
    new = file.with_name(NEW)
    remove_files(new.parent, [new.name])
    new.touch(exist_ok=False)
    db = _connected(new, read_only=False)
    try:
        db.execute("PRAGMA page_size = 1024")
        db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION};")
        _put_state(db, State())
        commit(db)
    except BaseException:
        db.close()
        raise
    db.close()
    new.replace(file)
    sync_folder(file)
    return _connected(file, read_only=False)


def _put_state(db: sqlite3.Connection, state: State) -> None:
    db.execute("DELETE FROM state")
    values = astuple(state)
    db.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, _seal(values, _models(db))))


def _models(db: sqlite3.Connection) -> dict[str, Digests]:
    """{name: digests} of all models, in the order of their names."""
    rows = db.execute("SELECT name, manifest_sha256, extras_sha256, basis FROM models ORDER BY name")
    return {name: Digests(*digests) for name, *digests in rows}


def _as_bytes(value: Any) -> bytes:
    """A blob; a flipped bit makes of one a text or a number, which is none."""
    return value if isinstance(value, bytes) else b""


def _seal(values: Sequence[Any], models: Mapping[str, Digests]) -> str:
    """SHA-256 of a state and of every model's digests."""
    content = [*values, *([name, *astuple(digests)] for name, digests in models.items())]
    return hashlib.sha256(json.dumps(content, default=repr).encode()).hexdigest()


def _texts_sha256(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """[first, count] of each run of numbers that follow one another."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return [[run[0], len(run)] for run in found]

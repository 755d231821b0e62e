"""Stores as they lie on the disk, what is in their files, and damage to it; and descriptions of variants."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.composition import History, Upload
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting.events import Event, SubsampledGaussian

EVENT = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.05)


def uploads(until: int, data_set: str = "clinic", run: str = "r", event: Event = EVENT) -> frozenset[Upload]:
    """A data set's uploads of the first rounds of a run."""
    return frozenset(Upload(data_set=data_set, run=run, round=n, event=event) for n in range(1, until + 1))


def described(name: str, num_rounds: int = 1, **changes: Any) -> Described:
    """The description of a variant that descends from a clinic's uploads of so many rounds."""
    fields: dict[str, Any] = {
        "architecture": "linear",
        "utility": None,
        "epsilon_bound": 0.5,
        "utility_bound": 0.05,
        "deltas": {"clinic": 1e-5},
        "history": History(name=name, ancestors=uploads(num_rounds)),
    }
    return Described(name=name, **fields | changes)


def add(store: Store, name: str, tensors: dict[str, np.ndarray[Any, Any]], block_size: int = 16, **more: Any) -> None:
    """Store a model in blocks of so many values."""
    layout = layout_of(tensors, block_size)
    store.add(name, layout, *layout.to_blocks(tensors), **more)


def content_of(store: Path) -> dict[str, object]:
    """All that a store's files hold: the blocks by their file, and every row of the index."""
    with closing(sqlite3.connect(store / "index.sqlite")) as db:
        rows = list(db.iterdump())
    return {"index": rows, **{path.name: path.read_bytes() for path in sorted(store.glob("*.npy"))}}


def damage_index(store: Path, table: str, column: str, place: int = -1, *, name: str | None = None) -> None:
    """Flip a bit of what a table's row has in a column: the first row's, or that of the model of this name."""
    with closing(sqlite3.connect(store / "index.sqlite")) as db, db:
        query = f"SELECT rowid, {column} FROM {table} WHERE {'name = ?' if name else '? IS NULL'} ORDER BY rowid"
        row, content = db.execute(query, (name,)).fetchone()
        changed = bytearray(content.encode() if isinstance(content, str) else content)
        changed[place] ^= 1
        value = changed.decode() if isinstance(content, str) else bytes(changed)
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, row))


def flip(file: Path, place: int = -1) -> None:
    """Flip a bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def basis_sizes(store: Path) -> list[int]:
    """The bytes of each reference from which models are restored."""
    with closing(sqlite3.connect(store / "index.sqlite")) as db:
        return [size for (size,) in db.execute("SELECT length(content) FROM bases")]

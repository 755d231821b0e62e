"""The folder of a store when it is opened: refused, made, read, or converted from an older version's files.

In versions 1 and 2 index, catalogue, manifests, extras and bases were files of their own. They are read as they are.
The first that opens such a store for writing puts all but the blocks into the index of today, and only then are these
files deleted.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.errors import InputError
from fedpriv.variants._index import FILE, Contents, Digests, Index, State
from fedpriv.variants._manifests import CATALOGUE
from fedpriv.variants._rows import RowFile

LOCK = "lock"
OLD_FOLDERS = ("manifests", "extras", "bases")

_OLD_INDEX = "index.json"

# Version 1 had no shared bases.
_READABLE = (1, 2)


def opened(path: Path, *, read_only: bool) -> Index:
    """The index of a store's folder: made if there is none, or of an older version's files.

    Raises:
        ValueError: it is damaged or has another version; one line.
        OSError, sqlite3.Error: it cannot be used.
    """
    file = path / FILE
    if file.exists():
        return Index(file, read_only=read_only)
    contents = _contents_of(path) if (path / _OLD_INDEX).exists() else Contents()
    return Index(None if read_only else file, contents, read_only=read_only)


def is_store(path: Path) -> bool:
    """Whether a folder holds a store, of this version or an older one."""
    return any((path / name).is_file() for name in (FILE, _OLD_INDEX))


def check_folder(path: Path, *, read_only: bool) -> None:
    """Refuse a folder that is not a store and must not become one.

    Raises:
        InputError: it is missing, or holds something else.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"store = {path}: a file; a store is a folder")
    if is_store(path):
        return
    if read_only:
        raise InputError(f"store = {path}: no store: there is no {path / FILE}")
    # A writer that was killed before it had made an index leaves a lock and a part of the index.
    own = (LOCK, f".{FILE}.")
    if path.exists() and not all(each.name.startswith(own) for each in path.iterdir()):
        raise InputError(f"store = {path}: no store, yet not empty: it lacks {FILE}; give another folder")


def _contents_of(folder: Path) -> Contents:
    """All but the blocks of an old store; a file that is damaged or missing has the content that it has, or none.

    Raises:
        ValueError: its index is damaged or has another version; one line.
        OSError: a file cannot be read.
    """
    values = _index(folder / _OLD_INDEX)
    models = {name: Digests(**files) for name, files in values.pop("models").items()}
    state = State(**values)
    catalogue = RowFile(folder / f"catalogue.{state.generation}.npy", CATALOGUE, ()).map(state.num_rows)
    bases = {digests.basis for digests in models.values() if digests.basis}
    return Contents(
        state=state,
        catalogue=np.ascontiguousarray(catalogue).tobytes(),
        models={
            name: (
                digests,
                _content(folder / "manifests" / f"{name}.json"),
                _content(folder / "extras" / f"{name}.safetensors"),
            )
            for name, digests in models.items()
        },
        bases={sha256: _content(folder / "bases" / f"{sha256}.safetensors") for sha256 in sorted(bases)},
    )


def _index(path: Path) -> dict[str, Any]:
    """The state and the models' digests in an old index, which holds its own SHA-256."""
    content = path.read_bytes()
    try:
        values = dict(json.loads(content)["index"])
        version = values.pop("version")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{_OLD_INDEX}: damaged: not the JSON of an index") from None
    text = json.dumps({"version": version, **values})
    if content != f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}", "index": {text}}}\n'.encode():
        raise ValueError(f"{_OLD_INDEX}: damaged: its SHA-256 does not match")
    if version not in _READABLE:
        raise ValueError(
            f"{_OLD_INDEX}: version {version}: this fedpriv reads versions {' and '.join(map(str, _READABLE))}"
        )
    return values


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""

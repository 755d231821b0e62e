"""The folder of a store: refused, made, read, and searched for damage.

Damage is found by the SHA-256 of every block, manifest, extra tensor and basis.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.models.variants._index import FILE, NEW, Index, State
from fedpriv.models.variants._manifests import Manifest, array_sha256, rows_of
from fedpriv.models.variants._rows import RowFile
from fedpriv.models.variants.blocks import tensors_in
from fedpriv.models.variants.lossless import Reference

LOCK = "lock"

_UNDER_WAY = (NEW, f"{NEW}-journal")
_BLOCKS = re.compile(r"blocks\.([0-9]+)\.npy")


def is_store(path: Path) -> bool:
    """Whether a folder holds a store."""
    return (path / FILE).is_file()


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
    if path.exists() and not {each.name for each in path.iterdir()} <= {LOCK, *_UNDER_WAY}:
        raise InputError(f"store = {path}: no store, yet not empty: it lacks {FILE}; give another folder")


def own_files(path: Path, state: State | None) -> Iterator[str]:
    """The names of files that a store wrote into its folder and does not need; files of others may be there too.

    Args:
        path: of the folder.
        state: of the store; None if it needs none but its lock and the charges.
    """
    yield from _UNDER_WAY
    if state is not None:  # a compaction that was killed has left the old blocks or the new ones
        yield from (f"blocks.{state.generation + step}.npy" for step in (-1, 1))
    else:
        yield from [each.name for each in path.iterdir() if _BLOCKS.fullmatch(each.name)]
        yield from (f"{FILE}-journal", FILE)


def problems(index: Index, rows: RowFile | None) -> list[str]:
    """One line for each damaged tensor of a model, or damaged file; [] for a sound store.

    Args:
        index: of the store.
        rows: the file of its blocks; None before the first model is stored.
    """
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
    """[k] Which rows do not match their SHA-256 in the catalogue.

    Args:
        blocks: [k, block_size]; fewer rows if the file is too short, and the missing ones count as damaged.
        catalogue: [k] of these blocks.
    """
    damaged = np.ones(len(catalogue), bool)
    for row, block in enumerate(np.ascontiguousarray(blocks).view(np.uint8)):
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

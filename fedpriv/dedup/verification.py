"""Finding damage in a store by the SHA-256 of every block, manifest and extra tensor."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedpriv.dedup.basis_files import read_basis
from fedpriv.dedup.catalogue import rows_of
from fedpriv.dedup.folder import Folder, read
from fedpriv.dedup.manifests import Files, Index, Manifest, array_sha256


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
        lines += damaged_extras(folder, manifest, files)
        lines += damaged_basis(folder, manifest)
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


def damaged_extras(folder: Folder, manifest: Manifest, files: Files) -> list[str]:
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


def damaged_basis(folder: Folder, manifest: Manifest) -> list[str]:
    """A line if the shared basis of a model is damaged, and it cannot be restored."""
    if manifest.basis is None:
        return []
    try:
        read_basis(folder, manifest.basis, manifest.layout)
        return []
    except ValueError as error:
        return [f"model {manifest.name!r}: {error}; none of its tensors can be restored"]

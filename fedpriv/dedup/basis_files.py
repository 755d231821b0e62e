"""The shared bases of a store on the disk."""

from __future__ import annotations

import hashlib

from fedpriv.dedup.blocks import Layout
from fedpriv.dedup.folder import Folder, read, sync
from fedpriv.dedup.shared_basis import SharedBasis
from fedpriv.files import replace_file


class BasisFiles:
    """The bases in a store's folder, each read once.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._read: dict[str, SharedBasis] = {}

    def read(self, sha256: str, layout: Layout) -> SharedBasis:
        """The basis of that SHA-256, of models of this layout.

        Raises:
            ValueError: in one line, what is wrong with it.
        """
        if sha256 not in self._read:
            self._read[sha256] = read_basis(self._folder, sha256, layout)
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


def read_basis(folder: Folder, sha256: str, layout: Layout) -> SharedBasis:
    """A basis from its file.

    Raises:
        ValueError: the file is missing or damaged, or its basis is not of this layout; one line that names it.
    """
    return SharedBasis.from_bytes(read(folder.basis(sha256), sha256), layout)

"""One reader for variants wherever they are kept: in a folder each, or in a store of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fedpriv.variants import folders
from fedpriv.variants._opening import is_store
from fedpriv.variants.blocks import Tensors
from fedpriv.variants.folders import Described
from fedpriv.variants.store import Store


class KeptVariants(Protocol):
    """Variants by name; a `fedpriv.variants.Store` is one reader of them, `VariantFolders` is the other."""

    @property
    def names(self) -> list[str]:
        """The variants that are whole, sorted."""

    def describe(self, name: str) -> Described | None:
        """The description that a variant was added with; None for one that an older version stored without any.

        Raises:
            InputError, StoreError: there is no such variant, or its description is damaged.
        """

    def tensors(self, name: str) -> Tensors:
        """A variant's tensors, checked against the digests that were kept with them.

        Raises:
            InputError, StoreError: there is no such variant, or it is damaged.
        """

    def sources(self, name: str) -> list[str]:
        """The variant itself, and all whose values it may hold.

        Raises:
            InputError, StoreError: as of `describe`.
        """

    def is_chosen_privately(self, name: str) -> bool:
        """Whether private records decided which values of its sources it holds, which no upload tells of.

        Raises:
            InputError, StoreError: as of `describe`.
        """


class VariantFolders:
    """Variants in a folder each, under their folders' names.

    Args:
        path: of the folder that holds them, which may be missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def names(self) -> list[str]:
        """See `KeptVariants`; a folder with a description is whole, since the description is written last."""
        return sorted(path.parent.name for path in self.path.glob(f"*/{folders.FILE}"))

    def describe(self, name: str) -> Described:
        """See `KeptVariants`."""
        return folders.read(self.path / name)

    def tensors(self, name: str) -> Tensors:
        """See `KeptVariants`."""
        return folders.read_tensors(self.path / name)

    def sources(self, name: str) -> list[str]:
        """See `KeptVariants`; a variant in a folder of its own holds its own values alone."""
        return [name]

    def is_chosen_privately(self, name: str) -> bool:
        """See `KeptVariants`."""
        return False


class OwnOrStored:
    """Variants in folders of their own, and those in a store that have none.

    Args:
        own: the folders.
        stored: the store; None without one.
    """

    def __init__(self, own: VariantFolders, stored: Store | None) -> None:
        self.own, self.stored = own, stored

    @property
    def names(self) -> list[str]:
        """See `KeptVariants`."""
        return sorted({*self.own.names, *(self.stored.names if self.stored else ())})

    def describe(self, name: str) -> Described | None:
        """See `KeptVariants`."""
        return self.reader(name).describe(name)

    def tensors(self, name: str) -> Tensors:
        """See `KeptVariants`."""
        return self.reader(name).tensors(name)

    def sources(self, name: str) -> list[str]:
        """See `KeptVariants`."""
        return self.reader(name).sources(name)

    def is_chosen_privately(self, name: str) -> bool:
        """See `KeptVariants`."""
        return self.reader(name).is_chosen_privately(name)

    def reader(self, name: str) -> KeptVariants:
        """The reader that has the variant."""
        if self.stored is None or (self.own.path / name / folders.FILE).is_file() or name not in self.stored.names:
            return self.own
        return self.stored


def open_variants(own: Path, store: Path) -> OwnOrStored:
    """The variants of a run.

    Args:
        own: the folder of those that have folders of their own; may be missing.
        store: the folder of the store; may be missing.

    Raises:
        StoreError: the store is damaged as a whole.
    """
    return OwnOrStored(VariantFolders(own), Store(store, read_only=True) if is_store(store) else None)

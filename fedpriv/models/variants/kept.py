"""One reader for variants wherever they are kept, in a folder each or in a store of blocks; and a store's contents.

A model that others name as their base cannot be removed from a store alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError, StoreError
from fedpriv.models.variants import folders
from fedpriv.models.variants._manifests import CATALOGUE
from fedpriv.models.variants._opening import is_store
from fedpriv.models.variants.blocks import Tensors
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.outcomes import accuracy_after, perplexity_after
from fedpriv.models.variants.store import Store


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model of a store.

    Attributes:
        name: of the model.
        bytes_own: that its removal and a compaction would free: its files, and the blocks or the basis that no
            other model uses.
        num_blocks: in the model.
        num_shared: of these, positions whose block another model uses too.
        epsilon_before, epsilon_after: see `fedpriv.models.dedup.work.Outcome`; None if it was not deduplicated.
        accuracy, perplexity: on the validation records; None of what is not measured, if these are private, or if it
            was not deduplicated.
        bases: whose blocks it may hold.
    """

    name: str
    bytes_own: int
    num_blocks: int
    num_shared: int
    epsilon_before: float | None
    epsilon_after: float | None
    accuracy: float | None
    perplexity: float | None
    bases: tuple[str, ...]


def stored_models(store: Store) -> list[StoredModel]:
    """All models of a store, in the order of their names; blocks are not read.

    Raises:
        StoreError: it is damaged.
    """
    counts = store.reference_counts
    return [_stored_model(store, name, counts) for name in store.names]


def remove(store: Store, names: Collection[str]) -> None:
    """Remove models; the space of blocks that no other model uses is freed by `Store.compact`.

    Every model that stays can be restored as before. But its epsilon counts the bases that its provenance names, and
    can be checked only as long as these are known; and a name that becomes free may be given to another model, which
    would make that provenance a false statement. So a base goes no earlier than the models that name it.

    Args:
        store: open for writing.
        names: of the models, which go all at once, so that an interruption leaves a store in which all named bases are
            present.

    Raises:
        InputError: one is not stored, or is a base of a model that would stay.
        StoreError: the store is damaged, or cannot be written.
    """
    for name in names:
        store.manifest(name)
    bases = {name: store.manifest(name).bases for name in store.names}
    for name in sorted(names):
        if users := [other for other in bases if name in bases[other] and other not in names]:
            raise InputError(
                f"name = {name!r}: is a base of {', '.join(users)}, whose epsilon counts it; remove these as well"
            )
    store.remove(*names)


def kept_for_others(store: Store, names: Collection[str]) -> dict[str, list[str]]:
    """{one of these names: the stored models that are restored with its values, which stay as long as they do}.

    Raises:
        StoreError: a manifest is damaged.
    """
    references = {name: store.manifest(name).provenance.get("reference") for name in store.names}
    found = {name: [other for other, of in references.items() if of == name != other] for name in names}
    return {name: others for name, others in found.items() if others}


def _stored_model(store: Store, name: str, counts: NDArray[np.int64]) -> StoredModel:
    manifest = store.manifest(name)
    rows = store.rows(manifest.blocks)
    own_rows, own_counts = np.unique(rows, return_counts=True)
    only_here = own_rows[counts[own_rows] == own_counts]
    outcome = manifest.outcome
    row_bytes = manifest.layout.block_size * np.dtype(manifest.layout.dtype).itemsize + CATALOGUE.itemsize
    return StoredModel(
        name=name,
        bytes_own=store.num_bytes_of(name) + len(only_here) * row_bytes,
        num_blocks=len(rows),
        num_shared=int((~np.isin(rows, only_here)).sum()),
        epsilon_before=outcome.get("epsilon_before"),
        epsilon_after=outcome.get("epsilon_after"),
        accuracy=accuracy_after(outcome),
        perplexity=perplexity_after(outcome),
        bases=manifest.bases,
    )


class KeptVariants(Protocol):
    """Variants by name; a `fedpriv.models.variants.Store` is one reader of them, `VariantFolders` is the other."""

    @property
    def names(self) -> list[str]:
        """The variants that are whole, sorted."""

    def describe(self, name: str) -> Described | None:
        """The description that a variant was added with; None for one that was stored without any.

        Raises:
            InputError, StoreError: there is no such variant, or its description is damaged.
        """

    def tensors(self, name: str) -> Tensors:
        """A variant's tensors, checked against the digests that were kept with them.

        Raises:
            InputError, StoreError: there is no such variant, or it is damaged.
        """

    def memory_bytes(self, name: str) -> int:
        """The memory that a variant's tensors take, which is told before they are read.

        Raises:
            InputError, StoreError, OSError: there is no such variant, or it is damaged.
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

    def memory_bytes(self, name: str) -> int:
        """See `KeptVariants`."""
        return folders.num_bytes(self.path / name)

    def sources(self, name: str) -> list[str]:
        """See `KeptVariants`; a variant in a folder of its own holds its own values alone."""
        return [name]

    def is_chosen_privately(self, name: str) -> bool:
        """See `KeptVariants`."""
        return False


def readers_of(own: Path, store: Path) -> dict[str, VariantFolders | Store]:
    """{variant of a run, sorted: the reader that has it as it is now}.

    A store may be older than a run that was resumed; then the variant in the folder descends from further uploads.

    Args:
        own: the folder of those that have folders of their own; may be missing.
        store: the folder of the store; may be missing.

    Raises:
        StoreError: the store is damaged as a whole.
    """
    in_folders = VariantFolders(own)
    found: dict[str, VariantFolders | Store] = dict.fromkeys(in_folders.names, in_folders)
    if is_store(store):
        stored = Store(store, read_only=True)
        found |= {name: stored for name in stored.names if name not in found or not _is_older(stored, in_folders, name)}
    return dict(sorted(found.items()))


def _is_older(store: Store, own: VariantFolders, name: str) -> bool:
    """Whether the folder's variant descends from an upload from which the store's does not."""
    try:
        stored, ancestors = store.describe(name), own.describe(name).history.ancestors
    except (InputError, StoreError):  # one is damaged: the store's is what there is, or what is refused
        return False
    known = stored.history.ancestors if stored else None
    return ancestors is not None and known is not None and not ancestors <= known

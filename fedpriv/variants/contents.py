"""The contents of a store, model by model; a model that others name as their base cannot be removed alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.variants._manifests import CATALOGUE
from fedpriv.variants.store import Store


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model of a store.

    Attributes:
        name: of the model.
        bytes_own: that its removal and a compaction would free: its files, and the blocks or the shared basis that no
            other model uses.
        num_blocks: in the model.
        num_shared: of these, positions whose block another model uses too.
        epsilon_before, epsilon_after: see `fedpriv.dedup.work.Outcome`; None if it was not deduplicated.
        accuracy: on the validation records; None if these are private, or it was not deduplicated.
        bases: whose blocks it may hold.
    """

    name: str
    bytes_own: int
    num_blocks: int
    num_shared: int
    epsilon_before: float | None
    epsilon_after: float | None
    accuracy: float | None
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
            present; members of one shared basis name each other.

    Raises:
        InputError: one is not stored, or is a base of a model that would stay.
        StoreError: the store is damaged, or cannot be written.
    """
    for name in names:
        store.manifest(name)
    bases = {name: _bases_of(store, name) for name in store.names}
    for name in sorted(names):
        if users := [other for other in bases if name in bases[other] and other not in names]:
            raise InputError(
                f"name = {name!r}: is a base of {', '.join(users)}, whose epsilon counts it; remove these as well"
            )
    store.remove(*names)


def _bases_of(store: Store, name: str) -> tuple[str, ...]:
    """The models that a model's provenance names as its bases.

    Raises:
        InputError: there is no such model.
        StoreError: its manifest is damaged.
    """
    return tuple(store.manifest(name).provenance.get("bases", ()))


def _stored_model(store: Store, name: str, counts: NDArray[np.int64]) -> StoredModel:
    manifest = store.manifest(name)
    rows = store.rows(manifest.blocks)
    own_rows, own_counts = np.unique(rows, return_counts=True)
    only_here = own_rows[counts[own_rows] == own_counts]
    outcome = manifest.provenance.get("outcome", {})
    correct = outcome.get("correct_after")
    row_bytes = manifest.layout.block_size * np.dtype(manifest.layout.dtype).itemsize + CATALOGUE.itemsize
    return StoredModel(
        name=name,
        bytes_own=store.num_bytes_of(name) + len(only_here) * row_bytes,
        num_blocks=len(rows),
        num_shared=int((~np.isin(rows, only_here)).sum()),
        epsilon_before=outcome.get("epsilon_before"),
        epsilon_after=outcome.get("epsilon_after"),
        accuracy=None if correct is None else correct / outcome["num_records"],
        bases=_bases_of(store, name),
    )

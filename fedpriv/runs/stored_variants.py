"""What deduplication left in a run's store of variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.dedup.store import Store
from fedpriv.runs import files


@dataclass(frozen=True, kw_only=True)
class StoredVariants:
    """The variants in a store.

    Attributes:
        outcomes: one for each variant: what deduplication did to it, under the names of `dedup.outcomes.Outcome`.
        bases: of a variant that is stored by a shared basis: `rank`, whether it has a `residual` of its own, and the
            `error` of what is restored; None for the others.
        bytes_stored: of all variants, each shared block once.
        bytes_logical: of all variants as plain files.
    """

    outcomes: tuple[Mapping[str, Any], ...]
    bases: tuple[Mapping[str, Any] | None, ...]
    bytes_stored: int
    bytes_logical: int

    @property
    def num_records(self) -> int:
        """The size of the validation set."""
        return int(self.outcomes[0]["num_records"])

    @property
    def by_basis(self) -> bool:
        """Whether a shared basis is what it was stored by, at least where that was accepted."""
        return any(self.bases)

    @property
    def num_validations(self) -> int:
        """How often a variant was validated, over all variants."""
        return sum(outcome["num_validations"] for outcome in self.outcomes)


def read_stored(run_dir: Path) -> StoredVariants | None:
    """What the run's store holds; None if there is none, or nothing in it comes from deduplication.

    Raises:
        StoreError: it is damaged or in use.
    """
    if not (run_dir / files.STORE).is_dir():
        return None
    with Store(run_dir / files.STORE, read_only=True) as store:
        found = [store.manifest(name).provenance for name in store.names]
        stored, logical = store.bytes_stored, store.bytes_logical
    found = [provenance for provenance in found if provenance.get("outcome")]
    if not found:
        return None
    return StoredVariants(
        outcomes=tuple(provenance["outcome"] for provenance in found),
        bases=tuple(provenance.get("basis") for provenance in found),
        bytes_stored=stored,
        bytes_logical=logical,
    )

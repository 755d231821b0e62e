"""The contents of a store: its models, what deduplication saved and cost, as tables for the report and the terminal.

Of a damaged store all raise StoreError.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError, StoreError
from fedpriv.models.variants._folder import is_store
from fedpriv.models.variants.blocks import (
    CATALOGUE,
    accuracy_after,
    is_accuracy,
    perplexity,
    perplexity_after,
    unproven,
    utilities,
)
from fedpriv.models.variants.folders import VariantFolders
from fedpriv.models.variants.store import Store
from fedpriv.runs import files, parse_epsilon
from fedpriv.runs.figures import MISSING, format_bound, format_bytes, format_delta, format_percent
from fedpriv.runs.show import TextTable

_MOST_NAMES = 4

UNKNOWN = "unknown"
"""The epsilon, for people, of what nobody knows the origin of"""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model of a store.

    Attributes:
        bytes_own: that its removal and a compaction would free: its files, and the blocks or the basis that no
            other model uses.
        num_shared: of these, positions whose block another model uses too.
        origin_known, epsilon_before, epsilon_after: see `fedpriv.models.dedup.work.Outcome`; None if it was not
            deduplicated.
        accuracy, perplexity: on the validation records; None of what is not measured, if these are private, or if it
            was not deduplicated.
        acceptance: how its loss was judged, see `fedpriv.models.dedup.work.Outcome`.
        bases: whose blocks it may hold.
    """

    name: str
    bytes_own: int
    num_blocks: int
    num_shared: int
    origin_known: bool | None
    epsilon_before: float | None
    epsilon_after: float | None
    accuracy: float | None
    perplexity: float | None
    acceptance: str | None
    bases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StoredVariants:
    """The variants in a store.

    Attributes:
        outcomes: one for each variant: what deduplication did to it, under the names of `dedup.work.Outcome`.
        lossless: whether all are stored without loss.
        bytes_stored: of all variants, each shared block once.
        bytes_logical: of all variants as plain files.
    """

    outcomes: tuple[Mapping[str, Any], ...]
    lossless: bool
    bytes_stored: int
    bytes_logical: int

    @property
    def num_records(self) -> int:
        """The largest number of records on which a variant was validated, those of a search left out."""
        return max(int(outcome["num_records"]) for outcome in self.outcomes)

    @property
    def way(self) -> str:
        """The way in which they are stored, in words."""
        return "a store without loss" if self.lossless else "shared blocks"

    @property
    def num_validations(self) -> int:
        """The number of validations, over all variants."""
        return sum(outcome["num_validations"] for outcome in self.outcomes)

    def variant_table(self) -> TextTable:
        """A row for each variant, before and after deduplication."""
        shared = ("values of", "restored from") if self.lossless else ("blocks of", "replaced")
        measure = "accuracy" if all(map(is_accuracy, self.outcomes)) else "perplexity"
        headers = ("variant", *shared, measure, "then", "at most lost", "ε", "then", "by basic", "δ")
        rows = tuple(
            (
                outcome["name"],
                _others(outcome["bases"]),
                "its own values" if self.lossless else f"{outcome['num_replaced']} of {outcome['num_blocks']}",
                *_utilities(outcome),
                unproven(outcome.get("acceptance"))
                or (MISSING if (limit := outcome.get("loss_limit")) is None else format_bound(max(0.0, limit))),
                *(
                    format_bound(epsilon) if outcome["origin_known"] else UNKNOWN
                    for epsilon in (
                        outcome["epsilon_before"],
                        outcome["epsilon_after"],
                        outcome["epsilons"].get("basic"),
                    )
                ),
                format_delta(outcome["delta"]),
            )
            for outcome in self.outcomes
        )
        return TextTable(
            caption="Per variant, before and after deduplication; ε at the row's δ", headers=headers, rows=rows
        )

    def size_table(self, base_bytes: int | None) -> TextTable:
        """The bytes of all variants: as whole models, as adapters next to their base, if known, and as stored."""
        num_variants, logical, shared = len(self.outcomes), self.bytes_logical, self.bytes_stored
        ways: dict[str, int | None] = {
            "a whole model for each": None if base_bytes is None else num_variants * base_bytes + logical,
            "the base once, an adapter for each": None if base_bytes is None else base_bytes + logical,
            f"the base once, {self.way}": None if base_bytes is None else base_bytes + shared,
            "the adapters alone": logical,
            f"the adapters alone, {self.way}": shared,
        }
        rows = tuple((way, format_bytes(size)) for way, size in ways.items())
        return TextTable(caption=f"What {num_variants} variants take", headers=("stored as", "bytes"), rows=rows)

    def closing_table(self, base_bytes: int | None) -> TextTable:
        """The savings of deduplication and their cost, in a few rows."""
        num, logical, shared = len(self.outcomes), self.bytes_logical, self.bytes_stored
        sizes = [("adapters", logical, shared, "")]
        if base_bytes is not None:
            sizes.append(("whole models", num * base_bytes + logical, base_bytes + shared, ", the base once"))
        rows: list[tuple[str, ...]] = [
            (way, format_bytes(before), format_bytes(after), f"{before / after:.3g} times smaller{how}")
            for way, before, after, how in sizes
        ]
        fall = _largest_fall(self.outcomes)
        if self.lossless:
            fall = *fall[:3], "none fell"
        rows += [_largest_rise(self.outcomes), fall]
        return TextTable(caption=f"{num} variants in {self.way}", headers=("", "before", "after", ""), rows=tuple(rows))


def stored_in(run_dir: Path) -> StoredVariants | None:
    """The variants in the run's store; None without one, or if nothing in it comes from deduplication."""
    if not (run_dir / files.STORE).is_dir():
        return None
    with Store(run_dir / files.STORE, read_only=True) as store:
        manifests = [store.manifest(name) for name in store.names]
        stored, logical = store.bytes_stored, store.bytes_logical
    found = [manifest.provenance for manifest in manifests if manifest.provenance.get("outcome")]
    if not found:
        return None
    return StoredVariants(
        outcomes=tuple(provenance["outcome"] for provenance in found),
        lossless=all(manifest.basis is not None for manifest in manifests),
        bytes_stored=stored,
        bytes_logical=logical,
    )


def _others(names: Sequence[str]) -> str:
    """Some names, or how many there are."""
    return (", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} others") or MISSING


def _largest_rise(outcomes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The row of the variant whose epsilon rose most; one without a bound before has none to lose."""

    def rise(outcome: Mapping[str, Any]) -> float:
        before, after = (parse_epsilon(outcome[key]) for key in ("epsilon_before", "epsilon_after"))
        return 0.0 if math.isinf(before) else after - before

    name, most = "largest rise of ε", max(outcomes, key=rise)
    if rise(most) <= 0:
        return name, MISSING, MISSING, "none rose"
    before, after = (format_bound(most[key]) for key in ("epsilon_before", "epsilon_after"))
    return name, before, after, f"{most['name']}, δ {format_delta(most['delta'])}"


def _largest_fall(outcomes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The row of the variant whose accuracy fell most."""
    losses = [(found[0] - found[1], each) for each in outcomes if (found := utilities(each))]
    measured = [(lost, each) for lost, each in losses if math.isfinite(lost)]
    if not measured:
        return "largest fall of accuracy", MISSING, MISSING, "not measured: validated privately"
    lost, most = max(measured, key=itemgetter(0))
    name = "largest fall of accuracy" if is_accuracy(most) else "largest rise of perplexity"
    if lost <= 0:
        return name, MISSING, MISSING, "none fell" if is_accuracy(most) else "none rose"
    return name, *_utilities(most), most["name"]


def _utilities(outcome: Mapping[str, Any]) -> tuple[str, str]:
    """Accuracy or perplexity before and after."""
    found = utilities(outcome)
    if found is None:
        return MISSING, MISSING
    texts = [format_percent(each) if is_accuracy(outcome) else f"{perplexity(each):.2f}" for each in found]
    return texts[0], texts[1]


def stored_models(store: Store) -> list[StoredModel]:
    """All models of a store, in the order of their names; blocks are not read."""
    counts = store.reference_counts
    return [_stored_model(store, name, counts) for name in store.names]


def kept_for_others(store: Store, names: Collection[str]) -> dict[str, list[str]]:
    """{one of these names: the stored models that hold its values, which stay as long as they do}."""
    holders = {name: (*store.sources(name), store.manifest(name).provenance.get("reference")) for name in store.names}
    found = {name: [other for other, of in holders.items() if name in of and name != other] for name in names}
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
        origin_known=outcome.get("origin_known"),
        epsilon_before=outcome.get("epsilon_before"),
        epsilon_after=outcome.get("epsilon_after"),
        accuracy=accuracy_after(outcome),
        perplexity=perplexity_after(outcome),
        acceptance=outcome.get("acceptance"),
        bases=manifest.bases,
    )


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

"""The deduplicated variants of a run: what they saved and cost, as tables for the report and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedpriv.models.variants.outcomes import is_accuracy, perplexity, utilities
from fedpriv.models.variants.store import Store
from fedpriv.runs import files, parse_epsilon
from fedpriv.runs.figures import MISSING, format_bound, format_bytes, format_delta, format_percent
from fedpriv.runs.show import TextTable

_MOST_NAMES = 4


@dataclass(frozen=True, kw_only=True)
class StoredVariants:
    """The variants in a store.

    Attributes:
        outcomes: one for each variant: what deduplication did to it, under the names of `dedup.outcomes.Outcome`.
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
                _limit(outcome.get("loss_limit")),
                format_bound(outcome["epsilon_before"]),
                format_bound(outcome["epsilon_after"]),
                format_bound(outcome["epsilons"].get("basic")),
                format_delta(outcome["delta"]),
            )
            for outcome in self.outcomes
        )
        return TextTable(
            caption="Per variant, before and after deduplication; ε at the row's δ", headers=headers, rows=rows
        )

    def size_table(self, base_bytes: int | None) -> TextTable:
        """The bytes of all variants: as whole models, as adapters next to their base, and as they are stored.

        Args:
            base_bytes: size of the frozen model that they are adapters of; None if the run did not record it.
        """
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
        """The savings of deduplication and their cost, in a few rows.

        Args:
            base_bytes: size of the frozen model that they are adapters of; None if the run did not record it.
        """
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
    """The variants in the run's store; None without one, or if nothing in it comes from deduplication.

    Raises:
        StoreError: it is damaged or in use.
    """
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


def _limit(loss: float | None) -> str:
    return MISSING if loss is None else format_bound(max(0.0, loss))


def _utilities(outcome: Mapping[str, Any]) -> tuple[str, str]:
    """Accuracy or perplexity before and after."""
    found = utilities(outcome)
    if found is None:
        return MISSING, MISSING
    texts = [format_percent(each) if is_accuracy(outcome) else f"{perplexity(each):.2f}" for each in found]
    return texts[0], texts[1]

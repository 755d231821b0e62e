"""The variants in a run's store as its report shows them: what deduplication saved, and what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.dedup.store import Store
from fedpriv.reports import tables
from fedpriv.reports.tables import Table

FOLDER = "store"


@dataclass(frozen=True, kw_only=True)
class StoredVariants:
    """What a store holds.

    Attributes:
        table: a row for each variant.
        sizes: what all variants take in three ways; whole models and adapters beside their base where its size is
            known.
        num_records: of the validation set.
        num_validations: of all variants.
        compression_ratio: bytes stored over those of plain files.
    """

    table: Table
    sizes: Table
    num_records: int
    num_validations: int
    compression_ratio: float


def read_stored(run_dir: Path, base_bytes: int | None) -> StoredVariants | None:
    """What the run's store holds; None where there is none, or nothing that deduplication put there.

    Args:
        run_dir: a run's folder.
        base_bytes: of the frozen model that the variants are adapters of; None where the run did not say.

    Raises:
        StoreError: it is damaged or in use.
    """
    if not (run_dir / FOLDER).is_dir():
        return None
    with Store(run_dir / FOLDER, read_only=True) as store:
        found = [store.manifest(name).provenance.get("outcome") for name in store.names]
        stored, logical, ratio = store.bytes_stored, store.bytes_logical, store.compression_ratio
    outcomes = [outcome for outcome in found if outcome]
    if not outcomes:
        return None
    return StoredVariants(
        table=_variant_table(outcomes),
        sizes=_sizes(len(outcomes), base_bytes, stored, logical),
        num_records=outcomes[0]["num_records"],
        num_validations=sum(outcome["num_validations"] for outcome in outcomes),
        compression_ratio=ratio,
    )


def _variant_table(outcomes: list[Mapping[str, Any]]) -> Table:
    headers = ("variant", "blocks of", "replaced", "accuracy", "then", "ε", "then", "by basic", "δ")
    rows = tuple(
        (
            outcome["name"],
            ", ".join(outcome["bases"]) or tables.MISSING,
            f"{outcome['num_replaced']} of {outcome['num_blocks']}",
            _accuracy(outcome, "correct_before"),
            _accuracy(outcome, "correct_after"),
            tables.format_bound(outcome["epsilon_before"]),
            tables.format_bound(outcome["epsilon_after"]),
            tables.format_bound(outcome["epsilons"].get("basic")),
            tables.format_delta(outcome["delta"]),
        )
        for outcome in outcomes
    )
    return Table(caption="Per variant, before and after deduplication; ε at the row's δ", headers=headers, rows=rows)


def _accuracy(outcome: Mapping[str, Any], key: str) -> str:
    return tables.format_percent(None if outcome[key] is None else outcome[key] / outcome["num_records"])


def _sizes(num_variants: int, base_bytes: int | None, stored: int, logical: int) -> Table:
    ways: dict[str, int | None] = {
        "a whole model for each": None if base_bytes is None else num_variants * base_bytes + logical,
        "the base once, an adapter for each": None if base_bytes is None else base_bytes + logical,
        "the base once, shared blocks": None if base_bytes is None else base_bytes + stored,
        "the adapters alone": logical,
        "the adapters alone, shared blocks": stored,
    }
    rows = tuple((way, tables.format_bytes(size)) for way, size in ways.items())
    return Table(caption=f"What {num_variants} variants take", headers=("stored as", "bytes"), rows=rows)

"""The variants in a run's store as its report shows them: what deduplication saved, and what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedpriv.reports import tables
from fedpriv.reports.tables import Table
from fedpriv.runs.stored_variants import StoredVariants


def variant_table(stored: StoredVariants) -> Table:
    """A row for each variant, before and after deduplication."""
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
        for outcome in stored.outcomes
    )
    return Table(caption="Per variant, before and after deduplication; ε at the row's δ", headers=headers, rows=rows)


def size_table(stored: StoredVariants, base_bytes: int | None) -> Table:
    """What all variants take: as whole models, as adapters beside their base, and as shared blocks.

    Args:
        stored: the variants.
        base_bytes: size of the frozen model that they are adapters of; None if the run did not record it.
    """
    num_variants, logical, shared = len(stored.outcomes), stored.bytes_logical, stored.bytes_stored
    ways: dict[str, int | None] = {
        "a whole model for each": None if base_bytes is None else num_variants * base_bytes + logical,
        "the base once, an adapter for each": None if base_bytes is None else base_bytes + logical,
        "the base once, shared blocks": None if base_bytes is None else base_bytes + shared,
        "the adapters alone": logical,
        "the adapters alone, shared blocks": shared,
    }
    rows = tuple((way, tables.format_bytes(size)) for way, size in ways.items())
    return Table(caption=f"What {num_variants} variants take", headers=("stored as", "bytes"), rows=rows)


def _accuracy(outcome: Mapping[str, Any], key: str) -> str:
    return tables.format_percent(None if outcome[key] is None else outcome[key] / outcome["num_records"])

"""The variants in a run's store as its report shows them: what deduplication saved, and what it changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedpriv.runs.rows import parse_epsilon
from fedpriv.runs.show import tables
from fedpriv.runs.show.tables import TextTable
from fedpriv.runs.stored_variants import StoredVariants

_MOST_NAMES = 4


def variant_table(stored: StoredVariants) -> TextTable:
    """A row for each variant, before and after deduplication."""
    shared = ("a basis with", "restored from") if stored.by_basis else ("blocks of", "replaced")
    headers = ("variant", *shared, "accuracy", "then", "ε", "then", "by basic", "δ")
    rows = tuple(
        (
            outcome["name"],
            _others(outcome["bases"]),
            _restored(basis) if stored.by_basis else f"{outcome['num_replaced']} of {outcome['num_blocks']}",
            _accuracy(outcome, "correct_before"),
            _accuracy(outcome, "correct_after"),
            tables.format_bound(outcome["epsilon_before"]),
            tables.format_bound(outcome["epsilon_after"]),
            tables.format_bound(outcome["epsilons"].get("basic")),
            tables.format_delta(outcome["delta"]),
        )
        for outcome, basis in zip(stored.outcomes, stored.bases, strict=True)
    )
    return TextTable(
        caption="Per variant, before and after deduplication; ε at the row's δ", headers=headers, rows=rows
    )


def _others(names: Sequence[str]) -> str:
    """Some names, or how many there are: in a shared basis every variant has all of the others."""
    return (", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} others") or tables.MISSING


def _restored(basis: Mapping[str, Any] | None) -> str:
    """What a variant is restored from, and the length of the difference over its own."""
    if basis is None:
        return "its own values"
    residual = " and a residual" if basis["residual"] else ""
    return f"rank {basis['rank']}{residual}, error {basis['error']['relative']:.2g}"


def size_table(stored: StoredVariants, base_bytes: int | None) -> TextTable:
    """What all variants take: as whole models, as adapters beside their base, and as they are stored.

    Args:
        stored: the variants.
        base_bytes: size of the frozen model that they are adapters of; None if the run did not record it.
    """
    num_variants, logical, shared = len(stored.outcomes), stored.bytes_logical, stored.bytes_stored
    what = "a shared basis" if stored.by_basis else "shared blocks"
    ways: dict[str, int | None] = {
        "a whole model for each": None if base_bytes is None else num_variants * base_bytes + logical,
        "the base once, an adapter for each": None if base_bytes is None else base_bytes + logical,
        f"the base once, {what}": None if base_bytes is None else base_bytes + shared,
        "the adapters alone": logical,
        f"the adapters alone, {what}": shared,
    }
    rows = tuple((way, tables.format_bytes(size)) for way, size in ways.items())
    return TextTable(caption=f"What {num_variants} variants take", headers=("stored as", "bytes"), rows=rows)


def closing_table(stored: StoredVariants, base_bytes: int | None) -> TextTable:
    """What deduplication saved and what that cost, in a few rows.

    Args:
        stored: the variants.
        base_bytes: size of the frozen model that they are adapters of; None if the run did not record it.
    """
    num, logical, shared = len(stored.outcomes), stored.bytes_logical, stored.bytes_stored
    sizes = [("adapters", logical, shared, "")]
    if base_bytes is not None:
        sizes.append(("whole models", num * base_bytes + logical, base_bytes + shared, ", the base once"))
    rows: list[tuple[str, ...]] = [
        (way, tables.format_bytes(before), tables.format_bytes(after), f"{before / after:.3g} times smaller{how}")
        for way, before, after, how in sizes
    ]
    rows += [_largest_rise(stored.outcomes), _largest_fall(stored.outcomes)]
    what = "a shared basis" if stored.by_basis else "shared blocks"
    return TextTable(caption=f"{num} variants in {what}", headers=("", "before", "after", ""), rows=tuple(rows))


def _largest_rise(outcomes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The row of the variant whose epsilon rose most; one without a bound before has none to lose."""

    def rise(outcome: Mapping[str, Any]) -> float:
        before, after = (parse_epsilon(outcome[key]) for key in ("epsilon_before", "epsilon_after"))
        return 0.0 if math.isinf(before) else after - before

    name, most = "largest rise of ε", max(outcomes, key=rise)
    if rise(most) <= 0:
        return name, tables.MISSING, tables.MISSING, "none rose"
    before, after = (tables.format_bound(most[key]) for key in ("epsilon_before", "epsilon_after"))
    return name, before, after, f"{most['name']}, δ {tables.format_delta(most['delta'])}"


def _largest_fall(outcomes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The row of the variant whose accuracy fell most."""
    name, measured = "largest fall of accuracy", [each for each in outcomes if each["correct_before"] is not None]
    if not measured:
        return name, tables.MISSING, tables.MISSING, "not measured: validated privately"
    most = max(measured, key=lambda each: each["correct_before"] - each["correct_after"])
    if most["correct_before"] <= most["correct_after"]:
        return name, tables.MISSING, tables.MISSING, "none fell"
    return name, _accuracy(most, "correct_before"), _accuracy(most, "correct_after"), most["name"]


def _accuracy(outcome: Mapping[str, Any], key: str) -> str:
    return tables.format_percent(None if outcome[key] is None else outcome[key] / outcome["num_records"])

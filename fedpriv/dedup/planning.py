"""How variants are to be deduplicated: the settings, who may take blocks of whom, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpriv.accounting.events import Event
from fedpriv.accounting.law import Accountant
from fedpriv.dedup.base_selection import Fairness, Selection, Strategy, Variant, select_bases
from fedpriv.dedup.composition import Guarantee, PublicationCost, publication_cost
from fedpriv.dedup.variants import Described


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How variants are deduplicated.

    Attributes:
        block_size: values in a block, >= 1.
        algorithm: name of the search, with its options.
        options: of the search.
        aggregation: of saliency over a block.
        metric: by which a block's nearest base block is found.
        strategy, fairness: of base selection.
        accountant: that bounds are held against.
    """

    block_size: int = 1024
    algorithm: str = "drd"
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "l2"
    metric: str = "l2"
    strategy: Strategy = "single"
    fairness: Fairness = "bounds"
    accountant: Accountant = "pld"


def plan(
    variants: Sequence[Described],
    settings: Settings,
    validation: Mapping[str, Sequence[Event]] | None = None,
    deltas: Mapping[str, float] | None = None,
) -> Selection:
    """Which variant may take blocks of which, by what they cost together; no weights are looked at.

    A base costs a target what `publication_cost` says of both, by the tightest composition that holds.

    Args:
        variants: all that are stored together.
        settings: see there.
        validation: {data set: what validating one target releases of it}, where that is private.
        deltas: {data set: delta} of these.

    Raises:
        ValueError: two variants of one name, or of one upload with two events.
    """
    known = {variant.name: variant for variant in variants}

    def cost(target: Variant, bases: Sequence[Variant]) -> Guarantee:
        # A base may be a target itself under `cross`, and then its own validation had a say in its blocks.
        runs = 0 if not bases else 1 + len(bases) * (settings.strategy == "cross")
        extra = {id_: tuple(events) * runs for id_, events in (validation or {}).items()}
        return cost_of([known[each.name] for each in (target, *bases)], settings.accountant, extra, deltas).guarantee

    return select_bases(
        [variant.as_variant(settings.accountant) for variant in variants],
        strategy=settings.strategy,
        fairness=settings.fairness,
        cost=cost,
    )


def cost_of(
    consulted: Sequence[Described],
    accountant: Accountant = "pld",
    extra: Mapping[str, Sequence[Event]] | None = None,
    deltas: Mapping[str, float] | None = None,
) -> PublicationCost:
    """What it costs to publish anything made of these variants, and of what was released besides.

    Args:
        consulted: the variants.
        accountant: that composes events.
        extra: {data set: events}, of private validation.
        deltas: {data set: delta}, of the data sets of `extra` that no variant was trained on.
    """
    found: dict[str, float] = {}
    for each in (*(variant.deltas for variant in consulted), deltas or {}):
        for id_, delta in each.items():
            found[id_] = min(delta, found.get(id_, delta))
    return publication_cost([variant.history for variant in consulted], found, extra=extra, accountant=accountant)

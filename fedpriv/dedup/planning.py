"""The plan of a deduplication: its settings, which variant may take blocks of which, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpriv.accounting.events import Event
from fedpriv.accounting.law import Accountant
from fedpriv.dedup.base_selection import Fairness, Selection, Strategy, Variant, select_bases, worthwhile_bases
from fedpriv.dedup.composition import Guarantee, PublicationCost, publication_cost
from fedpriv.dedup.variants import Described


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How variants are deduplicated.

    Attributes:
        block_size: values in a block, >= 1.
        algorithm: name of the search algorithm.
        options: of the search.
        aggregation: of saliency over a block.
        metric: used to find the nearest base block of each block.
        strategy, fairness: of base selection.
        accountant: computes the epsilons that are compared with the bounds.
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
    """Which variant may take blocks of which, by their joint cost; no weights are read.

    The cost of a target with a base is the `publication_cost` of both, by the tightest composition that holds. Where
    variants share releases, `multi` takes no more bases than are worthwhile.

    Args:
        variants: all variants that are stored together.
        settings: see `Settings`.
        validation: {data set: the events of validating one target}, for private validation records.
        deltas: {data set: delta} for these data sets.

    Raises:
        ValueError: two variants have one name, or one upload has two different events.
    """
    known = {variant.name: variant for variant in variants}

    def cost(target: Variant, bases: Sequence[Variant]) -> Guarantee:
        # Under `cross` a base may itself be a target, and then its own validation influenced its blocks.
        runs = 0 if not bases else 1 + len(bases) * (settings.strategy == "cross")
        extra = {id_: tuple(events) * runs for id_, events in (validation or {}).items()}
        return cost_of([known[each.name] for each in (target, *bases)], settings.accountant, extra, deltas).guarantee

    return select_bases(
        [variant.as_variant(settings.accountant) for variant in variants],
        strategy=settings.strategy,
        fairness=settings.fairness,
        cost=cost,
        most_bases=worthwhile_bases if _share_releases(variants) else None,
    )


def _share_releases(variants: Sequence[Described]) -> bool:
    """Whether two variants descend from one upload: then bases cost hardly any epsilon, and bounds end no list."""
    ancestors = [variant.history.ancestors or frozenset() for variant in variants]
    return len(frozenset().union(*ancestors)) < sum(map(len, ancestors))


def cost_of(
    consulted: Sequence[Described],
    accountant: Accountant = "pld",
    extra: Mapping[str, Sequence[Event]] | None = None,
    deltas: Mapping[str, float] | None = None,
) -> PublicationCost:
    """What it costs to publish anything computed from these variants and from further releases.

    Args:
        consulted: the variants.
        accountant: that composes events.
        extra: {data set: events}, of private validation.
        deltas: {data set: delta}, for the data sets of `extra` on which no variant was trained.
    """
    smallest: dict[str, float] = {}
    for each in (*(variant.deltas for variant in consulted), deltas or {}):
        for id_, delta in each.items():
            smallest[id_] = min(delta, smallest.get(id_, delta))
    return publication_cost([variant.history for variant in consulted], smallest, extra=extra, accountant=accountant)

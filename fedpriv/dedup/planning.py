"""The plan of a deduplication: its settings, which variant may take blocks of which, and what that costs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpriv.accounting.composition.law import Accountant
from fedpriv.accounting.events import Event
from fedpriv.dedup.algorithms import SHARED_BASIS, algorithm
from fedpriv.dedup.base_selection import (
    MAX_DISTANCE,
    Fairness,
    Selection,
    Strategy,
    Variant,
    select_bases,
    worthwhile_bases,
)
from fedpriv.dedup.charges import Charge
from fedpriv.dedup.composition import Guarantee, PublicationCost, publication_cost
from fedpriv.dedup.shared_basis import BasisOptions
from fedpriv.dedup.variants import Described
from fedpriv.errors import InputError


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
        max_distance: of metadata within a cluster of variants, whose bases are chosen among themselves first; 2 makes
            one cluster of all, whatever their data, tags and architectures.
        accountant: computes the epsilons that are compared with the bounds.
    """

    block_size: int = 1024
    algorithm: str = "drd"
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "l2"
    metric: str = "l2"
    strategy: Strategy = "single"
    fairness: Fairness = "bounds"
    max_distance: float = MAX_DISTANCE
    accountant: Accountant = "pld"


def check_options(settings: Settings) -> None:
    """Refuse an algorithm or an option that is unknown, or a value that it does not take, before anything is charged.

    Raises:
        InputError: names it.
    """
    method = BasisOptions if settings.algorithm == SHARED_BASIS else algorithm(settings.algorithm)
    parameters = inspect.signature(method).parameters
    options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    if odd := sorted(set(settings.options) - set(options)):
        raise InputError(f"option = {odd[0]!r}: {settings.algorithm} knows {', '.join(options)}")
    if settings.algorithm == SHARED_BASIS:
        BasisOptions(**settings.options)
    else:  # a search of no blocks checks its options
        algorithm(settings.algorithm)(0, lambda positions: False, **settings.options)


def plan(
    variants: Sequence[Described],
    settings: Settings,
    attempts: Mapping[str, Sequence[Charge]] | None = None,
) -> Selection:
    """Which variant may take blocks of which, by their joint cost; no weights are read.

    The cost of a target with a base is the `publication_cost` of both, by the tightest composition that holds. Where
    variants share releases, `multi` takes no more bases than are worthwhile.

    Args:
        variants: all variants that are stored together.
        settings: see `Settings`.
        attempts: {variant: what validating it once is charged}, for those whose validation records are private.

    Raises:
        ValueError: two variants have one name, or one upload has two different events.
    """
    known = {variant.name: variant for variant in variants}

    def cost(target: Variant, bases: Sequence[Variant]) -> Guarantee:
        # Under `cross` a base may itself be a target, and then its own validation influenced its blocks.
        validated = () if not bases else (target, *bases) if settings.strategy == "cross" else (target,)
        charges = [charge for each in validated for charge in (attempts or {}).get(each.name, ())]
        return cost_of([known[each.name] for each in (target, *bases)], settings.accountant, charges).guarantee

    return select_bases(
        [variant.as_variant(settings.accountant) for variant in variants],
        strategy=settings.strategy,
        fairness=settings.fairness,
        max_distance=settings.max_distance,
        cost=cost,
        most_bases=worthwhile_bases if _share_releases(variants) else None,
    )


def _share_releases(variants: Sequence[Described]) -> bool:
    """Whether two variants descend from one upload: then bases cost hardly any epsilon, and bounds end no list."""
    ancestors = [variant.history.ancestors or frozenset() for variant in variants]
    return len(frozenset().union(*ancestors)) < sum(map(len, ancestors))


def cost_of(
    consulted: Sequence[Described], accountant: Accountant = "pld", charges: Iterable[Charge] = ()
) -> PublicationCost:
    """What it costs to publish anything computed from these variants and from answers that were charged.

    Args:
        consulted: the variants.
        accountant: that composes events.
        charges: for private validation, of any of the variants.
    """
    deltas: dict[str, float] = {}
    stated = [(id_, delta) for variant in consulted for id_, delta in variant.deltas.items()]
    extra: dict[str, list[Event]] = {}
    for charge in charges:
        extra.setdefault(charge.data_set, []).append(charge.event)
        stated.append((charge.data_set, charge.delta))
    for id_, delta in stated:
        deltas[id_] = min(delta, deltas.get(id_, delta))
    return publication_cost([variant.history for variant in consulted], deltas, extra=extra, accountant=accountant)

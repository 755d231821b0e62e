"""Which variants make up a shared basis: as many as stay within their epsilon bounds when all of them are ancestors.

A variant that is restored from a basis is a function of every variant that the basis was computed from, so its cost is
that of publishing all of these. Every decision here uses public metadata only, as in `fedpriv.dedup.base_selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fedpriv.dedup.base_selection import Limits, Variant, fair_limits, own_limits
from fedpriv.dedup.charges import Charge
from fedpriv.dedup.composition import PublicationCost
from fedpriv.dedup.planning import Settings, cost_of
from fedpriv.dedup.variants import Described

Group = tuple[str, ...]
"""Names of variants in the order given; each has a basis of all of them."""


GroupCost = Callable[[Group, str], PublicationCost]
"""What publishing a group, and validating one of its members, costs."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Who shares a basis with whom.

    Attributes:
        groups: disjoint, of at least two variants each.
        costs: {member: the cost of a reader of it alone}, private validation included.
        left_out: {variant in no group: why}.
        limits: of every variant.
    """

    groups: tuple[Group, ...]
    costs: Mapping[str, PublicationCost]
    left_out: Mapping[str, str]
    limits: Mapping[str, Limits]


def choose_members(
    variants: Sequence[Described],
    settings: Settings,
    attempts: Mapping[str, tuple[Charge, ...]] | None = None,
) -> Members:
    """The groups of variants that share a basis: the largest within all bounds first, then of the rest likewise.

    Guarantee: the cost of publishing all members of a group, and one member's validation, is within the epsilon limit
    of each of its members. Bounds, and with `fairness = "bounds"` also the next higher epsilon on the same data, are
    limits; with "outcome" a member whose epsilon would overtake a formerly higher one is left out.

    Args:
        variants: all that are stored together.
        settings: gives fairness and accountant.
        attempts: {variant: what validating it once is charged}, for those whose validation records are private.

    Raises:
        ValueError: two variants have one name, or one upload has two different events.
    """
    known = {variant.name: variant for variant in variants}
    if len(known) < len(variants):
        raise ValueError("variants: two have the same name")
    public = {variant.name: variant.as_variant(settings.accountant) for variant in variants}
    limits = {name: _limits(variant, public.values(), settings) for name, variant in public.items()}

    @cache
    def published(group: Group, charges: tuple[Charge, ...]) -> PublicationCost:
        return cost_of([known[name] for name in group], settings.accountant, charges)

    def cost(group: Group, member: str) -> PublicationCost:
        # Whose validation it is does not matter to what it costs, and groups are long.
        return published(group, tuple(replace(charge, name="") for charge in (attempts or {}).get(member, ())))

    groups = [
        group
        for architecture in sorted({variant.architecture for variant in variants})
        for group in _groups([v for v in public.values() if v.architecture == architecture], limits, cost)
    ]
    overtaking: set[str] = set()
    while settings.fairness == "outcome" and (name := _overtaking(groups, public, cost)):
        overtaking.add(name)
        groups = [group for group in (tuple(n for n in g if n != name) for g in groups) if len(group) > 1]
    members = {name: cost(group, name) for group in groups for name in group}
    return Members(
        groups=tuple(groups),
        costs=members,
        left_out={
            name: "would overtake another variant's epsilon"
            if name in overtaking
            else "no shared basis meets its epsilon bound"
            for name in known
            if name not in members
        },
        limits=limits,
    )


def _limits(variant: Variant, variants: Iterable[Variant], settings: Settings) -> Limits:
    """As base selection has them."""
    fair = fair_limits(variant, variants)
    return fair if settings.fairness == "bounds" else Limits(epsilon=own_limits(variant).epsilon, utility=fair.utility)


def _groups(variants: Sequence[Variant], limits: Mapping[str, Limits], cost: GroupCost) -> list[Group]:
    """Disjoint groups of variants of one architecture, the largest first; of equal ones that of least epsilon."""
    groups: list[Group] = []
    rest = list(variants)
    while rest:
        ceilings = sorted({variant.epsilon for variant in rest})
        # Costlier variants first left out as a whole, then cheaper ones that the others would make too costly.
        found = [_within([v.name for v in rest if v.epsilon <= ceiling], limits, cost) for ceiling in ceilings]
        largest = max(found, key=len)
        if len(largest) < 2:
            break
        groups.append(largest)
        rest = [variant for variant in rest if variant.name not in largest]
    return groups


def _within(names: Sequence[str], limits: Mapping[str, Limits], cost: GroupCost) -> Group:
    """Those of the variants that remain when all whose limit the others' cost exceeds are left out, again and again."""
    group: Group = tuple(names)
    while len(group) > 1:
        kept = tuple(name for name in group if cost(group, name).guarantee.epsilon <= limits[name].epsilon)
        if kept == group:
            return group
        group = kept
    return group


def _overtaking(groups: Sequence[Group], public: Mapping[str, Variant], cost: GroupCost) -> str | None:
    """The first member whose epsilon would exceed that of a variant on the same data which had a higher one."""
    after = {name: variant.epsilon for name, variant in public.items()}
    after |= {name: max(after[name], cost(group, name).guarantee.epsilon) for group in groups for name in group}
    for name in (name for group in groups for name in group):
        own = public[name]
        peers = [each for each in public.values() if each.data_sets == own.data_sets and each.epsilon > own.epsilon]
        if any(after[each.name] < after[name] for each in peers):
            return name
    return None

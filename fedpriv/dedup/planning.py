"""The plan of a deduplication: its settings, which variant may share with which, and what that costs.

Blocks: a variant takes them of its bases, which `fedpriv.dedup._base_selection` chooses.

A shared basis: as many variants make it up as stay within their epsilon bounds when all of them are ancestors. A
variant that is restored from it is a function of every variant that the basis was computed from, so its cost is that of
publishing all of these. Every decision uses public metadata only.

Charges: a validation on private records that was interrupted has been paid for, and the one who starts another may
have seen how the first went. So the store keeps them, whatever became of each attempt, and a variant's epsilon counts
all attempts at it, also those of before it was removed from the store.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedpriv.accounting import events
from fedpriv.accounting.composition.law import Accountant
from fedpriv.accounting.events import Event
from fedpriv.dedup._base_selection import (
    MAX_DISTANCE,
    Candidate,
    Fairness,
    Selection,
    Strategy,
    VariantLimits,
    fair_limits,
    own_limits,
    select_bases,
    worthwhile_bases,
)
from fedpriv.dedup.algorithms import LOSSLESS, SHARED_BASIS, algorithm
from fedpriv.errors import InputError, StoreError
from fedpriv.files import replace_file, sync_folder
from fedpriv.variants.composition import Guarantee, PublicationCost, publication_cost
from fedpriv.variants.folders import Described
from fedpriv.variants.shared_basis import BasisOptions
from fedpriv.variants.store import CHARGES_FILE


@dataclass(frozen=True, kw_only=True)
class DedupSettings:
    """The settings of a deduplication.

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


def check_options(settings: DedupSettings) -> None:
    """Refuse an algorithm or an option that is unknown, or a value that it does not take, before anything is charged.

    Raises:
        InputError: names it.
    """
    if settings.algorithm == LOSSLESS:
        if settings.options:
            raise InputError(f"option = {min(settings.options)!r}: {LOSSLESS} has none")
        return
    method = BasisOptions if settings.algorithm == SHARED_BASIS else algorithm(settings.algorithm)
    parameters = inspect.signature(method).parameters
    options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    if odd := sorted(set(settings.options) - set(options)):
        raise InputError(f"option = {odd[0]!r}: {settings.algorithm} knows {', '.join(options)}")
    if settings.algorithm == SHARED_BASIS:
        BasisOptions(**settings.options)
    else:  # a search of no blocks checks its options
        algorithm(settings.algorithm)(0, lambda positions: False, **settings.options)


@dataclass(frozen=True, kw_only=True)
class KnownUtility:
    """The utility of a variant on its validation records.

    Attributes:
        value: as stated or measured; None counts as 0.
        error: its standard error, by which the utilities of others must be less to be told apart.
    """

    value: float | None
    error: float = 0.0


def candidate(
    variant: Described, accountant: Accountant = "pld", utilities: Mapping[str, KnownUtility] | None = None
) -> Candidate:
    """The variant as base selection needs it; without known utilities, with that which it states."""
    guarantee = variant.guarantee(accountant)
    known = (utilities or {}).get(variant.name, KnownUtility(value=variant.utility))
    return Candidate(
        name=variant.name,
        architecture=variant.architecture,
        data_sets=variant.history.data_sets,
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        utility=known.value or 0.0,
        utility_error=known.error,
        epsilon_bound=variant.epsilon_bound,
        utility_bound=variant.utility_bound,
        tags=variant.tags,
    )


def plan(
    variants: Sequence[Described],
    settings: DedupSettings,
    attempts: Mapping[str, Sequence[ValidationCharge]] | None = None,
    utilities: Mapping[str, KnownUtility] | None = None,
) -> Selection:
    """Plan who may take blocks of whom, by their joint cost; no weights are read.

    The cost of a target with a base is the `publication_cost` of both, by the tightest composition that holds. Where
    variants share releases, `multi` takes no more bases than are worthwhile.

    Args:
        variants: all variants that are stored together.
        settings: see `DedupSettings`.
        attempts: {variant: what validating it once is charged}, for those whose validation records are private.
        utilities: {variant: what is known of its utility}; None for what each states.

    Raises:
        ValueError: two variants have one name, or one upload has two different events.
    """
    known = {variant.name: variant for variant in variants}

    def cost(target: Candidate, bases: Sequence[Candidate]) -> Guarantee:
        # Under `cross` a base may itself be a target, and then its own validation influenced its blocks.
        validated = () if not bases else (target, *bases) if settings.strategy == "cross" else (target,)
        charges = [charge for each in validated for charge in (attempts or {}).get(each.name, ())]
        return cost_of([known[each.name] for each in (target, *bases)], settings.accountant, charges).guarantee

    return select_bases(
        [candidate(variant, settings.accountant, utilities) for variant in variants],
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
    consulted: Sequence[Described], accountant: Accountant = "pld", charges: Iterable[ValidationCharge] = ()
) -> PublicationCost:
    """The cost of publishing anything computed from these variants and from answers that were charged.

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


_CHARGES_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ValidationCharge:
    """One event that private records were charged for one variant.

    Attributes:
        name: of the variant.
        data_set: id of the records' data set.
        delta: at which the epsilon of this data set is stated.
        event: what was charged.
    """

    name: str
    data_set: str
    delta: float
    event: Event


def read_charges(store: Path) -> list[ValidationCharge]:
    """All charges for variants of the store, in the order in which they were made.

    Args:
        store: its folder.

    Raises:
        StoreError: their file is damaged.
    """
    path = store / CHARGES_FILE
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _CHARGES_VERSION:
            raise ValueError(f"version {content['version']}: this fedpriv reads version {_CHARGES_VERSION}")
        return [
            ValidationCharge(**{**values, "event": events.from_json(values["event"])}) for values in content["charges"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: not a list of charges ({error}); use another store") from None


def add_charges(store: Path, charges: Iterable[ValidationCharge]) -> None:
    """Add charges, durably when this returns.

    Args:
        store: its folder, open for writing.
        charges: made after those that are known.

    Raises:
        StoreError: their file is damaged.
    """
    known = [*read_charges(store), *charges]
    rows = [{**asdict(charge), "event": events.to_json(charge.event)} for charge in known]
    replace_file(store / CHARGES_FILE, json.dumps({"version": _CHARGES_VERSION, "charges": rows}).encode())
    sync_folder(store / CHARGES_FILE)


Group = tuple[str, ...]
"""Names of variants in the order given; each has a basis of all of them."""


_GroupCost = Callable[[Group, str], PublicationCost]
"""The cost of publishing a group and validating one of its members."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """The groups of variants that share a basis.

    Attributes:
        groups: disjoint, of at least two variants each.
        costs: {member: its cost to someone who reads it alone}, private validation included.
        left_out: {variant in no group: why}.
        limits: of every variant.
    """

    groups: tuple[Group, ...]
    costs: Mapping[str, PublicationCost]
    left_out: Mapping[str, str]
    limits: Mapping[str, VariantLimits]


def choose_members(
    variants: Sequence[Described],
    settings: DedupSettings,
    attempts: Mapping[str, tuple[ValidationCharge, ...]] | None = None,
    utilities: Mapping[str, KnownUtility] | None = None,
) -> Members:
    """The groups of variants that share a basis: the largest within all bounds first, then of the rest likewise.

    Guarantee: the cost of publishing all members of a group, and one member's validation, is within the epsilon limit
    of each of its members. Bounds, and with `fairness = "bounds"` also the next higher epsilon on the same data, are
    limits; with "outcome" a member whose epsilon would overtake a formerly higher one is left out.

    Args:
        variants: all that are stored together.
        settings: gives fairness and accountant.
        attempts: {variant: what validating it once is charged}, for those whose validation records are private.
        utilities: {variant: what is known of its utility}; None for what each states.

    Raises:
        ValueError: two variants have one name, or one upload has two different events.
    """
    known = {variant.name: variant for variant in variants}
    if len(known) < len(variants):
        raise ValueError("variants: two have the same name")
    public = {variant.name: candidate(variant, settings.accountant, utilities) for variant in variants}
    limits = {name: _limits(variant, public.values(), settings) for name, variant in public.items()}

    @cache
    def published(group: Group, charges: tuple[ValidationCharge, ...]) -> PublicationCost:
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


def _limits(variant: Candidate, variants: Iterable[Candidate], settings: DedupSettings) -> VariantLimits:
    """The limits that base selection would use."""
    fair = fair_limits(variant, variants)
    return (
        fair
        if settings.fairness == "bounds"
        else VariantLimits(epsilon=own_limits(variant).epsilon, utility=fair.utility)
    )


def _groups(variants: Sequence[Candidate], limits: Mapping[str, VariantLimits], cost: _GroupCost) -> list[Group]:
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


def _within(names: Sequence[str], limits: Mapping[str, VariantLimits], cost: _GroupCost) -> Group:
    """Those of the variants that remain when all whose limit the others' cost exceeds are left out, again and again."""
    group: Group = tuple(names)
    while len(group) > 1:
        kept = tuple(name for name in group if cost(group, name).guarantee.epsilon <= limits[name].epsilon)
        if kept == group:
            return group
        group = kept
    return group


def _overtaking(groups: Sequence[Group], public: Mapping[str, Candidate], cost: _GroupCost) -> str | None:
    """The first member whose epsilon would exceed that of a variant on the same data which had a higher one."""
    after = {name: variant.epsilon for name, variant in public.items()}
    after |= {name: max(after[name], cost(group, name).guarantee.epsilon) for group in groups for name in group}
    for name in (name for group in groups for name in group):
        own = public[name]
        peers = [each for each in public.values() if each.data_sets == own.data_sets and each.epsilon > own.epsilon]
        if any(after[each.name] < after[name] for each in peers):
            return name
    return None

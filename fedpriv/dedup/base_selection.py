"""Which variant gives blocks to which: Algorithms 1 to 3 of Guan et al. 2025, and the rivals `multi` and `cross`.

Everything here is decided on public metadata: names, architectures, tags, data set ids, epsilons, bounds and
utilities. A utility measured on private data is a release of its own, charged by who measured it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fedpriv.dedup.composition import Claim, Guarantee, basic

Strategy = Literal["single", "multi", "cross"]
Fairness = Literal["bounds", "outcome"]
Reason = Literal["serves as a base", "no base meets its epsilon bound", "would overtake another variant's epsilon"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is publicly known of one stored variant.

    Attributes:
        name: unique.
        architecture: only variants of one architecture share blocks.
        data_sets: ids of the private data it was trained on.
        epsilon: >= 0, infinite without noise.
        delta: in [0, 1].
        utility: accuracy, in [0, 1].
        epsilon_bound: by how much epsilon may rise, >= 0.
        utility_bound: by how much utility may drop, >= 0.
        tags: of the task, the public data and the like, by which variants are clustered.

    Raises:
        ValueError: a value is out of range or NaN.
    """

    name: str
    architecture: str
    data_sets: frozenset[str]
    epsilon: float
    delta: float
    utility: float
    epsilon_bound: float
    utility_bound: float
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for field in ("epsilon", "epsilon_bound", "utility_bound"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} = {getattr(self, field)} of variant {self.name}: must be >= 0")
        for field in ("delta", "utility"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} = {getattr(self, field)} of variant {self.name}: must lie in [0, 1]")


Distance = Callable[[Variant, Variant], float]
"""How unlike two variants are by their metadata, >= 0, symmetric; infinite where they can share no block."""

Cost = Callable[[Variant, Sequence[Variant]], Guarantee]
"""What a variant costs that holds blocks of these original variants; more of them never cost less."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far deduplication may move one variant: the highest epsilon and the lowest utility."""

    epsilon: float
    utility: float


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A target with the bases whose blocks it may take, what it then costs, and its limits."""

    target: str
    bases: tuple[str, ...]
    guarantee: Guarantee
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Assignments by the target's name, why the other variants stay as they are, and the clusters.

    Assignments are in an order in which every base that is itself a target comes before those that use it.
    """

    assignments: Mapping[str, Assignment]
    untouched: Mapping[str, Reason]
    clusters: tuple[tuple[str, ...], ...]


def metadata_distance(one: Variant, other: Variant) -> float:
    """0 for the same private data, else the share of tags that only one has; infinite for other architectures."""
    if one.architecture != other.architecture:
        return math.inf
    if one.data_sets == other.data_sets:
        return 0.0
    tags = one.tags | other.tags
    return len(one.tags ^ other.tags) / len(tags) if tags else 1.0


def basic_cost(target: Variant, bases: Sequence[Variant]) -> Guarantee:
    """By adding epsilons (Theorem 4.1): the same data sum, disjoint data give the maximum."""
    return basic(
        Claim(name=each.name, data_sets=each.data_sets, epsilon=each.epsilon, delta=each.delta)
        for each in (target, *bases)
    )


def own_limits(variant: Variant) -> Limits:
    """The limits that its own bounds set."""
    return Limits(epsilon=variant.epsilon + variant.epsilon_bound, utility=variant.utility - variant.utility_bound)


def fair_limits(variant: Variant, variants: Iterable[Variant]) -> Limits:
    """Limits within which no variant overtakes another one on the same data, whatever becomes of the others.

    Epsilon may rise up to the next higher one and utility fall down to the next lower one, so neither order turns
    round; ties may arise. The paper cuts the epsilon bound to the distance to the next *lower* epsilon, which does not
    keep the order, since epsilons rise: of 1, 3 and 3.5 the second could become 4.

    Source: Guan et al. 2025, Section 4.2.1, "fairness rule".
    """
    own = own_limits(variant)
    peers = [other for other in variants if other.data_sets == variant.data_sets]
    return Limits(
        epsilon=min([own.epsilon, *(p.epsilon for p in peers if p.epsilon > variant.epsilon)]),
        utility=max([own.utility, *(p.utility for p in peers if p.utility < variant.utility)]),
    )


def cluster(variants: Sequence[Variant], distance: Distance, max_distance: float) -> list[list[Variant]]:
    """Variants in groups, no two of a group further apart than the maximum (hierarchical, complete linkage)."""
    groups = [[variant] for variant in variants]
    while len(groups) > 1:
        pairs = [(_linkage(groups[i], groups[j], distance), i, j) for j in range(len(groups)) for i in range(j)]
        apart, i, j = min(pairs)
        if apart > max_distance:
            break
        groups[i] += groups.pop(j)
    return [sorted(group, key=_by_epsilon) for group in groups]


def select_bases(
    variants: Iterable[Variant],
    *,
    strategy: Strategy = "single",
    fairness: Fairness = "bounds",
    distance: Distance = metadata_distance,
    max_distance: float = 0.5,
    cost: Cost = basic_cost,
) -> Selection:
    """Bases for every target, chosen greedily; a variant whose bound nothing meets is left as it is.

    Guarantee: no target's epsilon exceeds its own limit, on the same data no variant's epsilon overtakes another's,
    and no variant is, over any number of steps, its own base. Equal inputs give equal results, in whatever order.

    Args:
        variants: of distinct names.
        strategy: `single`, Algorithm 3: one base for each target, no base is a target. `multi`: bases are added while
            the bound lasts. `cross`: and a target may be another's base; it then brings all its originals with it.
        fairness: `bounds` cuts every limit by `fair_limits`, which holds whatever becomes of the others. `outcome`
            keeps each variant's own epsilon bound and gives up targets until no epsilon overtakes another: it can
            deduplicate variants whose epsilons are close and all rise by the same.
        distance: by metadata.
        max_distance: within a cluster.
        cost: that epsilon bounds are held against.

    Raises:
        ValueError: two variants of one name, or an unknown strategy or fairness.

    Source: Guan et al. 2025, Algorithms 1 to 3 and Section 5.1.2.
    """
    ordered = sorted(variants, key=_by_epsilon)
    if len({variant.name for variant in ordered}) < len(ordered):
        raise ValueError("variants: two have the same name")
    for name, value, known in (("strategy", strategy, get_args(Strategy)), ("fairness", fairness, get_args(Fairness))):
        if value not in known:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(known)}")
    groups = cluster(ordered, distance, max_distance)
    chooser = _Chooser(ordered, fairness, distance, cost)
    # As in Algorithm 3, before anything is chosen.
    dangling = [chooser.candidate_bases(group) for group in groups]
    for group, bases in zip(groups, dangling, strict=True):
        for target, candidates in _within(group, bases, strategy, chooser):
            chooser.choose(target, candidates, strategy)
    # Algorithm 3 looks in other clusters for unused dangling models only; a model that qualified for none of its own
    # cluster's bases, which costs that are not sums allow, is as much without one.
    pools = dangling if strategy == "single" else groups
    for group in groups:
        nearest = _from_nearest(group, groups, distance)
        for target, place in ((target, place) for target in group for place in nearest):
            if chooser.is_free(target):
                candidates = [v for v in pools[place] if v != target]
                chooser.choose(
                    target, [v for v in candidates if strategy == "cross" or not chooser.is_target(v)], strategy
                )
    overtaking = chooser.give_up_overtaking() if fairness == "outcome" else set()
    return chooser.selection(overtaking, groups)


class _Chooser:
    """Bases chosen so far, and what they make of every variant's epsilon."""

    def __init__(self, variants: Sequence[Variant], fairness: Fairness, distance: Distance, cost: Cost) -> None:
        self.by_name = {variant.name: variant for variant in variants}
        self.bases: dict[str, tuple[str, ...]] = {}
        self._known: dict[tuple[str, tuple[str, ...]], Guarantee] = {}
        self._distance, self._cost = distance, cost
        self._limits = {v.name: fair_limits(v, variants) for v in variants}
        if fairness == "outcome":
            self._limits = {
                v.name: Limits(epsilon=own_limits(v).epsilon, utility=self._limits[v.name].utility) for v in variants
            }

    def is_target(self, variant: Variant) -> bool:
        return variant.name in self.bases

    def is_used(self, variant: Variant) -> bool:
        return any(variant.name in bases for bases in self.bases.values())

    def is_free(self, variant: Variant) -> bool:
        return not self.is_target(variant) and not self.is_used(variant)

    def originals(self, names: Iterable[str]) -> set[str]:
        """The variants whose blocks may be in these, over any number of steps, and they themselves."""
        found = set(names)
        return found.union(*(self.originals(self.bases.get(name, ())) for name in found))

    def guarantee(self, target: Variant, bases: Iterable[str]) -> Guarantee:
        """What the target costs with these bases; never less than without."""
        originals = tuple(sorted(self.originals(bases) - {target.name}))
        if (key := (target.name, originals)) not in self._known:
            found = self._cost(target, [self.by_name[name] for name in originals])
            self._known[key] = Guarantee(
                epsilon=max(target.epsilon, found.epsilon), delta=max(target.delta, found.delta)
            )
        return self._known[key]

    def qualifies(self, target: Variant, bases: Iterable[str]) -> bool:
        """Equation 2, with <=: the paper's own scenarios meet their bounds with equality."""
        return self.guarantee(target, bases).epsilon <= self._limits[target.name].epsilon

    def candidate_bases(self, group: Sequence[Variant]) -> list[Variant]:
        """Algorithm 1: dangling variants, for which nothing in the group qualifies, and the one of least epsilon.

        The paper says that the latter always dangles; with a loose bound or disjoint data it does not.
        """
        return [
            variant
            for variant in group
            if variant == group[0] or not any(self.qualifies(variant, [o.name]) for o in group if o != variant)
        ]

    def choose(self, target: Variant, candidates: Iterable[Variant], strategy: Strategy) -> None:
        """Algorithm 2: least increase first, then least epsilon; beyond `single` further ones while the limit lasts."""

        def preference(base: Variant) -> tuple[float, float, float, str]:
            after = self.guarantee(target, [base.name])
            return after.epsilon, base.epsilon, self._distance(target, base), base.name

        chosen: list[str] = []
        for base in sorted((c for c in candidates if self._distance(target, c) < math.inf), key=preference):
            if not self.qualifies(target, [*chosen, base.name]):
                break
            chosen.append(base.name)
            if strategy == "single":
                break
        if chosen:
            self.bases[target.name] = tuple(chosen)

    def give_up_overtaking(self) -> set[str]:
        """Targets given up, one after another, until on the same data no epsilon is above a formerly higher one's."""
        given_up: set[str] = set()
        while overtaking := next(self._overtaking(), None):
            del self.bases[overtaking]
            given_up.add(overtaking)
        return given_up

    def _overtaking(self) -> Iterator[str]:
        after = {name: self.guarantee(variant, self.bases.get(name, ())) for name, variant in self.by_name.items()}
        for name, variant in self.by_name.items():
            above = [v for v in self.by_name.values() if v.data_sets == variant.data_sets]
            if any(v.epsilon > variant.epsilon and after[v.name].epsilon < after[name].epsilon for v in above):
                yield name

    def selection(self, given_up: set[str], groups: Sequence[Sequence[Variant]]) -> Selection:
        def reason(variant: Variant) -> Reason:
            if self.is_used(variant):
                return "serves as a base"
            overtook = variant.name in given_up
            return "would overtake another variant's epsilon" if overtook else "no base meets its epsilon bound"

        return Selection(
            assignments={
                name: Assignment(
                    target=name,
                    bases=bases,
                    guarantee=self.guarantee(self.by_name[name], bases),
                    limits=self._limits[name],
                )
                for name, bases in self.bases.items()
            },
            untouched={name: reason(v) for name, v in self.by_name.items() if not self.is_target(v)},
            clusters=tuple(tuple(variant.name for variant in group) for group in groups),
        )


def _within(
    group: Sequence[Variant], bases: Sequence[Variant], strategy: Strategy, chooser: _Chooser
) -> Iterator[tuple[Variant, Sequence[Variant]]]:
    """Targets of a group in turn, each with its candidates; read one by one, as choices are made between them."""
    if strategy == "single":
        yield from ((target, bases) for target in group if target not in bases)
    elif strategy == "multi":
        # From the highest epsilon down, so that the lowest, which cost least, become the bases.
        for target in reversed(group):
            if not chooser.is_used(target):
                yield target, [other for other in group if other != target and not chooser.is_target(other)]
    else:
        # From the lowest up: a base comes before who uses it, so no cycle can close.
        yield from ((target, group[:place]) for place, target in enumerate(group))


def _from_nearest(group: Sequence[Variant], groups: Sequence[Sequence[Variant]], distance: Distance) -> list[int]:
    """Places of all groups: its own first, then by similarity."""

    def apart(place: int) -> float:
        return -1.0 if groups[place] is group else _linkage(group, groups[place], distance)

    return sorted(range(len(groups)), key=apart)


def _linkage(one: Sequence[Variant], other: Sequence[Variant], distance: Distance) -> float:
    return max(distance(a, b) for a in one for b in other)


def _by_epsilon(variant: Variant) -> tuple[float, str]:
    return variant.epsilon, variant.name

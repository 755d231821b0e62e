"""Choice of base variants: Algorithms 1 to 3 of Guan et al. 2025, and the baselines `multi` and `cross`.

Every decision here uses public metadata only: names, architectures, tags, data set ids, epsilons, bounds and
utilities. A utility measured on private data is a release of its own and must be charged by the one who measured it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fedpriv.models.variants.composition import Guarantee

Strategy = Literal["single", "multi", "cross"]
"""The number of bases: one for each variant, several, or several which may themselves have bases."""

Fairness = Literal["bounds", "outcome"]
"""Ways to keep the order of epsilons: cut every bound, or give up variants that would overtake others."""

Reason = Literal["serves as a base", "no base meets its epsilon bound", "would overtake another variant's epsilon"]

MAX_DISTANCE = 0.5
"""The default in a cluster, by `metadata_distance`: one architecture, and the same private data or half of the tags."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The public metadata of one stored variant.

    Attributes:
        name: unique.
        architecture: variants of one architecture have tensors of the same names and shapes.
        data_sets: ids of the private data it was trained on.
        epsilon: >= 0, infinite without noise.
        delta: in [0, 1].
        utility: accuracy, in [0, 1], or minus the mean logarithm of the perplexity of responses.
        epsilon_bound: by how much epsilon may rise, >= 0.
        utility_bound: by how much utility may drop, >= 0.
        tags: describe the task, the public data and so on; used to cluster variants.

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
    utility_error: float = 0.0

    def __post_init__(self) -> None:
        for field in ("epsilon", "epsilon_bound", "utility_bound", "utility_error"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} = {getattr(self, field)} of variant {self.name}: must be >= 0")
        if not self.utility <= 1:
            raise ValueError(f"utility = {self.utility} of variant {self.name}: must be a number <= 1")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta = {self.delta} of variant {self.name}: must lie in [0, 1]")


Cost = Callable[[Candidate, Sequence[Candidate]], Guarantee]
"""The cost of a variant that holds blocks of these original variants; adding variants never lowers it."""


@dataclass(frozen=True, kw_only=True)
class VariantLimits:
    """The limits of deduplicating one variant: the highest epsilon and the lowest utility."""

    epsilon: float
    utility: float


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A target, the bases whose blocks it may take, what it then costs, and its limits."""

    target: str
    bases: tuple[str, ...]
    guarantee: Guarantee
    limits: VariantLimits


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Assignments by the target's name, the reason why each other variant stays as it is, and the clusters.

    Assignments are ordered so that a base that is itself a target comes before the targets that use it.
    """

    assignments: Mapping[str, Assignment]
    untouched: Mapping[str, Reason]
    clusters: tuple[tuple[str, ...], ...]


def metadata_distance(one: Candidate, other: Candidate) -> float:
    """A distance in [0, 2]: 0 on the same private data, else the share of different tags; 1 more across architectures.

    Blocks can be shared across architectures, but a base of the same one has nearer blocks.
    """
    apart = float(one.architecture != other.architecture)
    if one.data_sets == other.data_sets:
        return apart
    tags = one.tags | other.tags
    return apart + (len(one.tags ^ other.tags) / len(tags) if tags else 1.0)


def own_limits(variant: Candidate) -> VariantLimits:
    """The limits set by the variant's own bounds."""
    return VariantLimits(
        epsilon=variant.epsilon + variant.epsilon_bound, utility=variant.utility - variant.utility_bound
    )


def fair_limits(variant: Candidate, variants: Iterable[Candidate]) -> VariantLimits:
    """Limits within which no variant overtakes another on the same data, whatever happens to the others.

    Epsilon may rise to the next higher one, and utility may fall to the next lower one, so both orders are kept,
    possibly with ties. Utilities within the standard error of the variant's own are not told apart from it, so that
    what is worse by chance is not protected. The paper limits the rise by the distance to the next *lower* epsilon,
    which does not keep the order because epsilons rise: of 1, 3 and 3.5 the second could become 4.

    Source: Guan et al. 2025, Section 4.2.1, "fairness rule".
    """
    own = own_limits(variant)
    peers = [other for other in variants if other.data_sets == variant.data_sets]
    return VariantLimits(
        epsilon=min([own.epsilon, *(p.epsilon for p in peers if p.epsilon > variant.epsilon)]),
        utility=max([own.utility, *(p.utility for p in peers if p.utility < variant.utility - variant.utility_error)]),
    )


def cluster(variants: Sequence[Candidate], max_distance: float) -> list[list[Candidate]]:
    """Groups of variants in which no two are further apart than the maximum (hierarchical, complete linkage)."""
    groups = [[variant] for variant in variants]
    while len(groups) > 1:
        pairs = [(_linkage(groups[i], groups[j]), i, j) for j in range(len(groups)) for i in range(j)]
        smallest, i, j = min(pairs)
        if smallest > max_distance:
            break
        groups[i] += groups.pop(j)
    return [sorted(group, key=_by_epsilon) for group in groups]


def worthwhile_bases(num_variants: int) -> int:
    """The number of a group's variants that should be bases of the others, where further bases cost hardly any epsilon.

    Every base stays whole, so one more of them is one target less; the targets that are left find nearer blocks. By the
    measurements on smaller models a target saves 0 to 15 % more with every doubling of its bases. Taken as
    10 %, what k bases save is (num_variants - k)(1 + 0.1 log2 k), and this is the k that saves most.

    Args:
        num_variants: in the group, >= 1.
    """
    return max(range(1, max(num_variants, 2)), key=lambda k: ((num_variants - k) * (1 + 0.1 * math.log2(k)), -k))


def select_bases(
    variants: Iterable[Candidate],
    cost: Cost,
    *,
    strategy: Strategy = "single",
    fairness: Fairness = "bounds",
    max_distance: float = MAX_DISTANCE,
    most_bases: Callable[[int], int] | None = None,
    stored: Mapping[str, bool] | None = None,
) -> Selection:
    """Bases for every target, chosen greedily; a variant is left as it is if no base meets its bound.

    Guarantee: no target's epsilon exceeds its own limit, no variant's epsilon overtakes another's on the same data,
    and no variant is its own base, directly or indirectly. The result does not depend on the order of the variants.

    Args:
        variants: with distinct names.
        cost: compared with the epsilon bounds.
        strategy: `single`, Algorithm 3: one base for each target, and no base is a target. `multi`: bases are added
            as long as the bound is met. `cross`: in addition, a target may serve as a base and then brings all its
            originals with it.
        fairness: `bounds` tightens every limit by `fair_limits`, which holds whatever happens to the others.
            `outcome` keeps each variant's own epsilon bound and drops targets until no epsilon overtakes another: it
            can deduplicate variants whose epsilons are close and all rise by the same amount.
        most_bases: for `multi`, how many bases a cluster of so many variants may have; by default as many as the bounds
            allow, as in the paper.
        stored: {variant that stays as it is stored: whether it is whole}. The others arrive later: each looks for bases
            among those that are whole and those of its batch that found none (section 6, Algorithm 2).

    Raises:
        ValueError: two variants have the same name, or the strategy or fairness is unknown.

    Source: Guan et al. 2025, Algorithms 1 to 3 and Section 5.1.2.
    """
    ordered, stored = sorted(variants, key=_by_epsilon), stored or {}
    if len({variant.name for variant in ordered}) < len(ordered):
        raise ValueError("variants: two have the same name")
    for name, value, known in (("strategy", strategy, get_args(Strategy)), ("fairness", fairness, get_args(Fairness))):
        if value not in known:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(known)}")
    groups = cluster(ordered, max_distance)
    chooser = _Chooser(ordered, fairness, cost)
    most = [most_bases(len(group)) if most_bases and strategy == "multi" else len(ordered) for group in groups]
    # Computed before any choice is made, as in Algorithm 3.
    dangling = [chooser.candidate_bases(group) for group in groups]
    for group, bases, limit in zip(groups, dangling, most, strict=True):
        for target, candidates in (
            _arriving(group, bases, stored, chooser) if stored else _within(group, bases, strategy, chooser, limit)
        ):
            chooser.choose(target, candidates, strategy, limit)
    # Algorithm 3 searches other clusters for unused dangling models only. Where costs are not sums, a model may also
    # find no base within its own cluster, and is treated in the same way.
    pools = dangling if stored or strategy == "single" else groups
    for group, limit in zip(groups, most, strict=True):
        # The group itself first, then from the nearest to the farthest.
        by_distance = sorted(
            range(len(groups)), key=lambda i: -1.0 if groups[i] is group else _linkage(group, groups[i])
        )
        for target, index in ((target, index) for target in group for index in by_distance):
            if chooser.is_free(target) and target.name not in stored:
                candidates = [v for v in pools[index] if v != target]
                untaken = [v for v in candidates if strategy == "cross" or not chooser.is_target(v)]
                chooser.choose(target, untaken, strategy, limit)
    dropped = chooser.drop_overtaking() if fairness == "outcome" else set()
    return chooser.selection(dropped, groups)


class _Chooser:
    """The bases chosen so far, and the epsilon of every variant that results from them."""

    def __init__(self, variants: Sequence[Candidate], fairness: Fairness, cost: Cost) -> None:
        self.by_name = {variant.name: variant for variant in variants}
        self.bases: dict[str, tuple[str, ...]] = {}
        self._guarantees: dict[tuple[str, tuple[str, ...]], Guarantee] = {}
        self._cost = cost
        self._limits = {v.name: fair_limits(v, variants) for v in variants}
        if fairness == "outcome":
            self._limits |= {v.name: replace(self._limits[v.name], epsilon=own_limits(v).epsilon) for v in variants}

    def is_target(self, variant: Candidate) -> bool:
        return variant.name in self.bases

    def is_used(self, variant: Candidate) -> bool:
        return any(variant.name in bases for bases in self.bases.values())

    def is_free(self, variant: Candidate) -> bool:
        return not self.is_target(variant) and not self.is_used(variant)

    def originals(self, names: Iterable[str]) -> set[str]:
        """These variants and all whose blocks they may hold, directly or indirectly."""
        distinct = set(names)
        return distinct.union(*(self.originals(self.bases.get(name, ())) for name in distinct))

    def guarantee(self, target: Candidate, bases: Iterable[str]) -> Guarantee:
        """The cost of the target with these bases; never less than without them."""
        originals = tuple(sorted(self.originals(bases) - {target.name}))
        if (key := (target.name, originals)) not in self._guarantees:
            cost = self._cost(target, [self.by_name[name] for name in originals])
            self._guarantees[key] = Guarantee(
                epsilon=max(target.epsilon, cost.epsilon), delta=max(target.delta, cost.delta)
            )
        return self._guarantees[key]

    def qualifies(self, target: Candidate, bases: Iterable[str]) -> bool:
        """Equation 2 with <= instead of <, since the paper's own scenarios meet their bounds with equality."""
        return self.guarantee(target, bases).epsilon <= self._limits[target.name].epsilon

    def candidate_bases(self, group: Sequence[Candidate]) -> list[Candidate]:
        """Algorithm 1: dangling variants, for which no base in the group qualifies, and the one of least epsilon.

        The paper says that the latter is always dangling; with a loose bound or disjoint data it is not.
        """
        return [
            variant
            for variant in group
            if variant == group[0] or not any(self.qualifies(variant, [o.name]) for o in group if o != variant)
        ]

    def choose(self, target: Candidate, candidates: Iterable[Candidate], strategy: Strategy, most: int) -> None:
        """Algorithm 2: least increase first, then least epsilon; except in `single`, more bases within the limits."""

        def preference(base: Candidate) -> tuple[float, float, float, str]:
            increased = self.guarantee(target, [base.name])
            return increased.epsilon, base.epsilon, metadata_distance(target, base), base.name

        chosen: list[str] = []
        for base in sorted(candidates, key=preference):
            if not self.qualifies(target, [*chosen, base.name]):
                break
            chosen.append(base.name)
            if strategy == "single" or len(chosen) == most:
                break
        if chosen:
            self.bases[target.name] = tuple(chosen)

    def drop_overtaking(self) -> set[str]:
        """The targets dropped, one by one, until no epsilon exceeds a formerly higher one on the same data."""
        dropped: set[str] = set()
        while overtaking := next(self._overtaking(), None):
            del self.bases[overtaking]
            dropped.add(overtaking)
        return dropped

    def _overtaking(self) -> Iterator[str]:
        after = {name: self.guarantee(variant, self.bases.get(name, ())) for name, variant in self.by_name.items()}
        for name, variant in self.by_name.items():
            peers = [v for v in self.by_name.values() if v.data_sets == variant.data_sets]
            if any(v.epsilon > variant.epsilon and after[v.name].epsilon < after[name].epsilon for v in peers):
                yield name

    def selection(self, dropped: set[str], groups: Sequence[Sequence[Candidate]]) -> Selection:
        def reason(variant: Candidate) -> Reason:
            if self.is_used(variant):
                return "serves as a base"
            overtook = variant.name in dropped
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
    group: Sequence[Candidate], bases: Sequence[Candidate], strategy: Strategy, chooser: _Chooser, most: int
) -> Iterator[tuple[Candidate, Sequence[Candidate]]]:
    """The targets of a group in turn, each with its candidates; lazy, because choices are made in between."""
    if strategy == "single":
        yield from ((target, bases) for target in group if target not in bases)
    elif strategy == "multi":
        # From the highest epsilon down, so that the variants of lowest epsilon, which cost least, become the bases.
        for target in reversed(group):
            used = [other for other in group if chooser.is_used(other)]
            if target not in used:
                others = used if len(used) >= most else group
                yield target, [other for other in others if other != target and not chooser.is_target(other)]
    else:
        # From the lowest up: a base comes before the targets that use it, so no cycle can arise.
        yield from ((target, group[:index]) for index, target in enumerate(group))


def _arriving(
    group: Sequence[Candidate], whole: list[Candidate], stored: Mapping[str, bool], chooser: _Chooser
) -> Iterator[tuple[Candidate, Sequence[Candidate]]]:
    """The variants of a group that arrive later, each with those that are whole by then, which `whole` becomes."""
    whole[:] = [variant for variant in group if stored.get(variant.name)]
    for target in group:
        if target.name not in stored:
            yield target, whole
            whole += [] if chooser.is_target(target) else [target]


def _linkage(one: Sequence[Candidate], other: Sequence[Candidate]) -> float:
    return max(metadata_distance(a, b) for a in one for b in other)


def _by_epsilon(variant: Candidate) -> tuple[float, str]:
    return variant.epsilon, variant.name

"""What a deduplicated variant costs, by three compositions, the tightest of which is used.

`basic` adds epsilons (Guan et al. 2025, Theorem 4.1). `accountant` composes the variants' histories as events.
`provenance` composes each release once, however many variants descend from it. docs/deduplication.md says why each
holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, TypeVar, get_args

from fedpriv.accounting.accountants import check_delta, spent
from fedpriv.accounting.events import EpsilonDelta, Event, PureEpsilon, group
from fedpriv.accounting.law import Accountant
from fedpriv.accounting.views import Release, View
from fedpriv.ledger.entries import Key

Method = Literal["basic", "accountant", "provenance"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An (epsilon, delta)-DP guarantee."""

    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is stated of one model: it is (epsilon, delta)-DP on each of its data sets.

    Attributes:
        name: of the model; the same name is the same model.
        data_sets: ids of what it was trained on; two models' data overlap where they share an id.
        epsilon: >= 0, may be infinite.
        delta: in [0, 1].
    """

    name: str
    data_sets: frozenset[str]
    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One release on one data set: the node of the release graph.

    Attributes:
        data_set: whose records it was computed from, and who pays.
        run, round, request: which upload it is, as in the ledger's key.
        event: what it costs.
    """

    data_set: str
    run: str
    round: int
    event: Event
    request: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What makes it this release and no other."""
        return self.data_set, self.run, self.round, self.request


@dataclass(frozen=True, kw_only=True)
class History:
    """What a variant that was consulted is a function of: its ancestors, or where these are unknown its events.

    Attributes:
        name: of the variant; the same name is the same variant.
        ancestors: all uploads that it is a function of. Closed: with an upload come the ones that it was computed
            after, as `global_ancestors` and `client_ancestors` give them. None where they are unknown.
        events: {data set: what its training released}, for a variant without known ancestors.

    Raises:
        ValueError: both are given.
    """

    name: str
    ancestors: frozenset[Upload] | None = None
    events: Mapping[str, tuple[Event, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ancestors is not None and self.events:
            raise ValueError(f"variant {self.name}: its events follow from its ancestors; give one of the two")

    @property
    def data_sets(self) -> frozenset[str]:
        """The data sets that it was computed from."""
        return frozenset(self.events) | {upload.data_set for upload in self.ancestors or ()}

    def events_on(self, data_sets: frozenset[str]) -> list[Event]:
        """Its events on any of the data sets."""
        return [event for id_ in sorted(data_sets) for event in self._by_data_set.get(id_, ())]

    @cached_property
    def _by_data_set(self) -> Mapping[str, Sequence[Event]]:
        return self.events if self.ancestors is None else _by_data_set(self.ancestors)


@dataclass(frozen=True, kw_only=True)
class DataSetCost:
    """What publishing costs the records of one data set.

    Attributes:
        data_sets: one id, or several that may share records.
        delta: at which every epsilon holds.
        epsilons: {method: epsilon}, of the methods that hold.
        used: the one with the smallest epsilon.
    """

    data_sets: tuple[str, ...]
    delta: float
    epsilons: Mapping[Method, float]
    used: Method

    @property
    def guarantee(self) -> Guarantee:
        """By the method that is used."""
        return Guarantee(epsilon=self.epsilons[self.used], delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class PublicationCost:
    """What publishing costs every data set.

    Attributes:
        by_data_set: one for each, in the order of their ids.
        refused: {method: why it does not hold}.
    """

    by_data_set: tuple[DataSetCost, ...]
    refused: Mapping[Method, str]

    @property
    def guarantee(self) -> Guarantee:
        """For every record, in whichever data set it is: disjoint data compose by their maxima (Theorem 2.2)."""
        found = [cost.guarantee for cost in self.by_data_set]
        return Guarantee(
            epsilon=max((each.epsilon for each in found), default=0.0),
            delta=max((each.delta for each in found), default=0.0),
        )


_Named = TypeVar("_Named", Claim, History)


def basic(claims: Iterable[Claim]) -> Guarantee:
    """The guarantee of whatever is made of these models, by adding what is stated of each.

    The same model counts once, models on the same data add up, models on disjoint data give the maximum; where data
    overlap, a connected component of models adds up, and the largest component counts.

    Raises:
        ValueError: two different claims for one name.

    Source: Guan et al. 2025, Theorem 4.1 and its generalisation.
    """
    distinct = list(_by_name(claims).values())
    sums = []
    for data_sets in united(claim.data_sets for claim in distinct):
        component = [claim for claim in distinct if claim.data_sets & data_sets]
        sums.append((math.fsum(c.epsilon for c in component), math.fsum(c.delta for c in component)))
    epsilons, deltas = zip(*sums, strict=True) if sums else ((), ())
    return Guarantee(epsilon=max(epsilons, default=0.0), delta=min(1.0, max(deltas, default=0.0)))


def publication_cost(
    consulted: Iterable[History],
    deltas: Mapping[str, float],
    *,
    extra: Mapping[str, Sequence[Event]] | None = None,
    overlapping: Iterable[frozenset[str]] = (),
    accountant: Accountant = "pld",
) -> PublicationCost:
    """What it costs each data set to publish anything that is computed from the variants, one of them or all.

    Args:
        consulted: every variant that had a say: those published, their bases, and those that were only compared,
            clustered or passed over.
        deltas: {data set: in (0, 1)}; all methods are compared at it. `basic` divides it among the histories.
        extra: {data set: what is released besides}: private validation, saliency on private data, private utilities.
        overlapping: ids that may share records, whose events then all count for each.
        accountant: that composes events.

    Raises:
        ValueError: a data set without a delta, two different variants of one name or uploads of one key, events of
            different units, or an event that no accountant knows.
    """
    histories = list(_by_name(consulted).values())
    besides = extra or {}
    union, refusal = _union(histories)
    of_union = _by_data_set(union)
    ids = frozenset(besides).union(*(history.data_sets for history in histories))
    costs = []
    for united_ids in united([*(frozenset({id_}) for id_ in sorted(ids)), *(overlap & ids for overlap in overlapping)]):
        delta = _smallest_delta(united_ids, deltas)
        extras = [event for id_ in sorted(united_ids) for event in besides.get(id_, ())]
        parts = [part for part in [*(history.events_on(united_ids) for history in histories), extras] if part]
        epsilons: dict[Method, float] = {
            "basic": _basic_epsilon(parts, delta, accountant),
            "accountant": _epsilon([event for part in parts for event in part], delta, accountant),
        }
        if refusal is None:
            of_these = [event for id_ in sorted(united_ids) for event in of_union.get(id_, ())]
            epsilons["provenance"] = _epsilon([*of_these, *extras], delta, accountant)
        used = min(epsilons, key=lambda method: epsilons[method])
        costs.append(DataSetCost(data_sets=tuple(sorted(united_ids)), delta=delta, epsilons=epsilons, used=used))
    return PublicationCost(
        by_data_set=tuple(sorted(costs, key=lambda cost: cost.data_sets)),
        refused={} if refusal is None else {"provenance": refusal},
    )


def global_ancestors(
    uploads: Iterable[Upload], run: str, round_: int, warm_start: frozenset[Upload] = frozenset()
) -> frozenset[Upload]:
    """What a run's global model after a round is a function of: every upload up to it, and its start's ancestors."""
    return warm_start | {upload for upload in uploads if upload.run == run and upload.round <= round_}


def client_ancestors(
    uploads: Iterable[Upload], run: str, round_: int, data_set: str, warm_start: frozenset[Upload] = frozenset()
) -> frozenset[Upload]:
    """What a client's own variant of a round is a function of: every upload before it, and its own one of the round."""
    of_run = [upload for upload in uploads if upload.run == run]
    own = {upload for upload in of_run if upload.round == round_ and upload.data_set == data_set}
    return warm_start | own | {upload for upload in of_run if upload.round < round_}


def uploads_of(data_set: str, charged: Iterable[tuple[Key, Release]], view: View = "local") -> list[Upload]:
    """A data set's uploads from what `Ledger.releases_of` gives, each with its event on the view.

    Raises:
        ValueError: the view does not hold for one of them.
    """
    return [
        Upload(data_set=data_set, run=key.run, round=key.round, request=key.request, event=release.seen_by(view))
        for key, release in charged
    ]


def united(sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Sets of ids with those that overlap, directly or by others, made one; no id is in two of them."""
    apart: list[frozenset[str]] = []
    for ids in sets:
        touching = [other for other in apart if other & ids]
        apart = [other for other in apart if not other & ids]
        if ids:
            apart.append(ids.union(*touching))
    return apart


def _union(histories: Sequence[History]) -> tuple[frozenset[Upload], str | None]:
    """All ancestors of all variants, each once, and why that is not known."""
    unknown = [history.name for history in histories if history.ancestors is None]
    if unknown:
        return frozenset(), f"the ancestors of {', '.join(sorted(unknown))} are unknown"
    union = frozenset[Upload]().union(*(history.ancestors or () for history in histories))
    if len({upload.key for upload in union}) < len(union):
        raise ValueError("ancestors: two uploads of one data set, run, round and request cost different events")
    return union, None


def _by_data_set(uploads: Iterable[Upload]) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    for upload in uploads:
        events.setdefault(upload.data_set, []).append(upload.event)
    return events


def _epsilon(events: Iterable[Event], delta: float, accountant: Accountant) -> float:
    """What the composition of events costs; a federation asks it of few different ones, but for every pair."""
    return _epsilon_of(frozenset(group(events)), delta, accountant)


@lru_cache(maxsize=4096)
def _epsilon_of(events: frozenset[Event], delta: float, accountant: Accountant) -> float:
    return spent(events, delta, accountant).epsilon


def _basic_epsilon(parts: Sequence[Sequence[Event]], delta: float, accountant: Accountant) -> float:
    """Sum of the parts' epsilons; stated guarantees keep their deltas, the others share what is left of it."""
    stated = [part for part in parts if all(isinstance(event, (EpsilonDelta, PureEpsilon)) for event in part)]
    others = [part for part in parts if part not in stated]
    left = delta - math.fsum(e.count * e.delta for part in stated for e in part if isinstance(e, EpsilonDelta))
    if left < -1e-9 * delta or (others and left <= 0):  # rounding in a sum of deltas is no excess
        return math.inf
    epsilons = [e.count * e.epsilon for part in stated for e in part if isinstance(e, (EpsilonDelta, PureEpsilon))]
    return math.fsum(epsilons + [_epsilon(part, left / len(others), accountant) for part in others])


def _smallest_delta(group: frozenset[str], deltas: Mapping[str, float]) -> float:
    if missing := sorted(group - set(deltas)):
        raise ValueError(f"deltas: none for data set {missing[0]}; an epsilon without its delta means nothing")
    delta = min(deltas[id_] for id_ in group)
    check_delta(delta)
    return delta


def _by_name(given: Iterable[_Named]) -> dict[str, _Named]:
    found: dict[str, _Named] = {}
    for each in given:
        if found.setdefault(each.name, each) != each:
            raise ValueError(f"name = {each.name!r}: two different models have it")
    return found

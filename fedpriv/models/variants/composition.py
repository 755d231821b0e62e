"""The cost of a deduplicated variant, by the tightest of three compositions.

`basic` adds epsilons (Guan et al. 2025, Theorem 4.1). `accountant` composes the variants' histories as events.
`provenance` composes each release once, however many variants descend from it. docs/appendices/variant_cost.md shows
why each of them holds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import check_delta, epsilon_of
from fedpriv.privacy.accounting.events import Event, group
from fedpriv.privacy.accounting.law import Accountant
from fedpriv.privacy.accounting.many_clients import sets_of_holders
from fedpriv.privacy.accounting.views import Release, View
from fedpriv.privacy.ledger import reader, statement
from fedpriv.privacy.ledger.entries import Key

Method = Literal["basic", "accountant", "provenance"]


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An (epsilon, delta)-DP guarantee."""

    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One release on one data set: a node of the release graph.

    Attributes:
        data_set: that it was computed from, and that pays for it.
        run, round, request: identify the upload, as in the ledger's key.
        event: what it costs.
    """

    data_set: str
    run: str
    round: int
    event: Event
    request: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Identifies the release."""
        return self.data_set, self.run, self.round, self.request


@dataclass(frozen=True, kw_only=True)
class History:
    """The sources of a consulted variant: its ancestors or, if these are unknown, its events.

    Attributes:
        name: of the variant; equal names mean the same variant.
        ancestors: all uploads that it is a function of. The set is closed: it contains every upload that its members
            were computed from, as in the results of `server.registry`. None if unknown; an
            empty set states that no one's records went into it.
        events: {data set: what training released}, for a variant whose ancestors are unknown.
        holders: h >= 1, in how many of the data sets one person may have records.

    Raises:
        ValueError: both are given.
    """

    name: str
    ancestors: frozenset[Upload] | None = None
    events: Mapping[str, tuple[Event, ...]] = field(default_factory=dict)
    holders: int = 1

    def __post_init__(self) -> None:
        if self.ancestors is not None and self.events:
            raise ValueError(f"variant {self.name}: its events follow from its ancestors; give one of the two")

    @property
    def is_unknown(self) -> bool:
        """Whether nothing says what it was computed from, so that nothing bounds what it cost whom."""
        return self.ancestors is None and not self.events

    @property
    def data_sets(self) -> frozenset[str]:
        """The data sets that the variant was computed from."""
        return frozenset(self.events) | {upload.data_set for upload in self.ancestors or ()}

    def events_on(self, data_sets: frozenset[str]) -> list[Event]:
        """The variant's events on any of the data sets."""
        return [event for id_ in sorted(data_sets) for event in self._by_data_set.get(id_, ())]

    @cached_property
    def _by_data_set(self) -> Mapping[str, Sequence[Event]]:
        return self.events if self.ancestors is None else _by_data_set(self.ancestors)


@dataclass(frozen=True, kw_only=True)
class _DataSetCost:
    """The cost of publishing for the records of one data set.

    Attributes:
        data_sets: one id, or several that may share records or a person.
        delta: at which every epsilon holds.
        epsilons: {method: epsilon}, for the methods that hold.
        used: the method with the smallest epsilon.
    """

    data_sets: tuple[str, ...]
    delta: float
    epsilons: Mapping[Method, float]
    used: Method

    @property
    def guarantee(self) -> Guarantee:
        """The epsilon by the method used."""
        return Guarantee(epsilon=self.epsilons[self.used], delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class PublicationCost:
    """The cost of publishing for every data set.

    Attributes:
        by_data_set: one for each, in the order of their ids.
        refused: {method: why it does not hold}.
        is_unknown: whether nothing says what one of the variants was computed from: then every epsilon is infinite.
    """

    by_data_set: tuple[_DataSetCost, ...]
    refused: Mapping[Method, str]
    is_unknown: bool = False

    @property
    def guarantee(self) -> Guarantee:
        """For every record of any data set: parallel composition over disjoint data takes maxima (Theorem 2.2)."""
        guarantees = [cost.guarantee for cost in self.by_data_set]
        return Guarantee(
            epsilon=math.inf if self.is_unknown else max((each.epsilon for each in guarantees), default=0.0),
            delta=max((each.delta for each in guarantees), default=0.0),
        )


def publication_cost(
    consulted: Iterable[History],
    deltas: Mapping[str, float],
    *,
    extra: Mapping[str, Sequence[Event]] | None = None,
    overlapping: Iterable[frozenset[str]] = (),
    accountant: Accountant = "pld",
) -> PublicationCost:
    """The cost, for each data set, of publishing anything computed from some or all of the variants.

    Where a person may be in several, it is that of each set of so many data sets that may cost a person most. A variant
    of unknown origin may hold the records of any data set, which makes every epsilon infinite.

    Args:
        consulted: every variant that had an influence: those published, their bases, and those that were only
            compared, clustered or passed over.
        deltas: {data set: in (0, 1)}, at which all methods are compared. `basic` divides it among the histories.
        extra: {data set: further releases}: private validation, saliency on private data, private utilities.
        overlapping: sets of ids that may share records; the events of all ids in a set count for each of them.

    Raises:
        ValueError: a data set has no delta, two different variants have one name, two different uploads have one key,
            events have different units, or no accountant knows an event.
    """
    histories = list(_by_name(consulted).values())
    extra = extra or {}
    union, refusal = _union(histories)
    is_unknown = any(history.is_unknown for history in histories)
    union_events = _by_data_set(union)
    ids = frozenset(extra).union(*(history.data_sets for history in histories))
    costs = []
    groups = _merge_overlapping([*(frozenset({id_}) for id_ in sorted(ids)), *(ids & each for each in overlapping)])
    if (holders := max((history.holders for history in histories), default=1)) > 1 and ids:
        # Which cost most is known of one composition, so the others say nothing of these sets.
        known = union_events if refusal is None else {id_: events_on(id_, histories) for id_ in ids}
        of_ids = {id_: [*known.get(id_, ()), *extra.get(id_, ())] for id_ in sorted(ids)}
        groups = [frozenset(names) for names in sets_of_holders(of_ids, holders)] if len(groups) == len(ids) else [ids]
    for merged in groups:
        delta = _smallest_delta(merged, deltas)
        extra_events = [event for id_ in sorted(merged) for event in extra.get(id_, ())]
        parts = [part for part in [*(history.events_on(merged) for history in histories), extra_events] if part]
        epsilons: dict[Method, float] = {}
        if holders == 1:
            epsilons["basic"] = _basic_epsilon(parts, delta, accountant)
        if holders == 1 or refusal is not None:
            epsilons["accountant"] = _epsilon([event for part in parts for event in part], delta, accountant)
        if refusal is None:
            released_once = [event for id_ in sorted(merged) for event in union_events.get(id_, ())]
            epsilons["provenance"] = _epsilon([*released_once, *extra_events], delta, accountant)
        if is_unknown:
            epsilons = dict.fromkeys(epsilons, math.inf)
        used = min(epsilons, key=lambda method: epsilons[method])
        costs.append(_DataSetCost(data_sets=tuple(sorted(merged)), delta=delta, epsilons=epsilons, used=used))
    return PublicationCost(
        by_data_set=tuple(sorted(costs, key=lambda cost: cost.data_sets)),
        refused={} if refusal is None else {"provenance": refusal},
        is_unknown=is_unknown,
    )


def uploads_of(data_set: str, charged: Iterable[tuple[Key, Release]], view: View = "local") -> list[Upload]:
    """A data set's uploads from `Ledger.releases_of`, with their events; ValueError where the view does not hold."""
    return [
        Upload(data_set=data_set, run=key.run, round=key.round, request=key.request, event=release.seen_by(view))
        for key, release in charged
    ]


def _merge_overlapping(sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """The sets of ids, with those that overlap, directly or through others, merged; the results are disjoint."""
    disjoint: list[frozenset[str]] = []
    for ids in sets:
        touching = [other for other in disjoint if other & ids]
        disjoint = [other for other in disjoint if not other & ids]
        if ids:
            disjoint.append(ids.union(*touching))
    return disjoint


def _union(histories: Sequence[History]) -> tuple[frozenset[Upload], str | None]:
    """All ancestors of all variants, each once; and the reason if they are not known."""
    unknown = [history.name for history in histories if history.ancestors is None]
    if unknown:
        return frozenset(), f"the ancestors of {', '.join(sorted(unknown))} are unknown"
    union = frozenset[Upload]().union(*(history.ancestors or () for history in histories))
    if len({upload.key for upload in union}) < len(union):
        raise ValueError("ancestors: two uploads of one data set, run, round and request cost different events")
    return union, None


def events_on(data_set: str, histories: Iterable[History]) -> list[Event]:
    """All events of the histories on a data set, one that occurs in several of them as often."""
    return [event for history in histories for event in history.events_on(frozenset({data_set}))]


def _by_data_set(uploads: Iterable[Upload]) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    for upload in uploads:
        events.setdefault(upload.data_set, []).append(upload.event)
    return events


def _epsilon(events: Iterable[Event], delta: float, accountant: Accountant) -> float:
    """Epsilon of the composed events, cached: a federation has few distinct histories, but compares every pair."""
    return _epsilon_of(frozenset(group(events)), delta, accountant)


@lru_cache(maxsize=4096)
def _epsilon_of(events: frozenset[Event], delta: float, accountant: Accountant) -> float:
    return epsilon_of(events, delta, accountant).epsilon


def _basic_epsilon(parts: Sequence[Sequence[Event]], delta: float, accountant: Accountant) -> float:
    """Sum of the parts' epsilons; stated guarantees keep their deltas, the other parts share the rest of delta."""
    stated = [p for p in parts if not any(e.effective_noise_multiplier > 0 or math.isinf(e.max_loss) for e in p)]
    others = [part for part in parts if part not in stated]
    remaining_delta = delta - math.fsum(event.total_delta for part in stated for event in part)
    # A rounding error in a sum of deltas does not count as an excess.
    if remaining_delta < -1e-9 * delta or (others and remaining_delta <= 0):
        return math.inf
    epsilons = [event.max_loss for part in stated for event in part]
    return math.fsum(epsilons + [_epsilon(part, remaining_delta / len(others), accountant) for part in others])


def smallest_deltas(stated: Iterable[tuple[str, float]]) -> dict[str, float]:
    """{data set: the smallest of the deltas that are stated for it}."""
    found: dict[str, float] = {}
    for id_, delta in stated:
        found[id_] = min(delta, found.get(id_, delta))
    return found


def _smallest_delta(group: frozenset[str], deltas: Mapping[str, float]) -> float:
    if missing := sorted(group - set(deltas)):
        raise ValueError(f"deltas: none for data set {missing[0]}; an epsilon without its delta means nothing")
    delta = min(deltas[id_] for id_ in group)
    check_delta(delta)
    return delta


def _by_name(given: Iterable[History]) -> dict[str, History]:
    by_name: dict[str, History] = {}
    for each in given:
        if by_name.setdefault(each.name, each) != each:
            raise ValueError(f"name = {each.name!r}: two different models have it")
    return by_name


def charged(path: Path, client: str) -> tuple[frozenset[Upload], dict[str, float]]:
    """All releases of the runs that a client took part in, and {data set: its delta}; InputError if there are none."""
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        own = statement.of_client(db, path, client, reader.holder_names(db, path, None))
        known = {data_set.id: data_set for data_set in db.data_sets()}
        runs = {record.run for data_set in own for record in db.runs(data_set.id)}
        uploads = [each for run in runs for id_ in known for each in uploads_of(id_, db.releases_of(id_, run))]
        deltas = {each.data_set: known[each.data_set].delta for each in uploads}
        lost = [id_ for id_ in deltas if not db.is_known_in_full(id_)]
        seeded = [r.run for id_ in deltas for r in db.runs(id_) if r.run in runs and r.noise_source != "secure"]
    if lost:
        raise InputError(f"ledger = {str(path)!r}: lacks releases of data set {lost[0]}, so no epsilon follows from it")
    if seeded:
        raise InputError(f"ledger = {str(path)!r}: the noise of run {seeded[0]} was seeded, which protects nobody")
    if not uploads:
        raise InputError(f"client = {client!r}: {path} has no release of this client; --public is for public data")
    return frozenset(uploads), deltas

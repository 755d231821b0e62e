"""Every client's account: its releases, in this run and before, and their cost on each view."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from fedpriv.privacy.accounting.accountants import PrivacySpent, check_delta, epsilon_of, stays_within
from fedpriv.privacy.accounting.events import Event, group
from fedpriv.privacy.accounting.law import Accountant
from fedpriv.privacy.accounting.many_clients import bound_of_person, cost_of_person, epsilons, without_size
from fedpriv.privacy.accounting.risk import Risk, risk_of_person, risks_of
from fedpriv.privacy.accounting.views import VIEWS, Release, View, default_delta

# Up to this many different histories are each accounted by pld, at about 0.3 s.
_MAX_PLD_HISTORIES = 32

Part = Literal["whole", "this run", "before"]
"""The part of an account: all of it, the releases of this run alone, or those of earlier runs alone."""


class Accounts:
    """The releases of every client; they may only grow.

    Args:
        num_records: {client: registered N_k}.
        delta: for every client; None gives each client its default, 1/(10 N_k) and at most 1e-5.
        earlier: {client: releases of earlier runs on the same records}.
        holders: at how many of the clients a person may have records, at most as many as there are.
    """

    def __init__(
        self,
        num_records: Mapping[int, int],
        delta: float | None = None,
        earlier: Mapping[int, Sequence[Release]] | None = None,
        holders: int = 1,
    ) -> None:
        if delta is not None:
            check_delta(delta)
        self.deltas = {client: delta or default_delta(size) for client, size in num_records.items()}
        # Of the clients that have released anything: of many that are registered, a round asks few.
        self._earlier = {client: _History(releases) for client, releases in (earlier or {}).items() if releases}
        self._own: dict[int, _History] = {}
        self._holders = holders
        self._risks: dict[View, dict[int, Risk | None]] = {}

    def record(self, client: int, release: Release) -> None:
        """Charge the client for a release.

        Raises:
            KeyError: the client is not registered.
        """
        if client not in self.deltas:
            raise KeyError(client)
        self._own.setdefault(client, _History()).add(release)
        self._risks = {}

    def num_releases(self, client: int) -> int:
        """The number of releases of this run that the client was charged for."""
        return self._own[client].num_releases if client in self._own else 0

    def spenders(self, part: Part = "whole") -> set[int]:
        """The clients that have released something in a part of their accounts; all others have spent nothing."""
        before = set[int]() if part == "this run" else set(self._earlier)
        return before if part == "before" else before | self._own.keys()

    def epsilon_of(
        self, client: int, view: View, accountant: Accountant, *, part: Part = "whole"
    ) -> PrivacySpent | None:
        """The cost of a part of the client's account so far on the view.

        None on the `aggregate` view if it does not hold for one of them. Composed first, converted once.
        """
        histories = self._histories(client, part)
        if not all(history.holds[view] for history in histories):
            return None
        if len(histories) == 1:
            return _cost(histories[0].merged(view), self.deltas[client], accountant)
        return _cost(frozenset(group(_events(histories, view))), self.deltas[client], accountant)

    def final(self, view: View, *, part: Part = "whole") -> dict[int, PrivacySpent | None]:
        """The cost of a part of every client's account by pld, to be reported once, at the end.

        None as in `epsilon_of`.

        Equal histories are computed once. If more than 32 differ, the costs are upper bounds, marked as such: those of
        `many_clients.epsilons` for a history of equal releases, rdp for any other.
        """
        spenders, nothing = self.spenders(part), frozenset[Event]()
        keys = {
            client: (frozenset(group(events)), self.deltas[client])
            for client, events in self._where_held(view, part).items()
        }
        keys |= {client: (nothing, delta) for client, delta in self.deltas.items() if client not in spenders}
        distinct = set(keys.values())
        too_many = len(distinct) > _MAX_PLD_HISTORIES
        costs = _in_bulk(frozenset(distinct)) if too_many else {key: _cost(*key, "pld") for key in distinct}
        return {client: costs[keys[client]] if client in keys else None for client in self.deltas}

    def risks(self, view: View) -> dict[int, Risk | None]:
        """The risk of every client's whole account, as that of a schedule fixed in advance; None as in `final`.

        Of many that differ, most are upper bounds; see `fedpriv.privacy.accounting.risk.risks_of`.
        """
        if view in self._risks:
            return self._risks[view]
        spenders = self.spenders()
        known: dict[Any, tuple[list[Event], float]] = {
            client: (events, self.deltas[client]) for client, events in self._where_held(view, "whole").items()
        }
        others = {client: ("no release", delta) for client, delta in self.deltas.items() if client not in spenders}
        found = risks_of(known | {name: ([], delta) for name, delta in {(n, n[1]) for n in others.values()}})
        self._risks[view] = {client: found.get(others.get(client, client)) for client in self.deltas}
        return self._risks[view]

    def largest(self, view: View, *, part: Part = "whole") -> PrivacySpent | None:
        """The most that anyone protected has spent on the view; None as in `epsilon_of`.

        Where a person may be at several clients, it is `cost_of_person` at the smallest delta.
        """
        if self._holders == 1:
            costs = [cost for cost in self.final(view, part=part).values() if cost is not None]
            return max(costs, key=lambda cost: cost.epsilon) if len(costs) == len(self.deltas) else None
        histories = self._all_events(view, part)
        return None if histories is None else cost_of_person(histories, self._holders, min(self.deltas.values()))

    def worst(self, view: View, *, part: Part = "whole") -> tuple[list[Event], PrivacySpent]:
        """The events of the client that spent most, and a cost that holds for all clients: its epsilon at any's delta.

        There are no events where another client's are of another kind, or are more, or sample more: then no one curve
        holds for all.

        Args:
            view: that holds for every client that released anything.
        """
        costs = {client: cost for client, cost in self.final(view, part=part).items() if cost is not None}
        client = max(costs, key=lambda client: costs[client].epsilon)
        histories = self._where_held(view, part)
        events = histories.get(client, [])
        all_less = all(_are_no_more(other, events) for other in histories.values())
        return events if all_less else [], replace(costs[client], delta=max(self.deltas.values()))

    def largest_bound(self, view: View, *, part: Part = "whole") -> PrivacySpent | None:
        """A bound on `largest`, cheap enough for every round: by rdp, of the largest divergences at every order."""
        histories = self._all_events(view, part)
        return None if histories is None else bound_of_person(histories, self._holders, min(self.deltas.values()))

    def largest_risk(self, view: View) -> Risk | None:
        """The risk of everyone protected, each figure the largest of any; None where the view does not hold.

        Where a person may be at several clients, it is `risk_of_person`.
        """
        if self._holders == 1:
            known = [risk for risk in self.risks(view).values() if risk is not None]
            return Risk.worst(known) if known else None
        histories = self._all_events(view, "whole")
        return None if histories is None else risk_of_person(histories, self._holders, min(self.deltas.values()))

    def _all_events(self, view: View, part: Part) -> dict[int, list[Event]] | None:
        """{client: the events of a part of its account}; None where the view does not hold for one."""
        held = self._where_held(view, part)
        if len(held) < len(self.spenders(part)):
            return None
        return {client: held.get(client, []) for client in self.deltas}

    def _where_held(self, view: View, part: Part) -> dict[int, list[Event]]:
        """{client: the events of a part of its account}, of those that released any and for whom the view holds."""
        histories = {client: self._histories(client, part) for client in self.spenders(part)}
        return {
            client: _events(several, view)
            for client, several in histories.items()
            if all(history.holds[view] for history in several)
        }

    @property
    def has_earlier(self) -> bool:
        """Whether an earlier run has released anything of a client."""
        return bool(self._earlier)

    @property
    def num_readers(self) -> int | None:
        """The number of participants against whom every client's releases hold; as `views.least_readers` has it."""
        histories = [*self._earlier.values(), *self._own.values()]
        least = min((history.num_readers for history in histories), default=math.inf)
        return None if least == math.inf else int(least)

    def fits(self, client: int, releases: Iterable[Release], view: View, budget: float) -> bool:
        """Whether the client stays within its budget on the view after further releases; see `stays_within`."""
        events = [*self.history(client, view), *(release.charged_on(view) for release in releases)]
        return stays_within(events, self.deltas[client], budget)

    def is_part_of(
        self, client: int, planned: Iterable[Event], view: View = "local", scale: float = 1.0, *, part: Part = "whole"
    ) -> bool:
        """Whether all that a part of the client's account holds is among these events.

        Args:
            client: registered.
            planned: events on the `local` view.
            view: on which each release must have had at least `scale` times its own noise.
            scale: up to a billionth of it, for rounding.
        """
        histories = self._histories(client, part)
        if any(history.smallest_scales[view] < scale * (1 - 1e-9) for history in histories):
            return False
        released: Counter[Event] = Counter()
        for event in _events(histories, "local"):
            released[event.with_count(1)] += event.count
        allowed: Counter[Event] = Counter()
        for event in planned:
            allowed[event.with_count(1)] += event.count
        return released <= allowed

    def history(self, client: int, view: View) -> list[Event]:
        """All events of the client as they count against a budget on the view; equal ones are merged."""
        return _events(self._histories(client, "whole"), view)

    def _histories(self, client: int, part: Part) -> list[_History]:
        """Those of the client's releases; none where it has made none."""
        if client not in self.deltas:
            raise KeyError(client)
        parts = {"whole": (self._earlier, self._own), "this run": (self._own,), "before": (self._earlier,)}[part]
        return [known[client] for known in parts if client in known]


@lru_cache(maxsize=2**16)
def _cost(events: frozenset[Event], delta: float, accountant: Accountant) -> PrivacySpent:
    """`epsilon_of`, kept: of many clients, few histories differ, and most stay as they are in a round."""
    return epsilon_of(events, delta, accountant)


def _are_no_more(one: Sequence[Event], other: Sequence[Event]) -> bool:
    """Whether the second events are the first but for larger counts and sampling probabilities."""
    return len(one) == len(other) and all(
        without_size(a) == without_size(b) and a.count <= b.count and a.sampling_probability <= b.sampling_probability
        for a, b in zip(one, other, strict=True)
    )


def _events(histories: Iterable[_History], view: View) -> list[Event]:
    return [event for history in histories for event in history.events(view)]


@lru_cache(maxsize=8)
def _in_bulk(
    histories: frozenset[tuple[frozenset[Event], float]],
) -> Mapping[tuple[frozenset[Event], float], PrivacySpent]:
    """Upper bounds on what each (events, delta) costs."""
    costs, single = {}, {}
    for events, delta in histories:
        if len(events) == 1:
            (single[events, delta],) = events
        else:
            costs[events, delta] = replace(epsilon_of(events, delta, "rdp"), upper_bound_only=True)
    bounds = epsilons(list(single.values()), [delta for _, delta in single])
    for (key, event), epsilon in zip(single.items(), bounds.tolist(), strict=True):
        costs[key] = PrivacySpent(
            epsilon=epsilon,
            delta=key[1],
            accountant="pld" if event.has_pld else "rdp",
            upper_bound_only=True,
            is_guarantee=event.is_guarantee,
        )
    return costs


class _History:
    """Releases as counted events for each view: the cost grows with the number of different events, not of releases.

    Attributes:
        num_releases: so far.
        num_readers: the least of any that counts on others' noise; infinite if none does.
        holds: {view: whether it holds for all of them}; a release for which it does not counts in full.
        smallest_scales: {view: the least of what any of them has its own noise multiplied by}.
    """

    def __init__(self, releases: Iterable[Release] = ()) -> None:
        self.num_releases = 0
        self.smallest_scales: dict[View, float] = dict.fromkeys(VIEWS, math.inf)
        self.num_readers = math.inf
        self.holds: dict[View, bool] = dict.fromkeys(VIEWS, True)
        self._counts: dict[View, Counter[Event]] = {view: Counter() for view in VIEWS}
        self._merged: dict[View, frozenset[Event]] = {}
        for release in releases:
            self.add(release)

    def add(self, release: Release) -> None:
        self.num_releases += 1
        self._merged = {}
        if release.counts_on_others:
            self.num_readers = min(self.num_readers, release.num_readers)
        self.holds["aggregate"] &= release.aggregate_scale is not None
        scales = {"local": 1.0, "rho": release.rho_bar, "aggregate": release.aggregate_scale or 1.0}
        self.smallest_scales = {view: min(known, scales[view]) for view, known in self.smallest_scales.items()}
        for view, counts in self._counts.items():
            event = release.charged_on(view)
            counts[event.with_count(1)] += event.count

    def events(self, view: View) -> list[Event]:
        return [event.with_count(count) for event, count in self._counts[view].items()]

    def merged(self, view: View) -> frozenset[Event]:
        if view not in self._merged:
            self._merged[view] = frozenset(self.events(view))
        return self._merged[view]

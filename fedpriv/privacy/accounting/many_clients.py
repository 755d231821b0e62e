"""Epsilons of many clients at once: an upper bound for each, in a fraction of the time that one by one would take.

Sampling with a larger q, adding a release or requiring a smaller delta never lowers the cost, whatever the noise: the
output for the smaller q is that for the larger q', with each release replaced by pure noise with probability
1 - q / q', which is post-processing.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from itertools import combinations, groupby
from multiprocessing import get_context
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator

from fedpriv.privacy.accounting.accountants import (
    FINEST_INTERVAL,
    ORDERS,
    PrivacySpent,
    affordable,
    check_accountant,
    check_delta,
    epsilon_of,
    epsilon_of_curve,
    epsilon_of_loss,
    total_loss,
)
from fedpriv.privacy.accounting.events import check_known, group
from fedpriv.privacy.accounting.law import Accountant, Array, Event

# The number of nodes that replace the clients' own values if there are more of those: of q for rdp (7 ms each); of q,
# count and delta for pld (one q with its counts takes about 0.15 s), if q and count have more values than the last two.
_RDP_NODES = 32
_PLD_NODES, _FEW = (300, 20, 33), (50, 5)

# An interpolated epsilon is trusted if the exact one is this close to it (relative) and not below the second number.
_TRUSTED_ERROR, _SMALL_EPSILON = 1e-3, 0.05

# The largest value discretization interval used instead of the finest one.
_COARSEST_INTERVAL = 1e-2

# Error bounds: rounding of a Renyi divergence (relative; absolute), and FFT and truncation of a pld delta.
_RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING, _DELTA_ROUNDING = 1e-12, 1e-13, 1e-14

# More sets of clients that may be a person's costliest are bounded together.
_MOST_SETS = 64

_Rows = npt.NDArray[np.intp]

_Node = tuple[Event, float]  # one release, value discretization interval
_Query = tuple[int, float]  # count, delta

Name = TypeVar("Name", bound=Hashable)


def epsilons(
    events: Sequence[Event], deltas: Sequence[float], accountant: Accountant = "pld", *, workers: int = 1
) -> Array:
    """Compute [clients] upper bounds on the epsilon of [events[k]] at deltas[k] for every client k.

    Guarantee: never below the result of dp-accounting's accountant, nor, to within 0.1 %, below that of
    `accountants.epsilon_of`; infinite without noise, and without a proof of what an event costs.

    Args:
        events: [clients], the whole history of each; no clients give an empty array.
        deltas: [clients], in (0, 1).
        accountant: `pld` or `rdp`; of pld the smaller of both, as in `accountants.epsilon_of`.
        workers: processes for `pld`, >= 1. More than one requires that the caller's main module can be imported.

    Raises:
        ValueError: the lengths differ, an event is of an unknown type, a delta is outside (0, 1), the accountant is
            unknown, or workers < 1.
    """
    if len(events) != len(deltas):
        raise ValueError(f"events has {len(events)} entries, deltas has {len(deltas)}: must be one of each per client")
    for event, delta in zip(events, deltas, strict=True):
        check_known(event)
        check_delta(delta)
    check_accountant(accountant)
    if workers < 1:
        raise ValueError(f"workers = {workers}: must be >= 1")
    remaining = [delta - event.total_delta for event, delta in zip(events, deltas, strict=True)]
    bounds = np.array([0.0 if event.sampling_probability == 0 else math.inf for event in events])
    rows = [
        row
        for row, event in enumerate(events)
        if bounds[row] and remaining[row] > 0 and event.is_noised and event.is_guarantee
    ]
    bounds[rows] = _by_rdp([events[row] for row in rows], np.array([remaining[row] for row in rows]))
    if accountant == "pld":
        rows = [row for row in rows if events[row].has_pld]
        by_pld = _by_pld([events[row] for row in rows], np.array([remaining[row] for row in rows]), workers)
        bounds[rows] = np.minimum(bounds[rows], by_pld)
    return bounds


def _alike(events: Sequence[Event]) -> Iterator[_Rows]:
    """Rows of the events that differ in q and count alone; those without sampling form groups of their own."""
    rows = defaultdict(list)
    for row, event in enumerate(events):
        rows[without_size(event)].append(row)
    yield from map(np.array, rows.values())


def without_size(event: Event) -> Event:
    """One of the releases, the same for all events that differ in count and, if 0 < q < 1, in q alone.

    Where several probabilities decide who is drawn, none of them is changed.
    """
    has_q = 0 < event.sampling_probability < 1 and any(
        field.name == "sampling_probability" for field in fields(cast(Any, event))
    )
    return with_size(event, 0.5 if has_q else event.sampling_probability, 1)


def with_size(event: Event, sampling_probability: float, count: int) -> Event:
    """The event with another count and another q."""
    if event.sampling_probability == sampling_probability:
        return event.with_count(count)
    sized: Event = replace(cast(Any, event), sampling_probability=sampling_probability, count=count)
    return sized


# --- rdp ---


def _by_rdp(events: Sequence[Event], deltas: Array) -> Array:
    """[clients] bounds by Renyi curves at all orders where few probabilities differ, else at the best order alone."""
    bounds = np.empty(len(events))
    for rows in _alike(events):
        alike, delta = [events[row] for row in rows], deltas[rows]
        q = np.array([event.sampling_probability for event in alike])
        count = np.array([event.count for event in alike], dtype=float)[:, None]
        nodes = _nodes_of(q, _RDP_NODES)
        curves = np.stack([with_size(alike[0], node, 1).rdp(ORDERS) for node in nodes.tolist()])
        below = np.searchsorted(nodes, q, side="right") - 1
        if (nodes[below] == q).all():
            found = _to_epsilon(count * curves[below], ORDERS, delta).min(axis=1)
        else:
            expected = _to_epsilon(count * _interpolated(curves, nodes, below, q), ORDERS, delta)
            found = _searched(alike, expected, delta)
        bounds[rows] = np.minimum(found, [event.max_loss for event in alike])
    return bounds


def _searched(alike: Sequence[Event], expected: Array, deltas: Array) -> Array:
    """[clients] bounds at the best order that a search finds; any order gives a bound.

    It starts at the best one for a curve interpolated at the client's q. It goes on to lower and to higher orders, as
    long as they are better, where that curve says little: if its epsilon is not the exact one, or is a small difference
    of large terms, or if it is unknown at the next order.

    Args:
        alike: [clients], which differ in q and count alone.
        expected: [clients, orders], epsilons of interpolated curves.
        deltas: [clients].
    """
    clients, best = np.arange(len(alike)), expected.argmin(axis=1)
    found = _at_orders(alike, best, deltas)
    error = np.abs(found - expected[clients, best])
    is_open = (error > _TRUSTED_ERROR * found) | (found < _SMALL_EPSILON)
    for step in (-1, 1):
        following = np.clip(best + step, 0, len(ORDERS) - 1)
        moving = np.flatnonzero(is_open | np.isinf(expected[clients, following]))
        indices = best[moving]
        while moving.size:
            indices = np.clip(indices + step, 0, len(ORDERS) - 1)
            further = _at_orders([alike[k] for k in moving.tolist()], indices, deltas[moving])
            is_better = further < found[moving]
            moving, indices = moving[is_better], indices[is_better]
            found[moving] = further[is_better]
    return found


def _at_orders(alike: Sequence[Event], indices: _Rows, deltas: Array) -> Array:
    """[clients] bounds at the order of `ORDERS` that each index names."""
    divergences = np.empty(len(alike))
    for index in np.unique(indices):
        clients = np.flatnonzero(indices == index)
        divergences[clients] = type(alike[0]).rdp_of_many([alike[k] for k in clients.tolist()], ORDERS[[index]])[:, 0]
    return _to_epsilon(divergences[:, None], ORDERS[indices][:, None], deltas)[:, 0]


def _interpolated(curves: Array, nodes: Array, below: _Rows, q: Array) -> Array:
    """[clients, orders] curves between those of each client's nodes, infinite where one of the two is."""
    above, is_finite = np.minimum(below + 1, len(nodes) - 1), np.isfinite(curves)
    logs = np.log(np.where(is_finite, np.maximum(curves, 1e-300), 1.0))
    log_nodes, distinct = np.unique(np.log(nodes), return_index=True)  # probabilities may differ in their last bits
    if len(distinct) < 2:
        return curves[below]
    found = np.exp(PchipInterpolator(log_nodes, logs[distinct])(np.log(q)))
    return np.where(is_finite[below] & is_finite[above], found, math.inf)


def _to_epsilon(divergences: Array, orders: npt.ArrayLike, deltas: Array) -> Array:
    """[clients, orders] epsilons as in dp_accounting.rdp.compute_epsilon (arXiv:2004.00010, Proposition 12)."""
    orders, delta = np.asarray(orders, dtype=float), deltas[:, None]
    total = (1 + _RELATIVE_ROUNDING) * divergences + _ABSOLUTE_ROUNDING
    epsilon = total + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return np.where(delta**2 + np.expm1(-total) > 0, 0.0, np.maximum(epsilon, 0.0))


# --- pld ---


def _by_pld(events: Sequence[Event], deltas: Array, workers: int) -> Array:
    """[clients] bounds from privacy loss distributions, with q and count rounded up and delta down to nodes.

    Connect-the-dots evaluates the hockey-stick divergence as a function of exp(epsilon) at multiples of an interval and
    joins the points by lines. So a pair of distributions that dominates another still does, a multiple of the interval
    gives a curve that is nowhere lower (the function is convex), and composition preserves both orderings.
    """
    keys = _rounded_histories(events, deltas)
    by_node: defaultdict[_Node, set[_Query]] = defaultdict(set)
    for node, query in keys:
        by_node[node].add(query)
    # The most expensive nodes come first.
    tasks = sorted(by_node.items(), key=lambda task: -task[0][0].sampling_probability)
    if workers == 1 or len(tasks) < 2:
        results = list(map(_node_epsilons, tasks))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(_node_epsilons, tasks))
    found = {node: epsilons for (node, _), epsilons in zip(tasks, results, strict=True)}
    return np.array([found[node][query] for node, query in keys])


def _rounded_histories(events: Sequence[Event], deltas: Array) -> list[tuple[_Node, _Query]]:
    """For each client the node and the query whose epsilon is its bound: its own ones if there are few."""
    if len({event.with_count(1) for event in events}) <= _FEW[0] and len({event.count for event in events}) <= _FEW[1]:
        own = zip(events, (deltas - _DELTA_ROUNDING).tolist(), strict=True)
        return [((event.with_count(1), FINEST_INTERVAL), (event.count, delta)) for event, delta in own]
    keys: dict[int, tuple[_Node, _Query]] = {}
    groups = list(_alike(events))
    for rows in groups:
        q = np.array([events[row].sampling_probability for row in rows])
        count = np.array([events[row].count for row in rows], dtype=float)
        max_q, max_count, max_delta = _PLD_NODES
        q = _rounded(q, _nodes_of(q, max(8, max_q // len(groups))), up=True)
        count = _rounded(count, np.unique(np.rint(_nodes_of(count, max_count))), up=True)
        delta = _rounded(deltas[rows], _nodes_of(deltas[rows], max_delta), up=False) - _DELTA_ROUNDING
        columns = (column.tolist() for column in (rows, q, count.astype(int), delta))
        for row, q_k, count_k, delta_k in zip(*columns, strict=True):
            release = with_size(events[row], q_k, 1)
            keys[row] = (release, _coarse_interval(release)), (count_k, delta_k)
    return [keys[row] for row in range(len(events))]


def _coarse_interval(release: Event) -> float:
    """A multiple of the finest interval, a fraction of the loss of one release; measured cost: 0.1 %."""
    coarsest = min(release.loss_scale / 4, _COARSEST_INTERVAL)
    return FINEST_INTERVAL * max(math.floor(coarsest / FINEST_INTERVAL), 1)


def _node_epsilons(task: tuple[_Node, set[_Query]]) -> dict[_Query, float]:
    """The pld epsilon of every query at one node; each count is composed once."""
    (release, interval), queries = task
    epsilons: dict[_Query, float] = {}
    for count, same_count in groupby(sorted(queries), key=lambda query: query[0]):
        releases = [release.with_count(count)]
        within_reach = affordable(releases, interval)
        loss = total_loss(releases, within_reach) if within_reach else None
        for query in same_count:
            epsilons[query] = epsilon_of_loss(loss, query[1], releases) if loss else math.inf
    return epsilons


# --- a person at several holders ---


def cost_of_person(histories: Mapping[Name, Iterable[Event]], holders: int, delta: float) -> PrivacySpent:
    """The cost by pld of what the costliest so many clients released together.

    Where more than 64 sets of clients may be those, it is a bound: `bound_of_person`.

    Args:
        histories: {client: its releases}.
        holders: h >= 1, at how many of them a person has records at most.
        delta: in (0, 1).
    """
    sets = sets_of_holders(histories, holders)
    if len(sets[0]) > holders:
        return bound_of_person(histories, holders, delta)
    known = {name: list(events) for name, events in histories.items()}
    costs = (epsilon_of([event for name in names for event in known[name]], delta) for names in sets)
    return max(costs, key=lambda cost: cost.epsilon)


def bound_of_person(histories: Mapping[Name, Iterable[Event]], holders: int, delta: float) -> PrivacySpent:
    """A bound on `cost_of_person`, cheap enough for every round: by rdp, of the largest divergences at every order."""
    known = [group(events) for events in histories.values()]
    curves = np.stack([sum((event.rdp(ORDERS) for event in each), np.zeros(len(ORDERS))) for each in known])
    largest = np.sort(curves, axis=0)[-holders:].sum(axis=0)
    proven = all(event.is_guarantee and event.total_delta == 0 for each in known for event in each)
    epsilon = math.inf
    if proven:
        epsilon = epsilon_of_curve(largest, delta) if largest.any() else 0.0
    return PrivacySpent(epsilon=epsilon, delta=delta, accountant="rdp", upper_bound_only=True, is_guarantee=proven)


def sets_of_holders(histories: Mapping[Name, Iterable[Event]], holders: int) -> list[tuple[Name, ...]]:
    """The sets of so many clients that differ in cost, of which one costs a person most, whatever the accountant.

    Where more than 64 may, a single larger set, of all those together, which costs no less than any.

    Args:
        histories: {client: its releases}, of at least one.
        holders: h >= 1; of fewer clients, all are the set.
    """
    known = {name: group(events) for name, events in histories.items()}
    names = costliest(known, holders)
    sets: dict[tuple[Event, ...], tuple[Name, ...]] = {}
    for several in combinations(names, min(holders, len(names))):
        sets.setdefault(tuple(sorted((event for name in several for event in known[name]), key=repr)), several)
        if len(sets) > _MOST_SETS:
            return [tuple(names)]
    return list(sets.values())


def costliest(histories: Mapping[Name, Iterable[Event]], number: int) -> list[Name]:
    """Clients of whom so many cost the most together, by any accountant; as few as is known without one.

    Left out is one that so many others cost no less than: they have its releases as often, with no smaller q.

    Args:
        histories: {client: its releases}; equal events of one are merged.
        number: how many are to be composed together, >= 1.
    """
    kinds: defaultdict[tuple[str, ...], list[tuple[Array, Name]]] = defaultdict(list)
    for name, history in histories.items():
        named = [(repr(without_size(event)), event.sampling_probability, event.count) for event in history]
        named.sort(key=lambda each: (each[0], -each[1], -each[2]))
        sizes = np.array([each[1:] for each in named], dtype=float).ravel()
        kinds[tuple(each[0] for each in named)].append((sizes, name))
    found: list[Name] = []
    for alike in kinds.values():
        kept: list[Array] = []
        for sizes, name in sorted(alike, key=lambda each: tuple(-each[0])):  # what costs no less comes first
            if sum(bool((sizes <= larger).all()) for larger in kept) < number:
                kept.append(sizes)
                found.append(name)
    return found


# --- nodes ---


def _nodes_of(values: Array, at_most: int) -> Array:
    """The distinct values or, if there are too many, a geometric grid from the smallest to the largest."""
    distinct = np.unique(values)
    if len(distinct) <= at_most:
        return distinct
    grid = np.geomspace(distinct[0], distinct[-1], at_most)
    grid[0], grid[-1] = distinct[0], distinct[-1]
    return grid


def _rounded(values: Array, nodes: Array, *, up: bool) -> Array:
    """The smallest node that is not below (or the largest that is not above) each value."""
    index = np.searchsorted(nodes, values) if up else np.searchsorted(nodes, values, side="right") - 1
    return np.asarray(nodes[index])

"""Epsilons of many clients with Gaussian noise: bounds for each, in a fraction of the time.

Adding a sampled release, sampling with a larger q or requiring a smaller delta never lowers the cost: the output for
the smaller q is that for the larger q', with each release replaced by pure noise with probability 1 - q / q', which is
post-processing. The bounds for both accountants rest on this; what each needs in addition is stated below.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import groupby
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from fedpriv.accounting._gaussian import (
    MAX_NOISE,
    MIN_NOISE,
    MOST_TERMS,
    NEGLIGIBLE_LOG_RATIO,
    composed_loss,
    log_binomial,
    log_means,
)
from fedpriv.accounting.composition.conversion import (
    FINEST_INTERVAL,
    INTEGER_ORDERS,
    ORDERS,
    PLD_LIMIT,
    nodes_of,
    rounded,
    total_of,
)
from fedpriv.accounting.composition.law import SMALLEST_DIVERGENCE, Accountant, Array, Event

_FRACTIONAL_ORDERS = np.array([order for order in ORDERS if not float(order).is_integer()])

# The number of nodes that replace the clients' own values if there are more of those: of q for rdp (0.1 ms each); of q,
# count and delta for pld (one q with its counts takes about 0.7 s for the lower bound, 0.15 s for the upper one).
_RDP_NODES = 400
_PLD_LOWER_NODES, _PLD_UPPER_NODES = (50, 5, 9), (300, 20, 33)

# The relative width above which the bounds by rdp are computed again without nodes.
_WIDE = 1e-3

# The largest value discretization interval used for an upper bound instead of the finest one.
_COARSEST_INTERVAL = 1e-2

# Error bounds: rounding of log A (relative; absolute, times the order), and FFT and truncation of a pld delta.
_RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING, _DELTA_ROUNDING = 1e-12, 1e-14, 1e-14

# Here the series ends once the remaining binomials sum to at most this, or after this many terms.
_TAIL, _MAX_TERMS = 1e-6, 48


@dataclass(frozen=True, kw_only=True)
class _Histories:
    """One history per client, as columns, all [clients]."""

    z: Array
    q: Array
    count: Array
    delta: Array

    def at(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> _Histories:
        return _Histories(z=self.z[rows], q=self.q[rows], count=self.count[rows], delta=self.delta[rows])


def epsilon_bounds(
    events: Sequence[Event], deltas: Sequence[float], accountant: Accountant = "pld", *, workers: int = 1
) -> tuple[Array, Array]:
    """Lower and upper bounds on the epsilon of [events[k]] at deltas[k] for every client k, add-or-remove adjacency.

    The lower bound is never above the result of `accountants.epsilon_of`. The upper bound is never below the result of
    dp-accounting's accountant, nor, to within 0.1 %, below that of `epsilon_of`.

    Args:
        events: [clients], Gaussian noise on a Poisson sample, the whole history of each.
        deltas: [clients], in (0, 1); below 1e-14 the pld upper bound is infinite.
        accountant: `pld` or `rdp`.
        workers: processes for `pld`, >= 1. More than one requires that the caller's main module can be imported.
    """
    clients = _Histories(
        z=np.array([min(event.effective_noise_multiplier, MAX_NOISE) for event in events], dtype=float),
        q=np.array([event.sampling_probability for event in events], dtype=float),
        count=np.array([event.count for event in events], dtype=float),
        delta=np.array(deltas, dtype=float),
    )
    sampled = clients.q > 0
    infinite = sampled & (clients.z < MIN_NOISE)
    lower = np.where(infinite, np.inf, 0.0)
    upper = lower.copy()
    finite = np.flatnonzero(sampled & ~infinite)
    if finite.size:
        lower[finite], upper[finite] = _rdp(clients.at(finite))
    if accountant == "pld":
        # The rdp epsilon decides whether pld answers at all; if its bounds leave that open, both count.
        _replace_by_pld(clients, finite[lower[finite] <= PLD_LIMIT], lower, upper, workers)
    return lower, upper


def _groups(clients: _Histories) -> Iterator[npt.NDArray[np.intp]]:
    """Row indices of the clients that share a noise multiplier; those without sampling form groups of their own."""
    keys = np.stack([clients.z, clients.q == 1], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    for number in range(group.max(initial=-1) + 1):
        yield np.flatnonzero(group == number)


# --- rdp ---


def _rdp(clients: _Histories) -> tuple[Array, Array]:
    """Lower and upper epsilon by rdp.

    With A_a = exp((a - 1) * divergence at order a), F(a) = (a - 1) * epsilon(a) = count * log A_a
    + (a - 1) log((a - 1) / a) - log a - log delta is convex in a (log A_a is, by Hoelder), so
    epsilon(a) = F(a) / (a - 1) falls and then rises. Integer orders come first. Between two of them that both cost more
    than some third one, no fractional order is better than that third one; the few remaining orders are computed.
    """
    lower_at, upper_at = _integer_order_epsilons(clients)
    # Where log A_1024 departs from zero, it rises too fast for a chord to follow.
    wide = np.flatnonzero(upper_at.min(axis=1) > (1 + _WIDE) * lower_at.min(axis=1))
    for start in range(0, len(wide), _RDP_NODES):
        block = wide[start : start + _RDP_NODES]
        lower_at[block], upper_at[block] = _integer_order_epsilons(clients.at(block))  # so few need no other nodes
    lower, upper = lower_at.min(axis=1), upper_at.min(axis=1)
    possible = np.pad(lower_at <= upper[:, None], ((0, 0), (1, 0)))  # order 1 in front, which is never the best one
    for order in _FRACTIONAL_ORDERS:
        below = int(order) - 1
        rows = np.flatnonzero(possible[:, below] | possible[:, below + 1])
        subset = clients.at(rows)
        low, high = _fractional_order_logs(float(order), subset)
        lower[rows] = np.minimum(lower[rows], _to_epsilon(low, np.array([order]), subset)[:, 0])
        upper[rows] = np.minimum(upper[rows], _to_epsilon(high, np.array([order]), subset)[:, 0])
    # dp-accounting returns 0 if sqrt(1 - exp(-KL)) <= delta for the divergence of some order, which bounds the total
    # variation. A single release has total variation q (2 Phi(1 / 2z) - 1); if that exceeds delta, no order can do so.
    trivial = clients.q * special.erf(1 / (2 * np.sqrt(2) * clients.z)) <= clients.delta
    return np.where(trivial, 0.0, lower), upper


def _integer_order_epsilons(clients: _Histories) -> tuple[Array, Array]:
    """[clients, integer orders] bounds on the epsilon at each order."""
    low, high = _integer_order_logs(clients)
    return _to_epsilon(low, INTEGER_ORDERS, clients), _to_epsilon(high, INTEGER_ORDERS, clients)


def _to_epsilon(log_moments: Array, orders: Array, clients: _Histories) -> Array:
    """[clients, orders] epsilons as in dp_accounting.rdp.compute_epsilon (arXiv:2004.00010, Proposition 12)."""
    floor = np.minimum(orders / (2 * clients.z[:, None] ** 2), SMALLEST_DIVERGENCE)
    total = clients.count[:, None] * np.maximum(log_moments / (orders - 1), floor)
    delta = clients.delta[:, None]
    epsilon = total + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return np.where(delta**2 + np.expm1(-total) > 0, 0.0, np.maximum(epsilon, 0.0))


def _integer_order_logs(clients: _Histories) -> tuple[Array, Array]:
    """[clients, integer orders] bounds on log A_a(q), where A_a(q) = E[(1 + q (L - 1))^a], L = N(1, z^2) / N(0, z^2).

    A_a is an expectation of convex functions of q: between two nodes it lies below their chord, and above the
    extended chord of the two nodes before. Mironov et al. 2019 (arXiv:1908.10530), Theorem 5: the other direction,
    E[(1 + q (L - 1))^(1 - a)], is never larger, so dp-accounting uses this one.
    """
    low, high = np.empty((2, len(clients.q), len(INTEGER_ORDERS)))
    for rows in _groups(clients):
        q, z = clients.q[rows], clients.z[rows[0]]
        nodes = nodes_of(q, _RDP_NODES)
        if len(nodes) == _RDP_NODES:  # one more node below, so that the first cell has a chord to extend
            nodes = np.append(nodes[0] * (nodes[0] / nodes[1]), nodes)
        low[rows], high[rows] = _interpolate(q, nodes, _integer_orders_at(nodes, z))
    slack = _RELATIVE_ROUNDING * high + _ABSOLUTE_ROUNDING * INTEGER_ORDERS
    return low - slack, high + slack


def _integer_orders_at(q: Array, z: float) -> Array:
    """[nodes, integer orders] log A_a(q) = log sum_i binom(a, i) (1 - q)^(a - i) q^i exp((i^2 - i) / 2z^2)."""
    if q[-1] == 1:  # the only node of its group, see `_groups`
        return np.asarray(INTEGER_ORDERS * (INTEGER_ORDERS - 1) / (2 * z * z))[None, :]
    logs = np.empty((len(q), len(INTEGER_ORDERS)))
    for column, order in enumerate(INTEGER_ORDERS):
        i = np.arange(order + 1)
        constant = log_binomial(order, i) + (i * i - i) / (2 * z * z)
        terms = constant + i * np.log(q)[:, None] + (order - i) * np.log1p(-q)[:, None]
        logs[:, column] = special.logsumexp(terms, axis=1)
    return logs


def _interpolate(q: Array, nodes: Array, logs: Array) -> tuple[Array, Array]:
    """[clients, orders] logs of an extended and of a plain chord of exp(logs), which is convex and increasing in q."""
    cell = np.searchsorted(nodes, q, side="right") - 1
    before, after = np.maximum(cell - 1, 0), np.minimum(cell + 1, len(nodes) - 1)
    step = q - nodes[cell]
    plain = step / np.where(after > cell, nodes[after] - nodes[cell], 1.0)
    extended = step / np.where(cell > before, nodes[cell] - nodes[before], 1.0)
    # In logs, since the values themselves would overflow.
    with np.errstate(divide="ignore"):
        log_plain = np.log(plain)[:, None]
    high = np.logaddexp(logs[cell] + np.log1p(-plain)[:, None], logs[after] + log_plain)
    low = logs[cell] + np.log1p(extended[:, None] * -np.expm1(logs[before] - logs[cell]))
    return low, high


def _fractional_order_logs(order: float, clients: _Histories) -> tuple[Array, Array]:
    """[clients, 1] bounds on log A_a(q) as dp-accounting computes it at a fractional order: a sum of positive terms.

    It adds the absolute values of an alternating series (arXiv:1908.10530, Section 3.3), so its result is never below
    A_a(q). Each term is |binom(a, i)| E[min^i max^(a - i)] over the smaller and the larger of 1 - q and q L. The sum of
    all terms after the first k > a is at most E[min^k max^(a - k)] times the remaining binomials, which sum to
    |binom(a - 1, k - 1)|. If the library abandons the order, it counts towards neither bound.
    """
    gaussian = order * (order - 1) / (2 * clients.z**2)
    num_terms = max(int(order) + 1, _num_terms(order))
    terms = (np.logaddexp(*_log_term(order, i, clients)) + log_binomial(order, i) for i in range(num_terms))
    at_least = reduce(np.logaddexp, terms)
    tail = np.logaddexp(*_log_term(order, num_terms, clients)) + log_binomial(order - 1, num_terms - 1)
    at_most = np.logaddexp(at_least, tail)
    last = np.maximum(*_log_term(order, MOST_TERMS - 1, clients)) + log_binomial(order, MOST_TERMS - 1)
    # In the far tail the exponents cancel to within their own rounding errors, here and in the library.
    slack = _RELATIVE_ROUNDING * np.abs(at_most) + 100 * _ABSOLUTE_ROUNDING * (1 + 1 / clients.z**2)
    low = np.where(last - at_most < NEGLIGIBLE_LOG_RATIO + slack, at_least - slack, np.inf)
    high = np.where(last - at_least < NEGLIGIBLE_LOG_RATIO - slack, at_most + slack, np.inf)
    unsampled = clients.q == 1
    low, high = np.where(unsampled, gaussian - slack, low), np.where(unsampled, gaussian + slack, high)
    return low[:, None], high[:, None]


def _log_term(order: float, i: int, clients: _Histories) -> tuple[Array, Array]:
    """[clients] logs of E[min^i max^(order - i)], see the caller, over q L < 1 - q and over q L > 1 - q."""
    # the caller overwrites the result for q = 1
    return log_means(order, i, np.where(clients.q == 1, 0.5, clients.q), clients.z)


def _num_terms(order: float) -> int:
    """The number of terms of the series after which the remaining binomials are small."""
    i = np.arange(1, _MAX_TERMS)
    return 1 + int(np.count_nonzero(log_binomial(order - 1, i) > np.log(_TAIL)))


# --- pld ---

_Node = tuple[float, float, float]  # z, q, value discretization interval
_Query = tuple[int, float]  # count, delta


def _replace_by_pld(clients: _Histories, rows: npt.NDArray[np.intp], lower: Array, upper: Array, workers: int) -> None:
    """Replace rdp bounds in place: the lower rounds q and count down and delta up to nodes, the upper does the reverse.

    Connect-the-dots evaluates the hockey-stick divergence as a function of exp(epsilon) at multiples of an interval and
    joins the points by lines. So a pair of distributions that dominates another still does, a multiple of the interval
    gives a curve that is nowhere lower (the function is convex), and composition preserves both orderings.
    """
    subset = clients.at(rows)
    below, above = _rounded(subset, up=False), _rounded(subset, up=True)
    epsilons = _pld_epsilons([*below, *above], workers)
    low, high = np.array([epsilons[key] for key in below]), np.array([epsilons[key] for key in above])
    certain = upper[rows] <= PLD_LIMIT
    lower[rows] = np.where(certain, low, np.minimum(low, lower[rows]))
    upper[rows] = np.where(certain, high, np.maximum(high, upper[rows]))


def _rounded(clients: _Histories, *, up: bool) -> list[tuple[_Node, _Query]]:
    """For each client the node and the query whose epsilon is its upper (or lower) bound."""
    q, count, delta, interval = np.empty((4, len(clients.q)))
    groups = list(_groups(clients))
    for rows in groups:
        group = clients.at(rows)
        few = len(np.unique(group.q)) <= _PLD_LOWER_NODES[0] and len(np.unique(group.count)) <= _PLD_LOWER_NODES[1]
        max_q, max_count, max_delta = _PLD_UPPER_NODES if up and not few else _PLD_LOWER_NODES
        q[rows] = rounded(group.q, nodes_of(group.q, max(8, max_q // len(groups))), up=up)
        count[rows] = rounded(group.count, np.unique(np.rint(nodes_of(group.count, max_count))), up=up)
        delta[rows] = rounded(group.delta, nodes_of(group.delta, max_delta), up=not up)
        interval[rows] = _coarse_interval(q[rows], group.z) if up and not few else FINEST_INTERVAL
    delta += -_DELTA_ROUNDING if up else _DELTA_ROUNDING
    columns = zip(*(column.tolist() for column in (clients.z, q, interval, count.astype(int), delta)), strict=True)
    return [((z_k, q_k, interval_k), (count_k, delta_k)) for z_k, q_k, interval_k, count_k, delta_k in columns]


def _coarse_interval(q: Array, z: Array) -> Array:
    """Multiples of the finest interval, a fraction of the spread q / z of one release; measured cost: 0.1 %."""
    coarsest = np.minimum(q / (4 * np.maximum(z, 1.0)), _COARSEST_INTERVAL)
    return np.asarray(FINEST_INTERVAL * np.maximum(np.floor(coarsest / FINEST_INTERVAL), 1.0))


def _pld_epsilons(keys: list[tuple[_Node, _Query]], workers: int) -> dict[tuple[_Node, _Query], float]:
    """The pld epsilon of every distinct key, grouped by node, the most expensive nodes first."""
    by_node: defaultdict[_Node, set[_Query]] = defaultdict(set)
    for node, query in keys:
        by_node[node].add(query)
    tasks = sorted(((node, sorted(queries)) for node, queries in by_node.items()), key=lambda task: -task[0][1])
    if workers == 1 or len(tasks) < 2:
        results = list(map(_node_epsilons, tasks))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(_node_epsilons, tasks))
    return {
        (node, query): epsilon
        for (node, queries), epsilons in zip(tasks, results, strict=True)
        for query, epsilon in zip(queries, epsilons, strict=True)
    }


def _node_epsilons(task: tuple[_Node, list[_Query]]) -> list[float]:
    """The pld epsilons of the queries at one node; each count is composed once."""
    (z, q, interval), queries = task
    epsilons: list[float] = []
    for count, same_count in groupby(queries, key=lambda query: query[0]):
        loss = _gaussian_loss(z, q, count, interval)
        epsilons += (float(loss.get_epsilon_for_delta(delta)) if delta > 0 else math.inf for _, delta in same_count)
    return epsilons


def _gaussian_loss(z: float, q: float, count: int, interval: float) -> Any:
    """The composed privacy loss distribution; for the finest interval exactly as `total_loss` builds it."""
    if interval == FINEST_INTERVAL:
        return total_of([composed_loss(q, z, count, interval)], interval)
    if q == 1:
        return _single_gaussian_loss(z / math.sqrt(count), 1.0, interval)
    return _single_gaussian_loss(z, q, interval).self_compose(count)


@lru_cache(maxsize=1)
def _single_gaussian_loss(z: float, q: float, interval: float) -> Any:
    """The privacy loss distribution of one release; one entry suffices, as a node's counts are processed in a row."""
    from dp_accounting import pld

    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=interval
    )

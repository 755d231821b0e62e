"""Epsilons of many clients with Gaussian noise: bounds for each of them, in a fraction of the time.

Adding a sampled release, sampling with a larger q or asking for a smaller delta never costs less: the observer of
the cheaper history is one of the dearer history who replaces each output, with probability 1 - q / q', by plain noise.
Both accountants are bracketed with this; what each adds is said where it is used.
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
from dp_accounting import pld
from scipy import special

from fedpriv.accounting.accountants import FINEST_INTERVAL, ORDERS, PLD_LIMIT, total_loss
from fedpriv.accounting.law import SMALLEST_DIVERGENCE, Accountant, Array
from fedpriv.accounting.subsampled_gaussian import MAX_NOISE, MIN_NOISE, SubsampledGaussian

_WHOLE_ORDERS = np.array([order for order in ORDERS if float(order).is_integer()])
_FRACTIONAL_ORDERS = np.array([order for order in ORDERS if not float(order).is_integer()])

# Nodes in place of the clients' own values, where those are more: of q for rdp (0.1 ms each); of q, count and delta
# for pld (a q with its counts about 0.7 s in the lower bound, 0.15 s in the upper one).
_RDP_NODES = 400
_PLD_LOWER_NODES, _PLD_UPPER_NODES = (50, 5, 9), (300, 20, 33)

# A relative width of an rdp bracket above which it is computed again without nodes.
_WIDE = 1e-3

# The largest of the intervals of the privacy loss that stand in for the finest from above.
_COARSEST_INTERVAL = 1e-2

# What floating point may do to log A (relative; absolute, times the order) and, by FFT and truncation, to a pld delta.
_RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING, _DELTA_ROUNDING = 1e-12, 1e-14, 1e-14

# dp-accounting gives a fractional order up when its series still has a term above e^-30 of the sum after so many.
_LIBRARY_TERMS, _GIVES_UP = 1000, -30.0

# Here the series ends once the binomials left sum to this, or after so many terms.
_TAIL, _MOST_TERMS = 1e-6, 48


@dataclass(frozen=True, kw_only=True)
class _Clients:
    """Histories as columns, all [clients]."""

    z: Array
    q: Array
    count: Array
    delta: Array

    def at(self, where: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> _Clients:
        return _Clients(z=self.z[where], q=self.q[where], count=self.count[where], delta=self.delta[where])


def epsilon_bounds(
    events: Sequence[SubsampledGaussian], deltas: Sequence[float], accountant: Accountant = "pld", *, workers: int = 1
) -> tuple[Array, Array]:
    """Lower and upper bounds of the epsilon of [events[k]] at deltas[k] for every client k, add-or-remove adjacency.

    The lower one is never above what `accountants.spent` gives; the upper one never below what dp-accounting's
    accountant gives, and so what `spent` does to 0.1 %.

    Args:
        events: [clients], the whole history of each.
        deltas: [clients], in (0, 1); a pld upper bound below 1e-14 is infinite.
        accountant: `pld` or `rdp`.
        workers: processes for `pld`, >= 1. More than one needs a caller whose main module may be imported.
    """
    clients = _Clients(
        z=np.array([min(event.noise_multiplier, MAX_NOISE) for event in events], dtype=float),
        q=np.array([event.sampling_probability for event in events], dtype=float),
        count=np.array([event.count for event in events], dtype=float),
        delta=np.array(deltas, dtype=float),
    )
    sampled = clients.q > 0
    infinite = sampled & (clients.z < MIN_NOISE)
    lower = np.where(infinite, np.inf, 0.0)
    upper = lower.copy()
    rest = np.flatnonzero(sampled & ~infinite)
    if rest.size:
        lower[rest], upper[rest] = _rdp(clients.at(rest))
    if accountant == "pld":
        # The rdp figure decides whether pld answers at all; where its bracket leaves that open, both count.
        _by_pld(clients, rest[lower[rest] <= PLD_LIMIT], lower, upper, workers)
    return lower, upper


def _groups(clients: _Clients) -> Iterator[npt.NDArray[np.intp]]:
    """Places of the clients of one noise multiplier, those without sampling apart."""
    keys = np.stack([clients.z, clients.q == 1], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    for number in range(group.max(initial=-1) + 1):
        yield np.flatnonzero(group == number)


def _nodes(values: Array, at_most: int) -> Array:
    """The distinct values or, where they are too many, a geometric grid from the smallest to the largest of them."""
    distinct = np.unique(values)
    if len(distinct) <= at_most:
        return distinct
    grid = np.geomspace(distinct[0], distinct[-1], at_most)
    grid[0], grid[-1] = distinct[0], distinct[-1]
    return grid


# --- rdp ---


def _rdp(clients: _Clients) -> tuple[Array, Array]:
    """Lower and upper epsilon by rdp.

    With A_a = exp((a - 1) * divergence at order a), F(a) = (a - 1) * epsilon(a) = count * log A_a
    + (a - 1) log((a - 1) / a) - log a - log delta is convex in a (log A_a is, by Hoelder), so
    epsilon(a) = F(a) / (a - 1) falls and then rises. Whole orders come first. Between two of them that both cost more
    than some other, no fractional order is better than that other; the few orders elsewhere are computed.
    """
    lower_at, upper_at = _whole_order_epsilons(clients)
    # Where log A_1024 leaves zero it rises faster than a chord can follow.
    wide = np.flatnonzero(upper_at.min(axis=1) > (1 + _WIDE) * lower_at.min(axis=1))
    for start in range(0, len(wide), _RDP_NODES):
        block = wide[start : start + _RDP_NODES]
        lower_at[block], upper_at[block] = _whole_order_epsilons(clients.at(block))  # so few are their own nodes
    lower, upper = lower_at.min(axis=1), upper_at.min(axis=1)
    possible = np.pad(lower_at <= upper[:, None], ((0, 0), (1, 0)))  # order 1 in front, which is never the best
    for order in _FRACTIONAL_ORDERS:
        below = int(order) - 1
        who = np.flatnonzero(possible[:, below] | possible[:, below + 1])
        some = clients.at(who)
        low, high = _fractional_order_logs(float(order), some)
        lower[who] = np.minimum(lower[who], _to_epsilon(low, np.array([order]), some)[:, 0])
        upper[who] = np.minimum(upper[who], _to_epsilon(high, np.array([order]), some)[:, 0])
    # dp-accounting answers 0 where the divergence of some order says so by sqrt(1 - exp(-KL)) <= delta, which bounds
    # the total variation. One release alone has q (2 Phi(1 / 2z) - 1), so above delta no order can say so.
    trivial = clients.q * special.erf(1 / (2 * np.sqrt(2) * clients.z)) <= clients.delta
    return np.where(trivial, 0.0, lower), upper


def _whole_order_epsilons(clients: _Clients) -> tuple[Array, Array]:
    """[clients, whole orders] bounds of the epsilon of each order."""
    low, high = _whole_order_logs(clients)
    return _to_epsilon(low, _WHOLE_ORDERS, clients), _to_epsilon(high, _WHOLE_ORDERS, clients)


def _to_epsilon(log_moments: Array, orders: Array, clients: _Clients) -> Array:
    """[clients, orders] epsilons as in dp_accounting.rdp.compute_epsilon (arXiv:2004.00010, Proposition 12)."""
    floor = np.minimum(orders / (2 * clients.z[:, None] ** 2), SMALLEST_DIVERGENCE)
    total = clients.count[:, None] * np.maximum(log_moments / (orders - 1), floor)
    delta = clients.delta[:, None]
    epsilon = total + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return np.where(delta**2 + np.expm1(-total) > 0, 0.0, np.maximum(epsilon, 0.0))


def _whole_order_logs(clients: _Clients) -> tuple[Array, Array]:
    """[clients, whole orders] bounds of log A_a(q), where A_a(q) = E[(1 + q (L - 1))^a], L = N(1, z^2) / N(0, z^2).

    A_a is an expectation of convex functions of q: between two nodes it lies below their chord, and above the
    continued chord of the two nodes before. Mironov et al. 2019 (arXiv:1908.10530), Theorem 5: the other direction,
    E[(1 + q (L - 1))^(1 - a)], is never larger, so this one is what dp-accounting takes.
    """
    low, high = np.empty((2, len(clients.q), len(_WHOLE_ORDERS)))
    for places in _groups(clients):
        q, z = clients.q[places], clients.z[places[0]]
        nodes = _nodes(q, _RDP_NODES)
        if len(nodes) == _RDP_NODES:  # a node more below, so that the first cell has a chord to continue
            nodes = np.append(nodes[0] * (nodes[0] / nodes[1]), nodes)
        low[places], high[places] = _interpolate(q, nodes, _whole_orders_at(nodes, z))
    slack = _RELATIVE_ROUNDING * high + _ABSOLUTE_ROUNDING * _WHOLE_ORDERS
    return low - slack, high + slack


def _whole_orders_at(q: Array, z: float) -> Array:
    """[nodes, whole orders] log A_a(q) = log sum_i binom(a, i) (1 - q)^(a - i) q^i exp((i^2 - i) / 2z^2)."""
    if q[-1] == 1:  # a node of its own, see `_groups`
        return np.asarray(_WHOLE_ORDERS * (_WHOLE_ORDERS - 1) / (2 * z * z))[None, :]
    found = np.empty((len(q), len(_WHOLE_ORDERS)))
    for place, order in enumerate(_WHOLE_ORDERS):
        i = np.arange(order + 1)
        constant = _log_binomial(order, i) + (i * i - i) / (2 * z * z)
        terms = constant + i * np.log(q)[:, None] + (order - i) * np.log1p(-q)[:, None]
        found[:, place] = special.logsumexp(terms, axis=1)
    return found


def _interpolate(q: Array, nodes: Array, logs: Array) -> tuple[Array, Array]:
    """[clients, orders] logs of a continued and of a plain chord of exp(logs), which is convex and rises over nodes."""
    place = np.searchsorted(nodes, q, side="right") - 1
    before, after = np.maximum(place - 1, 0), np.minimum(place + 1, len(nodes) - 1)
    step = q - nodes[place]
    plain = step / np.where(after > place, nodes[after] - nodes[place], 1.0)
    continued = step / np.where(place > before, nodes[place] - nodes[before], 1.0)
    # In logs, since the values themselves would overflow.
    with np.errstate(divide="ignore"):
        share = np.log(plain)[:, None]
    high = np.logaddexp(logs[place] + np.log1p(-plain)[:, None], logs[after] + share)
    low = logs[place] + np.log1p(continued[:, None] * -np.expm1(logs[before] - logs[place]))
    return low, high


def _fractional_order_logs(order: float, clients: _Clients) -> tuple[Array, Array]:
    """[clients, 1] bounds of log A_a(q) as dp-accounting has it at a fractional order: a sum of positive terms.

    It adds absolute values of an alternating series (arXiv:1908.10530, Section 3.3), so its figure is never below
    A_a(q). Each term is |binom(a, i)| E[min^i max^(a - i)] over the smaller and the larger of 1 - q and q L; what
    follows k > a terms is at most E[min^k max^(a - k)] times the binomials left, which sum to |binom(a - 1, k - 1)|.
    Where the library gives the order up, it counts for neither bound.
    """
    gaussian = order * (order - 1) / (2 * clients.z**2)
    kept = max(int(order) + 1, _terms_for(order))
    terms = (np.logaddexp(*_log_term(order, i, clients)) + _log_binomial(order, i) for i in range(kept))
    at_least = reduce(np.logaddexp, terms)
    rest = np.logaddexp(*_log_term(order, kept, clients)) + _log_binomial(order - 1, kept - 1)
    at_most = np.logaddexp(at_least, rest)
    last = np.maximum(*_log_term(order, _LIBRARY_TERMS - 1, clients)) + _log_binomial(order, _LIBRARY_TERMS - 1)
    # Far out the exponents cancel to within their own rounding, here and in the library.
    slack = _RELATIVE_ROUNDING * np.abs(at_most) + 100 * _ABSOLUTE_ROUNDING * (1 + 1 / clients.z**2)
    low = np.where(last - at_most < _GIVES_UP + slack, at_least - slack, np.inf)
    high = np.where(last - at_least < _GIVES_UP - slack, at_most + slack, np.inf)
    whole = clients.q == 1
    low, high = np.where(whole, gaussian - slack, low), np.where(whole, gaussian + slack, high)
    return low[:, None], high[:, None]


def _log_term(order: float, i: int, clients: _Clients) -> tuple[Array, Array]:
    """[clients] logs of E[min^i max^(order - i)], see the caller: where q L is the smaller, and where the larger."""
    z, q = clients.z, np.where(clients.q == 1, 0.5, clients.q)  # the caller replaces q = 1
    log_q, log_rest, j = np.log(q), np.log1p(-q), order - i
    middle = z**2 * (log_rest - log_q) + 0.5
    below = i * log_q + j * log_rest + (i * i - i) / (2 * z**2) + special.log_ndtr((middle - i) / z)
    above = j * log_q + i * log_rest + (j * j - j) / (2 * z**2) + special.log_ndtr((j - middle) / z)
    return below, above


def _terms_for(order: float) -> int:
    """Enough terms of the series for the binomials that are left to be small."""
    i = np.arange(1, _MOST_TERMS)
    return 1 + int(np.count_nonzero(_log_binomial(order - 1, i) > np.log(_TAIL)))


def _log_binomial(n: float, k: npt.ArrayLike) -> Array:
    """log |binom(n, k)| for any real n."""
    return np.asarray(special.gammaln(n + 1) - special.gammaln(np.add(k, 1)) - special.gammaln(n - np.asarray(k) + 1))


# --- pld ---

_Node = tuple[float, float, float]  # z, q, discretization interval
_Question = tuple[int, float]  # count, delta


def _by_pld(clients: _Clients, places: npt.NDArray[np.intp], lower: Array, upper: Array, workers: int) -> None:
    """Replace rdp bounds in place: q and count rounded down and delta up to nodes for the lower one, and vice versa.

    Connect-the-dots takes the curve of hockey-stick divergences over exp(epsilon) at multiples of an interval and joins
    them by lines. So a pair of distributions that dominates another still does, a multiple of the interval gives a
    curve that is nowhere lower (it is convex), and composing keeps both orders.
    """
    some = clients.at(places)
    below, above = _rounded(some, up=False), _rounded(some, up=True)
    answers = _ask([*below, *above], workers)
    low, high = np.array([answers[q] for q in below]), np.array([answers[q] for q in above])
    certain = upper[places] <= PLD_LIMIT
    lower[places] = np.where(certain, low, np.minimum(low, lower[places]))
    upper[places] = np.where(certain, high, np.maximum(high, upper[places]))


def _rounded(clients: _Clients, *, up: bool) -> list[tuple[_Node, _Question]]:
    """For each client the question whose answer is its upper (or lower) epsilon."""
    q, count, delta, interval = np.empty((4, len(clients.q)))
    groups = list(_groups(clients))
    for places in groups:
        some = clients.at(places)
        few = len(np.unique(some.q)) <= _PLD_LOWER_NODES[0] and len(np.unique(some.count)) <= _PLD_LOWER_NODES[1]
        most = _PLD_UPPER_NODES if up and not few else _PLD_LOWER_NODES
        q[places] = _round(some.q, _nodes(some.q, max(8, most[0] // len(groups))), up=up)
        count[places] = _round(some.count, np.unique(np.rint(_nodes(some.count, most[1]))), up=up)
        delta[places] = _round(some.delta, _nodes(some.delta, most[2]), up=not up)
        interval[places] = _coarse(q[places], some.z) if up and not few else FINEST_INTERVAL
    delta += -_DELTA_ROUNDING if up else _DELTA_ROUNDING
    columns = zip(*(column.tolist() for column in (clients.z, q, interval, count.astype(int), delta)), strict=True)
    return [((z_k, q_k, interval_k), (count_k, delta_k)) for z_k, q_k, interval_k, count_k, delta_k in columns]


def _round(values: Array, nodes: Array, *, up: bool) -> Array:
    """The smallest node that is not below (or the largest that is not above) each value."""
    place = np.searchsorted(nodes, values) if up else np.searchsorted(nodes, values, side="right") - 1
    return np.asarray(nodes[place])


def _coarse(q: Array, z: Array) -> Array:
    """Multiples of the finest interval, a fraction of the spread q / z of one release; measured cost: 0.1 %."""
    wanted = np.minimum(q / (4 * np.maximum(z, 1.0)), _COARSEST_INTERVAL)
    return np.asarray(FINEST_INTERVAL * np.maximum(np.floor(wanted / FINEST_INTERVAL), 1.0))


def _ask(asked: list[tuple[_Node, _Question]], workers: int) -> dict[tuple[_Node, _Question], float]:
    """The pld epsilon of every distinct question, those of one node together, the dearest nodes first."""
    by_node: defaultdict[_Node, set[_Question]] = defaultdict(set)
    for node, question in asked:
        by_node[node].add(question)
    tasks = sorted(((node, sorted(questions)) for node, questions in by_node.items()), key=lambda task: -task[0][1])
    if workers == 1 or len(tasks) < 2:
        found = list(map(_answers, tasks))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(_answers, tasks))
    return {
        (node, question): value
        for (node, questions), values in zip(tasks, found, strict=True)
        for question, value in zip(questions, values, strict=True)
    }


def _answers(task: tuple[_Node, list[_Question]]) -> list[float]:
    """The pld epsilons of one node, each count composed once."""
    (z, q, interval), questions = task
    values: list[float] = []
    for count, asked in groupby(questions, key=lambda question: question[0]):
        loss = _gaussian_loss(z, q, count, interval)
        values += (float(loss.get_epsilon_for_delta(delta)) if delta > 0 else math.inf for _, delta in asked)
    return values


def _gaussian_loss(z: float, q: float, count: int, interval: float) -> Any:
    """The composed privacy loss distribution, as `accountants` makes it where the interval is the finest."""
    if interval == FINEST_INTERVAL:
        return total_loss((SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=count),), interval)
    if q == 1:
        return _single_gaussian_loss(z / math.sqrt(count), 1.0, interval)
    return _single_gaussian_loss(z, q, interval).self_compose(count)


@lru_cache(maxsize=1)
def _single_gaussian_loss(z: float, q: float, interval: float) -> Any:
    """The privacy loss distribution of one release; the counts of one node follow each other."""
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=interval
    )

"""Compose the costs of events and convert them into an epsilon, whatever their kind, for one client and for thousands.

dp-accounting is imported where an epsilon or a delta is computed: scipy.signal and scipy.stats come with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np

from fedpriv.accounting.composition.law import Accountant, Array, Event

# dp-accounting's default orders.
ORDERS = np.array([*(1 + tenths / 10 for tenths in range(1, 100)), *range(11, 64), 128, 256, 512, 1024])

# The orders at which a bound for any mechanism under Poisson sampling is known.
INTEGER_ORDERS = np.array([int(order) for order in ORDERS if float(order).is_integer()])

# Above this epsilon, pld takes minutes or gigabytes, and nobody needs its precision.
PLD_LIMIT = 100.0

# The finest value discretization interval of a privacy loss: dp-accounting's default.
FINEST_INTERVAL = 1e-4


def total_loss(events: Iterable[Event], value_interval: float) -> Any:
    """A privacy loss distribution that bounds the whole composition from above.

    Like dp-accounting's accountant, it starts from the identity, which truncates 1e-15 of the tails. Without that
    truncation the bound would be just as valid, but lower than the library's.

    Args:
        events: each with a known privacy loss distribution.
        value_interval: value discretization interval of the privacy loss, > 0.
    """
    with quiet_absl():
        return total_of((event.pld(value_interval) for event in events), value_interval)


def total_of(losses: Iterable[Any], value_interval: float) -> Any:
    """The composition of privacy loss distributions, as `total_loss` composes those of events."""
    from dp_accounting import pld

    identity = pld.privacy_loss_distribution.identity(value_interval)
    return reduce(lambda total, loss: total.compose(loss), losses, identity)


@contextmanager
def quiet_absl() -> Iterator[None]:
    """Silence the warning that an rdp order was left out: fewer orders only raise the bound."""
    from absl import logging as absl_logging

    root, silent, verbosity = logging.getLogger(), logging.NullHandler(), absl_logging.get_verbosity()
    root.addHandler(silent)  # without any handler, absl would configure the root logger of the whole process
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(verbosity)
        root.removeHandler(silent)


def epsilon_of_curve(curve: Array, delta: float) -> float:
    """Epsilon of a Renyi curve at `ORDERS`; infinite if the curve is infinite at every order.

    Source: Canonne, Kamath and Steinke 2020, Proposition 12, by dp-accounting.
    """
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, curve, delta)[0]) if np.isfinite(curve).any() else math.inf


def rdp_bounds(events: Sequence[Event], deltas: Sequence[float], accountant: Accountant) -> tuple[Array, Array]:
    """Bounds on histories of one event type from its Renyi curves; they are exact unless pld would be tighter.

    Args:
        events: [clients], at least one, all of one type.
        deltas: [clients], in (0, 1).
        accountant: `pld` or `rdp`.
    """
    curves = type(events[0]).rdp_of_many(events, ORDERS)
    upper = np.array([_epsilon(*history) for history in zip(events, curves, deltas, strict=True)])
    is_exact = accountant == "rdp" or not events[0].has_pld
    return (upper if is_exact else np.zeros(len(events))), upper


def _epsilon(event: Event, curve: Array, delta: float) -> float:
    if event.sampling_probability == 0:
        return 0.0
    remaining_delta = delta - event.total_delta
    if remaining_delta <= 0 or not event.is_noised or not event.is_guarantee:
        return math.inf
    return min(epsilon_of_curve(curve, remaining_delta), event.max_loss)


def nodes_of(values: Array, at_most: int) -> Array:
    """The distinct values or, if there are too many, a geometric grid from the smallest to the largest.

    Nodes stand in for the values of thousands of clients, which then need fewer curves than there are clients.
    """
    distinct = np.unique(values)
    if len(distinct) <= at_most:
        return distinct
    grid = np.geomspace(distinct[0], distinct[-1], at_most)
    grid[0], grid[-1] = distinct[0], distinct[-1]
    return grid


def rounded(values: Array, nodes: Array, *, up: bool) -> Array:
    """The smallest node that is not below (or the largest that is not above) each value."""
    index = np.searchsorted(nodes, values) if up else np.searchsorted(nodes, values, side="right") - 1
    return np.asarray(nodes[index])

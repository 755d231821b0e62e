"""Epsilons of many clients at once: bounds for each, in a fraction of the time that one by one would take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.accountants import ORDERS, check_accountant, check_delta, epsilon_of_curve
from fedpriv.accounting.events import Event, check_known
from fedpriv.accounting.law import Accountant, Array


@dataclass(frozen=True, kw_only=True)
class Brackets:
    """Bounds on the epsilons of many clients.

    Attributes:
        lower: [clients], never above the result of `accountants.epsilon_of` for each.
        upper: [clients], the epsilon to report, a bound on each client's; infinite without noise. For Gaussian noise
            never below the result of dp-accounting's accountant, nor, to within 0.1 %, below that of
            `accountants.epsilon_of`.
    """

    lower: Array
    upper: Array


def epsilons(
    events: Sequence[Event], deltas: Sequence[float], accountant: Accountant = "pld", *, workers: int = 1
) -> Brackets:
    """Bounds on the epsilon of [events[k]] at deltas[k] for every client k.

    Args:
        events: [clients], the whole history of each; no clients give empty arrays.
        deltas: [clients], in (0, 1); below 1e-14 the pld upper bound is infinite.
        accountant: `pld` or `rdp`.
        workers: processes for `pld`, >= 1. More than one requires that the caller's main module can be imported.

    Raises:
        ValueError: the lengths differ, an event is of an unknown type, a delta is outside (0, 1), the accountant is
            unknown, or workers < 1.
    """
    _check(events, deltas, accountant, workers)
    lower, upper = np.empty((2, len(events)))
    for event_type in dict.fromkeys(type(event) for event in events):
        rows = [row for row, event in enumerate(events) if type(event) is event_type]
        row_events, row_deltas = [events[row] for row in rows], [deltas[row] for row in rows]
        bounds = event_type.epsilon_bounds_of_many(row_events, row_deltas, accountant, workers)
        lower[rows], upper[rows] = bounds or rdp_bounds(row_events, row_deltas, accountant)
    return Brackets(lower=lower, upper=upper)


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


def _check(events: Sequence[Event], deltas: Sequence[float], accountant: str, workers: int) -> None:
    if len(events) != len(deltas):
        raise ValueError(f"events has {len(events)} entries, deltas has {len(deltas)}: must be one of each per client")
    for event in events:
        check_known(event)
    for delta in deltas:
        check_delta(delta)
    check_accountant(accountant)
    if workers < 1:
        raise ValueError(f"workers = {workers}: must be >= 1")

"""Epsilons of many clients at once: bounds for each of them, in a fraction of the time that one by one would take."""

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
    """Bounds of the epsilons of many clients.

    Attributes:
        lower: [clients], never above what `accountants.spent` gives each.
        upper: [clients], the epsilon to report; infinite without noise. Never below what dp-accounting's accountant
            gives each, and so what `accountants.spent` does to 0.1 %.
    """

    lower: Array
    upper: Array


def epsilons(
    events: Sequence[Event], deltas: Sequence[float], accountant: Accountant = "pld", *, workers: int = 1
) -> Brackets:
    """Bounds of the epsilon of [events[k]] at deltas[k] for every client k.

    Args:
        events: [clients], the whole history of each; none at all gives empty arrays.
        deltas: [clients], in (0, 1); a pld upper bound below 1e-14 is infinite.
        accountant: `pld` or `rdp`.
        workers: processes for `pld`, >= 1. More than one needs a caller whose main module may be imported.

    Raises:
        ValueError: the lengths differ, an event is none of the vocabulary, a delta is outside (0, 1), the accountant
            is unknown, or workers < 1.
    """
    _check(events, deltas, accountant, workers)
    lower, upper = np.empty((2, len(events)))
    for law in dict.fromkeys(type(event) for event in events):
        rows = [row for row, event in enumerate(events) if type(event) is law]
        of_law, their_deltas = [events[row] for row in rows], [deltas[row] for row in rows]
        bounds = law.epsilon_bounds_of_many(of_law, their_deltas, accountant, workers)
        lower[rows], upper[rows] = bounds or _by_rdp(of_law, their_deltas, accountant)
    return Brackets(lower=lower, upper=upper)


def _by_rdp(events: Sequence[Event], deltas: Sequence[float], accountant: Accountant) -> tuple[Array, Array]:
    """Bounds of histories of one law by its Renyi curves, which are exact unless pld would do better."""
    curves = type(events[0]).rdp_of_many(events, ORDERS)
    upper = np.array([_converted(*history) for history in zip(events, curves, deltas, strict=True)])
    is_exact = accountant == "rdp" or not events[0].has_pld
    return (upper if is_exact else np.zeros(len(events))), upper


def _converted(event: Event, curve: Array, delta: float) -> float:
    if event.sampling_probability == 0:
        return 0.0
    left = delta - event.total_delta
    if left <= 0 or not event.is_noised or not event.is_guarantee:
        return math.inf
    return min(epsilon_of_curve(curve, left), event.max_loss)


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

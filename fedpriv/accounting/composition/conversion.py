"""Compose the costs of events and convert them into an epsilon, whatever their kind.

dp-accounting is imported where an epsilon or a delta is computed: scipy.signal and scipy.stats come with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np

from fedpriv.accounting.composition.law import Array, Event

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
    from dp_accounting import pld

    with quiet_absl():
        identity = pld.privacy_loss_distribution.identity(value_interval)
        return reduce(lambda total, event: total.compose(event.pld(value_interval)), events, identity)


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

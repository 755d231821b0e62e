"""Epsilon of a composition of events: accountants `pld` and `rdp` (Google's dp-accounting) and `closed-form`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import dp_accounting
import numpy as np
import numpy.typing as npt
from absl import logging as absl_logging
from dp_accounting import pld, rdp

from fedpriv.accounting.events import Event, group

Accountant = Literal["pld", "rdp"]

_ORDERS = rdp.RdpAccountant().orders

# Above this, pld takes minutes or gigabytes, and nobody needs the digits.
PLD_LIMIT = 100.0


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """An epsilon with its delta and how it was found.

    Attributes:
        epsilon: >= 0, infinite when a release had no noise.
        delta: in (0, 1).
        accountant: the one that gave the number.
        upper_bound_only: True where the asked-for accountant was too costly and rdp stands in for it.
    """

    epsilon: float
    delta: float
    accountant: Accountant
    upper_bound_only: bool = False


def spent(events: Iterable[Event], delta: float, accountant: Accountant = "pld") -> PrivacySpent:
    """What the composition of all events costs at the given delta.

    Events are composed first and converted once. With `pld`, a composition whose rdp epsilon exceeds 100 is
    answered by rdp, marked as an upper bound.

    Args:
        events: in any order; none at all costs nothing.
        delta: in (0, 1).
        accountant: `pld` (tight) or `rdp` (fast, looser).

    Raises:
        ValueError: delta is outside (0, 1), or the accountant is unknown.
    """
    check_delta(delta)
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant = {accountant!r}: must be pld or rdp")
    grouped = tuple(sorted(group(events), key=repr))
    if not grouped:
        return PrivacySpent(epsilon=0.0, delta=delta, accountant=accountant)
    if any(event.noise_multiplier == 0 and event.sampling_probability > 0 for event in grouped):
        return PrivacySpent(epsilon=math.inf, delta=delta, accountant=accountant)
    by_rdp = _rdp_epsilon(grouped, delta)
    if accountant == "rdp" or by_rdp > PLD_LIMIT:
        return PrivacySpent(epsilon=by_rdp, delta=delta, accountant="rdp", upper_bound_only=accountant == "pld")
    return PrivacySpent(epsilon=_pld_epsilon(grouped, delta), delta=delta, accountant="pld")


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must lie in (0, 1), for instance 1e-5")


def _rdp_epsilon(events: tuple[Event, ...], delta: float) -> float:
    """Renyi curves of single releases, times their counts, added up and converted once."""
    total = np.sum([event.count * _rdp_curve(replace(event, count=1)) for event in events], axis=0)
    return float(rdp.compute_epsilon(_ORDERS, total, delta)[0])


@lru_cache(maxsize=65536)
def _rdp_curve(event: Event) -> npt.NDArray[np.float64]:
    """Renyi divergence of one release at dp-accounting's default orders."""
    accountant = rdp.RdpAccountant()
    with _quiet_absl():
        accountant.compose(_as_dp_event(event))
    curve: npt.NDArray[np.float64] = accountant.rdp
    return curve


@lru_cache(maxsize=4096)
def _pld_epsilon(events: tuple[Event, ...], delta: float) -> float:
    """By privacy loss distributions; equal histories, common across clients, are computed once."""
    accountant = pld.PLDAccountant()
    with _quiet_absl():
        for event in events:
            accountant.compose(_as_dp_event(event), event.count)
    return float(accountant.get_epsilon(delta))


def _as_dp_event(event: Event) -> Any:
    """One release of the event in dp-accounting's vocabulary; q = 1 is the plain Gaussian."""
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    if event.sampling_probability == 1:
        return gaussian
    return dp_accounting.PoissonSampledDpEvent(event.sampling_probability, gaussian)


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """Hide the note that an rdp order was left out: fewer orders only raise the bound."""
    root, silent, verbosity = logging.getLogger(), logging.NullHandler(), absl_logging.get_verbosity()
    root.addHandler(silent)  # without any handler absl would configure the root logger for the whole process
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(verbosity)
        root.removeHandler(silent)


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """The DP-LoRA paper's epsilon, for reproduction only: it neither enforces nor calibrates.

    Attributes:
        epsilon: c2 q sqrt(T ln(1/delta)) / (rho_bar sigma).
        conditions_hold: whether every condition of the theorem holds for constants c1 and c2.
        violated: the conditions that do not, in words.
    """

    epsilon: float
    conditions_hold: bool
    violated: tuple[str, ...]


def closed_form(
    *,
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    rho_bar: float = 1.0,
    c1: float = 1.0,
    c2: float = 2.0,
) -> ClosedForm:
    """The paper's closed-form epsilon and whether its conditions hold.

    No guarantee: the theorem's constants exist but are not known, and even where the conditions hold for
    c1 = 1, c2 = 2 the number can be below the true epsilon (q = 0.04, sigma = 1, T = 1e5: 86 against 197).

    Args:
        noise_multiplier: sigma > 0.
        sampling_probability: q in [0, 1].
        steps: T >= 1.
        delta: in (0, 1).
        rho_bar: sqrt(sum rho_k^2), in (0, 1].
        c1: constant of the range of validity, epsilon < c1 q^2 T.
        c2: constant of the noise bound.

    Source: Liu et al., Theorem 1 (Eq. 9); conditions of Abadi et al. 2016, Theorem 1.
    """
    check_delta(delta)
    scaled = rho_bar * noise_multiplier
    if scaled == 0:
        return ClosedForm(epsilon=math.inf, conditions_hold=False, violated=("rho_bar * sigma >= 1",))
    epsilon = c2 * sampling_probability * math.sqrt(steps * math.log(1 / delta)) / scaled
    conditions = {
        "rho_bar * sigma >= 1": scaled >= 1,
        "q < 1 / (16 rho_bar * sigma)": sampling_probability < 1 / (16 * scaled),
        "epsilon < c1 q^2 T": epsilon < c1 * sampling_probability**2 * steps,
    }
    violated = tuple(name for name, holds in conditions.items() if not holds)
    return ClosedForm(epsilon=epsilon, conditions_hold=not violated, violated=violated)

"""How much noise a target epsilon needs, and how many steps a budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from fedpriv.accounting.accountants import MAX_NOISE, Accountant, check_delta, spent
from fedpriv.accounting.events import Event, SubsampledGaussian, SubsampledLmo

_MAX_ROUNDS = 10**9
_LMO_TOLERANCE = 1e-4


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    steps: int,
    scale: float = 1.0,
    accountant: Accountant = "pld",
) -> float:
    """The smallest noise multiplier z that keeps a schedule within (epsilon, delta), to 1e-7 (rdp) or 1e-4 (pld).

    Guarantee: the schedule with the returned z costs at most epsilon by the given accountant.

    Args:
        epsilon: target, finite, > 0.
        delta: in (0, 1).
        sampling_probability: q in (0, 1].
        steps: noisy steps in all, >= 1.
        scale: what turns z into the effective noise multiplier: 1 / sensitivity factor, times rho_bar on the
            `rho` view; > 0.
        accountant: `pld` or `rdp`.

    Raises:
        ValueError: a value is out of range, or no noise up to 1e6 suffices.
    """
    check_delta(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon = {epsilon}: must be finite and > 0")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale = {scale}: must be finite and > 0")
    if not 0 < sampling_probability <= 1:
        raise ValueError(f"sampling_probability = {sampling_probability}: must lie in (0, 1]")

    def cost(z: float, by: Accountant) -> float:
        event = SubsampledGaussian(noise_multiplier=z * scale, sampling_probability=sampling_probability, count=steps)
        return spent([event], delta, by).epsilon

    # rdp is fast and hardly ever below pld: it finds the neighbourhood, the asked-for accountant the value.
    tolerance = 1e-7 if accountant == "rdp" else 1e-4
    found = _smallest(lambda z: cost(z, "rdp") <= epsilon, start=1.0, tolerance=tolerance)
    if accountant == "rdp":
        return found
    return _smallest(lambda z: cost(z, "pld") <= epsilon, start=found, tolerance=tolerance)


def noise_multiplier_for_all(
    epsilon: float,
    clients: Iterable[tuple[float, float]],
    *,
    steps: int,
    scale: float = 1.0,
    accountant: Accountant = "pld",
) -> float:
    """The smallest noise multiplier that keeps every client within epsilon at its own delta.

    Args:
        epsilon: target for each client, finite, > 0.
        clients: (sampling probability, delta) of each, at least one.
        steps: noisy steps in all of a client that takes part in every round, >= 1.
        scale: as for `noise_multiplier_for`.
        accountant: `pld` or `rdp`.

    Raises:
        ValueError: a value is out of range, there is no client, or no noise suffices.
    """
    # Who is sampled most needs the most noise; the others are checked, and rarely need more for their delta.
    ordered = sorted(set(clients), key=lambda client: (-client[0], client[1]))
    if not ordered:
        raise ValueError("clients: calibration needs at least one")
    found = 0.0
    for sampling_probability, delta in ordered:
        event = SubsampledGaussian(
            noise_multiplier=found * scale, sampling_probability=sampling_probability, count=steps
        )
        if spent([event], delta, accountant).epsilon > epsilon:
            found = noise_multiplier_for(
                epsilon,
                delta,
                sampling_probability=sampling_probability,
                steps=steps,
                scale=scale,
                accountant=accountant,
            )
    return found


def lmo_multiplier_for_all(epsilon: float, clients: Iterable[tuple[SubsampledLmo, float]]) -> float:
    """The smallest multiplier of LMO noise that keeps every client within epsilon at its own delta, by rdp.

    Args:
        epsilon: target for each client, finite, > 0.
        clients: (all releases of a client, with noise multiplied by 1, and its delta) of each, at least one.

    Raises:
        ValueError: epsilon is out of range, there is no client, or no noise suffices.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon = {epsilon}: must be finite and > 0")
    # Who is sampled most needs the most noise; the others are checked, and rarely need more for their delta.
    ordered = sorted(set(clients), key=lambda client: (-client[0].sampling_probability, client[1]))
    if not ordered:
        raise ValueError("clients: calibration needs at least one")
    found = 0.0
    for event, delta in ordered:

        def holds(z: float, event: SubsampledLmo = event, delta: float = delta) -> bool:
            noised = replace(event, parameters=event.parameters.scaled(1 / z))
            return spent([noised], delta, "rdp").epsilon <= epsilon

        if found == 0 or not holds(found):
            found = _smallest(holds, start=found or 1.0, tolerance=_LMO_TOLERANCE)
    return found


def _smallest(holds: Callable[[float], bool], *, start: float, tolerance: float) -> float:
    """The smallest z for which a monotone condition holds, from above, to a relative tolerance."""
    low = high = start
    while not holds(high):
        low, high = high, 1.5 * high
        if high > MAX_NOISE:
            raise ValueError(f"no noise multiplier up to {MAX_NOISE:g} meets the target; raise epsilon or delta")
    while low == high or holds(low):
        low, high = low / 1.5, low
        if low < 1 / MAX_NOISE:
            return high
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def rounds_within(
    epsilon: float,
    delta: float,
    *,
    each_round: Event,
    spent_before: Iterable[Event] = (),
    at_most: int | None = None,
    accountant: Accountant = "pld",
) -> int:
    """The largest number of whole rounds whose cost stays within (epsilon, delta); 0 if not even one does.

    Args:
        epsilon: budget, finite, > 0.
        delta: in (0, 1).
        each_round: what one round costs on the view that is asked for.
        spent_before: what was released before, on the same view.
        at_most: ask no further than this number of rounds; None asks until the budget ends.
        accountant: `pld` or `rdp`.

    Raises:
        ValueError: a value is out of range, or the budget never ends (more than 1e9 rounds).
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon = {epsilon}: must be finite and > 0")
    before = list(spent_before)

    def fits(rounds: int) -> bool:
        events = [*before, replace(each_round, count=rounds * each_round.count)]
        return spent(events, delta, accountant).epsilon <= epsilon

    if at_most is not None and (at_most == 0 or fits(at_most)):
        return at_most
    low, high = 0, 1
    while (at_most is None or high < at_most) and fits(high):
        low, high = high, 2 * high
        if high > _MAX_ROUNDS:
            raise ValueError(f"epsilon = {epsilon}: more than {_MAX_ROUNDS} rounds fit; the budget does not bind")
    high = high if at_most is None else min(high, at_most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

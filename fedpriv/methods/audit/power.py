"""How much an audit could find: its bounds if every guess were right, and those of an ideal attacker on the claim.

The ideal attacker sees, for each canary alone, the sum of what its record added to all releases and of their noise.
Attackers who see a model find less: canaries disturb each other, and a model does not show its weights' inner products
with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedpriv.errors import InputError
from fedpriv.methods.audit._bounds import fixed_num_guesses, num_correct, one_run_epsilon
from fedpriv.methods.audit.f_dp import schedule_epsilon
from fedpriv.privacy.accounting.events import SubsampledGaussian

# Attackers, of whom the median counts.
_ATTACKERS = 101


@dataclass(frozen=True, kw_only=True)
class AuditPower:
    """The lower bounds of epsilon that an audit may expect, as `one_run_audit` and as `schedule_epsilon` give them.

    Attributes:
        num_canaries: m.
        num_guesses: fixed beforehand.
        num_correct: of an ideal attacker, in the median.
        largest, largest_f_dp: if every guess is right, as they may be without noise.
        ideal, ideal_f_dp: of the median ideal attacker, if the claim is exactly true.
    """

    num_canaries: int
    num_guesses: int
    num_correct: int
    largest: float
    largest_f_dp: float
    ideal: float
    ideal_f_dp: float


def audit_power(
    events: Iterable[SubsampledGaussian],
    delta: float,
    num_canaries: int,
    *,
    confidence: float = 0.95,
    group_size: int = 1,
) -> AuditPower:
    """The power of an audit of these releases.

    Args:
        events: of a canary's holder, as they will be charged; all noised.
        delta: in (0, 1).
        num_canaries: of all clients, >= 2.
        confidence: in (0, 1).
        group_size: records that a canary consists of.

    Raises:
        InputError: there are fewer than two canaries, or an event is not Gaussian noise.
    """
    if num_canaries < 2:
        raise InputError(f"num_canaries = {num_canaries}: must be >= 2")
    released = tuple(events)
    if bad := [event for event in released if not isinstance(event, SubsampledGaussian) or not event.is_noised]:
        raise InputError(f"event {bad[0]}: an audit's power is known for Gaussian noise alone")
    num_guesses = fixed_num_guesses(num_canaries)
    typical = int(np.median(_correct(released, num_canaries, num_guesses, group_size)))

    def bounds(correct: int) -> tuple[float, float]:
        counts = {
            "num_canaries": num_canaries,
            "num_guesses": num_guesses,
            "num_correct": correct,
            "group_size": group_size,
        }
        by_one_run = one_run_epsilon(**counts, delta=delta, confidence=confidence)
        return float(by_one_run), schedule_epsilon(released, delta, **counts, confidence=confidence)

    (largest, largest_f_dp), (ideal, ideal_f_dp) = bounds(num_guesses), bounds(typical)
    return AuditPower(
        num_canaries=num_canaries,
        num_guesses=num_guesses,
        num_correct=typical,
        largest=largest,
        largest_f_dp=largest_f_dp,
        ideal=ideal,
        ideal_f_dp=ideal_f_dp,
    )


def _correct(events: tuple[SubsampledGaussian, ...], num: int, num_guesses: int, group_size: int) -> list[int]:
    """[attackers] right guesses of ideal attackers."""
    rng, found = np.random.default_rng(0), []
    for _ in range(_ATTACKERS):
        included = rng.random(num) < 0.5
        scores = np.zeros(num)
        for event in events:
            noise = event.effective_noise_multiplier
            drawn = rng.binomial(event.count * group_size, event.sampling_probability, num) * included
            # Releases with little noise tell more than others, and count more.
            scores += (drawn + noise * np.sqrt(event.count) * rng.standard_normal(num)) / noise**2
        found.append(int(num_correct(scores, included, np.array([num_guesses]))[0]))
    return found

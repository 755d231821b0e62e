"""The schedules of the white-box audits: claims, canaries, participation, and how many guesses are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedpriv.accounting.accountants import total_loss
from fedpriv.accounting.calibration import noise_multiplier_for
from fedpriv.accounting.composition.law import Array
from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.audit import f_dp, ladder, num_correct, one_run_epsilon
from simulations.studies.audit.harness import A, B, Setup, ideal_scores, update_spec

DELTA, CONFIDENCE = 1e-5, 0.95
CLAIMS = (1.0, 2.0, 4.0, 8.0)
CANARIES = (500, 1000, 5000)
CLIENTS = 5
SEEDS = 20
# Registered records of every client, included and excluded canaries among them; enough for batches of a tenth.
REGISTERED = 1000
PILOTS = 12
# How many claims the f-DP bound is searched among: the schedule with noise from 3 times that of the smallest claim down
# to 0.8 times that of the largest.
FAMILY = 48
_POINTS = np.concatenate([[0.0], np.geomspace(0.01, 20, 150)])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rounds of one step at a sampling probability."""

    name: str
    rounds: int
    sampling_probability: float


SCHEDULES = (
    Schedule(name="q = 1, 10 rounds", rounds=10, sampling_probability=1.0),
    Schedule(name="q = 0.1, 50 rounds", rounds=50, sampling_probability=0.1),
)


@cache
def noise_for(schedule: Schedule, epsilon: float) -> float:
    """The noise multiplier with which the schedule costs at most epsilon."""
    return noise_multiplier_for(
        epsilon, DELTA, sampling_probability=schedule.sampling_probability, steps=schedule.rounds
    )


def setup(schedule: Schedule, epsilon: float, seed: int, dimension: int) -> Setup:
    """The engine at the noise of the claim."""
    spec = update_spec(
        noise_multiplier=noise_for(schedule, epsilon),
        batch_size=round(schedule.sampling_probability * REGISTERED),
        rounds=schedule.rounds,
    )
    sizes = {A: dimension // 2, B: dimension - dimension // 2}
    return Setup(spec=spec, num_registered=REGISTERED, rounds=schedule.rounds, seed=seed, sizes=sizes)


def own_coordinates(num: int, dimension: int, *, disjoint: bool) -> Tensor:
    """Unit vectors along coordinates, for canaries that are dealt out to the clients in turn.

    Args:
        num: of canaries.
        dimension: of a gradient.
        disjoint: whether canaries of different clients have different coordinates, as an observer of sums needs.
    """
    directions = torch.zeros(num, dimension)
    coordinates = torch.arange(num) if disjoint else torch.arange(num) // CLIENTS
    directions[torch.arange(num), coordinates] = 1.0
    return directions


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Numbers of guesses for both bounds, fixed on pilots, and an ideal attacker's median bounds with them."""

    one_run: int
    f_dp: int
    ideal_one_run: float
    ideal_f_dp: float


@cache
def guesses(schedule: Schedule, epsilon: float, num_canaries: int, stddev_factor: float = 1.0) -> Guesses:
    """The numbers of guesses with the largest median bound over pilots: ideal attackers with coins of their own."""
    noise = stddev_factor * noise_for(schedule, epsilon)
    sizes = ladder(num_canaries)
    by_one_run, by_f_dp = [], []
    f_sizes = sizes[sizes >= 16][::2]
    for pilot in range(PILOTS):
        generator = np.random.default_rng([7, pilot])
        included = generator.random(num_canaries) < 0.5
        scores = ideal_scores(
            included,
            rounds=schedule.rounds,
            noise_stddev=noise,
            sampling_probability=schedule.sampling_probability,
            generator=generator,
        )
        by_one_run.append(lower_bounds(num_canaries, sizes, num_correct(scores, included, sizes)))
        correct = num_correct(scores, included, f_sizes)
        by_f_dp.append(
            [
                f_dp_epsilon(schedule, num_canaries, int(size), int(count))
                for size, count in zip(f_sizes, correct, strict=True)
            ]
        )
    medians, f_medians = np.median(by_one_run, axis=0), np.median(by_f_dp, axis=0)
    return Guesses(
        one_run=int(sizes[np.argmax(medians)]),
        f_dp=int(f_sizes[np.argmax(f_medians)]),
        ideal_one_run=float(medians.max()),
        ideal_f_dp=float(f_medians.max()),
    )


def lower_bounds(num_canaries: int, sizes: np.ndarray, correct: np.ndarray) -> Array:
    """The one-run bound for each number of guesses taken alone."""
    return one_run_epsilon(
        num_canaries=num_canaries, num_guesses=sizes, num_correct=correct, delta=DELTA, confidence=CONFIDENCE
    )


@cache
def f_dp_epsilon(schedule: Schedule, num_canaries: int, num_guesses: int, correct: int) -> float:
    """The epsilon of the last claim of the family that is rejected; 0 if none is.

    Every claim is the schedule's whole privacy curve at the noise that gives the epsilon; at q = 1, Gaussian DP.
    """
    inverse, epsilons = _family(schedule)
    rejected = f_dp.rejected(inverse, 1 - CONFIDENCE, num_canaries, num_guesses, correct, len(epsilons))
    end = int(np.argmin(rejected)) if not rejected.all() else len(epsilons)
    return float(epsilons[end - 1]) if end else 0.0


@cache
def _family(schedule: Schedule) -> tuple[f_dp.InverseBlowUp, Array]:
    """Inverse blow-up functions and epsilons of the schedule as its noise falls, from the accountant's whole curves."""
    most, least = 3 * noise_for(schedule, min(CLAIMS)), 0.8 * noise_for(schedule, max(CLAIMS))
    deltas, epsilons = [], []
    for noise_multiplier in np.geomspace(most, least, FAMILY):
        event = SubsampledGaussian(
            noise_multiplier=float(noise_multiplier),
            sampling_probability=schedule.sampling_probability,
            count=schedule.rounds,
        )
        loss = total_loss((event,), 1e-3)
        deltas.append([loss.get_delta_for_epsilon(float(point)) for point in _POINTS])
        epsilons.append(loss.get_epsilon_for_delta(DELTA))
    return f_dp.profile(_POINTS, np.array(deltas)), np.array(epsilons)

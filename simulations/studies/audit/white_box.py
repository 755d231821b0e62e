"""White-box audits of the correct engine, one line for each claim, schedule, number of canaries and seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedpriv.methods.audit import inclusions, ladder, num_correct, one_run_audit, one_run_epsilon
from fedpriv.methods.audit.f_dp import schedule_epsilon
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.views import Release
from simulations.studies.audit.harness import (
    A,
    B,
    Setup,
    ideal_scores,
    matched_scores,
    observe,
    observe_clients,
    update_spec,
)
from simulations.studies.harness import Line

DELTA, CONFIDENCE = 1e-5, 0.95
CLAIMS = (1.0, 2.0, 4.0, 8.0)
CANARIES = (500, 1000, 5000)
CLIENTS = 5
SEEDS = 20
# Registered records of every client, included and excluded canaries among them; enough for batches of a tenth.
REGISTERED = 1000
PILOTS = 12
VIEW_CLAIM, VIEW_CANARIES, VIEW_DIMENSION = 4.0, 4000, 4096


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rounds of one step at a sampling probability."""

    name: str
    rounds: int
    sampling_probability: float


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="q = 1, 10 rounds", rounds=10, sampling_probability=1.0),
        Schedule(name="q = 0.1, 50 rounds", rounds=50, sampling_probability=0.1),
    )
}


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


@cache
def num_guesses(schedule: Schedule, epsilon: float, num_canaries: int, stddev_factor: float = 1.0) -> int:
    """The number of guesses with the largest median one-run bound over pilots."""
    sizes = ladder(num_canaries)
    pilots = _pilots(schedule, epsilon, num_canaries, stddev_factor, sizes)
    bounds = [lower_bounds(num_canaries, sizes, correct) for correct in pilots]
    return int(sizes[np.argmax(np.median(bounds, axis=0))])


@cache
def num_guesses_f_dp(schedule: Schedule, epsilon: float, num_canaries: int) -> int:
    """The number of guesses with the largest median f-DP bound over the same pilots."""
    sizes = ladder(num_canaries)
    sizes = sizes[sizes >= 16][::2]
    bounds = [
        [f_dp_epsilon(schedule, num_canaries, *map(int, each)) for each in zip(sizes, correct, strict=True)]
        for correct in _pilots(schedule, epsilon, num_canaries, 1.0, sizes)
    ]
    return int(sizes[np.argmax(np.median(bounds, axis=0))])


def _pilots(
    schedule: Schedule, epsilon: float, num_canaries: int, stddev_factor: float, sizes: np.ndarray
) -> Iterator[np.ndarray]:
    """The right guesses of ideal attackers with coins of their own, [sizes] each."""
    for pilot in range(PILOTS):
        generator = np.random.default_rng([7, pilot])
        included = generator.random(num_canaries) < 0.5
        scores = _ideal(schedule, included, stddev_factor * noise_for(schedule, epsilon), generator)
        yield num_correct(scores, included, sizes)


def _ideal(schedule: Schedule, included: np.ndarray, noise: float, generator: np.random.Generator) -> Array:
    """Scores of an attacker who sees each canary separately under exactly this noise."""
    q = schedule.sampling_probability
    return ideal_scores(
        included, rounds=schedule.rounds, noise_stddev=noise, sampling_probability=q, generator=generator
    )


def lower_bounds(num_canaries: int, sizes: np.ndarray, correct: np.ndarray) -> Array:
    """The one-run bound for each number of guesses taken alone."""
    return one_run_epsilon(
        num_canaries=num_canaries, num_guesses=sizes, num_correct=correct, delta=DELTA, confidence=CONFIDENCE
    )


@cache
def f_dp_epsilon(schedule: Schedule, num_canaries: int, num_guesses: int, correct: int) -> float:
    """The lower bound on epsilon among the schedule's curves at other noise."""
    event = SubsampledGaussian(
        noise_multiplier=1.0, sampling_probability=schedule.sampling_probability, count=schedule.rounds
    )
    counts = {"num_canaries": num_canaries, "num_guesses": num_guesses, "num_correct": correct}
    return schedule_epsilon((event,), DELTA, **counts, confidence=CONFIDENCE)


def local_run(name: str, epsilon: float, num: int, seed: int) -> Line:
    """Audit one run of the engine by what the server sees, together with an ideal attacker that has other coins."""
    schedule, dimension = SCHEDULES[name], num // CLIENTS
    audited = setup(schedule, epsilon, seed, dimension)
    included = inclusions(num, audited.source("coins"))
    seen = observe(audited, own_coordinates(num, dimension, disjoint=False), included, num_clients=CLIENTS)
    noise, q = audited.spec.noise_multiplier, schedule.sampling_probability
    scores = matched_scores(seen.local, noise_stddev=noise, sampling_probability=q)
    fixed = np.array([num_guesses(schedule, epsilon, num), num_guesses_f_dp(schedule, epsilon, num)])
    generator = np.random.default_rng([11, seed])
    coins = generator.random(num) < 0.5
    ideal = _ideal(schedule, coins, noise, generator)
    return {
        "kind": "local",
        "schedule": schedule.name,
        "claim": epsilon,
        "accounted": epsilon_of([audited.event], DELTA).epsilon,
        "num_canaries": num,
        "seed": seed,
        "num_guesses": int(fixed[0]),
        "num_guesses_f_dp": int(fixed[1]),
        **_bounds(schedule, scores, included, fixed),
        "searched": one_run_audit(scores, included, delta=DELTA, confidence=CONFIDENCE).epsilon_lower,
        **{f"ideal_{name}": value for name, value in _bounds(schedule, ideal, coins, fixed).items()},
    }


def _bounds(schedule: Schedule, scores: Array, included: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    """Both bounds, each with its own number of guesses, [2]."""
    correct = num_correct(scores, included, sizes)
    return {
        "one_run": float(lower_bounds(len(scores), sizes[:1], correct[:1])[0]),
        "f_dp": f_dp_epsilon(schedule, len(scores), int(sizes[1]), int(correct[1])),
    }


def view_run(name: str, seed: int) -> Line:
    """Audit one run by its uploads and by their sums; `rho` has the observer of `local` but another claim."""
    schedule = SCHEDULES[name]
    audited = setup(schedule, VIEW_CLAIM, seed, VIEW_DIMENSION)
    included = inclusions(VIEW_CANARIES, audited.source("coins"))
    directions = own_coordinates(VIEW_CANARIES, VIEW_DIMENSION, disjoint=True)
    seen = observe(audited, directions, included, num_clients=CLIENTS)
    rho_bar = CLIENTS**-0.5
    # Who takes no part in the sums faces the noise of all clients.
    release = Release(event=audited.event, rho_bar=rho_bar, aggregate_scale=CLIENTS**0.5)
    bounds = {}
    for view, inner, factor in (("local", seen.local, 1.0), ("aggregate", seen.aggregate, CLIENTS**0.5)):
        scores = matched_scores(
            inner,
            noise_stddev=factor * audited.spec.noise_multiplier,
            sampling_probability=schedule.sampling_probability,
        )
        size = np.array([num_guesses(schedule, VIEW_CLAIM, VIEW_CANARIES, factor)])
        bounds[view] = float(lower_bounds(VIEW_CANARIES, size, num_correct(scores, included, size))[0])
    claims = {
        f"claim_{view}": epsilon_of([release.seen_by(view)], DELTA).epsilon for view in ("local", "rho", "aggregate")
    }
    return {"kind": "views", "schedule": schedule.name, "seed": seed, **bounds, **claims}


def client_run(epsilon: float, seed: int, num_clients: int = 1000) -> Line:
    """Audit one round of noise on the upload; a client is a canary, its data replaced or not."""
    once = Schedule(name="one upload", rounds=1, sampling_probability=1.0)
    noise_multiplier = 2 * noise_for(once, epsilon)  # the factor of replacement
    audited = Setup(
        spec=update_spec(noise_multiplier=noise_multiplier, noise_on="upload", clip_norm=0.5),
        num_registered=1,
        seed=100 * CLAIMS.index(epsilon) + seed,
        sizes={"canary.lora_A.weight": 8, "canary.lora_B.weight": 8},
    )
    bits = inclusions(num_clients, audited.source("coins"))
    scores = observe_clients(audited, bits).numpy().astype(float)
    size = np.array([num_guesses(once, epsilon, num_clients)])
    generator = np.random.default_rng([12, CLAIMS.index(epsilon), seed])
    coins = generator.random(num_clients) < 0.5
    ideal = _ideal(once, coins, noise_for(once, epsilon), generator)
    return {
        "kind": "clients",
        "claim": epsilon,
        "accounted": epsilon_of([audited.event], DELTA).epsilon,
        "num_canaries": num_clients,
        "seed": seed,
        "num_guesses": int(size[0]),
        "one_run": float(lower_bounds(num_clients, size, num_correct(scores, bits, size))[0]),
        "ideal_one_run": float(lower_bounds(num_clients, size, num_correct(ideal, coins, size))[0]),
    }

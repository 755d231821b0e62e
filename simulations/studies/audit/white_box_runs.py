"""White-box audits of the correct engine, one line for each claim, schedule, number of canaries and seed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.composition.law import Array
from fedpriv.accounting.views import Release
from fedpriv.audit import inclusions, num_correct, one_run_audit
from simulations.studies.audit.harness import Setup, ideal_scores, matched_scores, observe, observe_clients, update_spec
from simulations.studies.audit.schedules import (
    CANARIES,
    CLAIMS,
    CLIENTS,
    CONFIDENCE,
    DELTA,
    SCHEDULES,
    SEEDS,
    Guesses,
    Schedule,
    f_dp_epsilon,
    guesses,
    lower_bounds,
    noise_for,
    own_coordinates,
    setup,
)

VIEW_CLAIM, VIEW_CANARIES, VIEW_DIMENSION = 4.0, 4000, 4096


def local_runs() -> Iterator[tuple[str, Any]]:
    """(key, function that makes the line) of every audit of the `local` view."""
    for schedule in SCHEDULES:
        for epsilon in CLAIMS:
            for num in CANARIES:
                for seed in range(SEEDS):
                    key = f"local | {schedule.name} | {epsilon:g} | {num} | {seed}"
                    yield key, lambda s=schedule, e=epsilon, n=num, i=seed: local_run(s, e, n, i)


def local_run(schedule: Schedule, epsilon: float, num: int, seed: int) -> dict[str, Any]:
    """Audit one run of the engine by what the server sees, together with an ideal attacker that has other coins."""
    began = time.perf_counter()
    dimension = num // CLIENTS
    audited = setup(schedule, epsilon, seed, dimension)
    included = inclusions(num, audited.source("coins"))
    seen = observe(audited, own_coordinates(num, dimension, disjoint=False), included, num_clients=CLIENTS)
    noise, q = audited.spec.noise_multiplier, schedule.sampling_probability
    scores = matched_scores(seen.local, noise_stddev=noise, sampling_probability=q)
    fixed = guesses(schedule, epsilon, num)
    generator = np.random.default_rng([11, seed])
    coins = generator.random(num) < 0.5
    ideal = ideal_scores(coins, rounds=schedule.rounds, noise_stddev=noise, sampling_probability=q, generator=generator)
    return {
        "kind": "local",
        "schedule": schedule.name,
        "claim": epsilon,
        "accounted": epsilon_of([audited.event], DELTA).epsilon,
        "num_canaries": num,
        "seed": seed,
        "num_guesses": fixed.one_run,
        "num_guesses_f_dp": fixed.f_dp,
        **_bounds(schedule, scores, included, fixed),
        "searched": one_run_audit(scores, included, delta=DELTA, confidence=CONFIDENCE).epsilon_lower,
        **{f"ideal_{name}": value for name, value in _bounds(schedule, ideal, coins, fixed).items()},
        "seconds": time.perf_counter() - began,
    }


def _bounds(schedule: Schedule, scores: Array, included: np.ndarray, fixed: Guesses) -> dict[str, float]:
    sizes = np.array([fixed.one_run, fixed.f_dp])
    correct = num_correct(scores, included, sizes)
    return {
        "one_run": float(lower_bounds(len(scores), sizes[:1], correct[:1])[0]),
        "f_dp": f_dp_epsilon(schedule, len(scores), fixed.f_dp, int(correct[1])),
    }


def view_runs() -> Iterator[tuple[str, Any]]:
    """(key, function that makes the line) of the audits of all views on one schedule."""
    for schedule in SCHEDULES:
        for seed in range(SEEDS):
            yield f"views | {schedule.name} | {seed}", lambda s=schedule, i=seed: view_run(s, i)


def view_run(schedule: Schedule, seed: int) -> dict[str, Any]:
    """Audit one run by its uploads and by their sums; `rho` has the observer of `local` but another claim."""
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
        size = np.array([guesses(schedule, VIEW_CLAIM, VIEW_CANARIES, factor).one_run])
        bounds[view] = float(lower_bounds(VIEW_CANARIES, size, num_correct(scores, included, size))[0])
    claims = {
        f"claim_{view}": epsilon_of([release.seen_by(view)], DELTA).epsilon for view in ("local", "rho", "aggregate")
    }
    return {"kind": "views", "schedule": schedule.name, "seed": seed, **bounds, **claims}


def client_runs() -> Iterator[tuple[str, Any]]:
    """(key, function that makes the line) of the audits of client-level runs, with noise on the upload."""
    for epsilon in CLAIMS:
        for seed in range(SEEDS):
            yield f"clients | {epsilon:g} | {seed}", lambda e=epsilon, i=seed: client_run(e, i)


def client_run(epsilon: float, seed: int, num_clients: int = 1000) -> dict[str, Any]:
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
    size = np.array([guesses(once, epsilon, num_clients).one_run])
    generator = np.random.default_rng([12, CLAIMS.index(epsilon), seed])
    coins = generator.random(num_clients) < 0.5
    ideal = ideal_scores(
        coins,
        rounds=1,
        noise_stddev=noise_for(once, epsilon),
        sampling_probability=1.0,
        generator=generator,
    )
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

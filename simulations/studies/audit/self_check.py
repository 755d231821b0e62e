"""The self-check: what each detector says of the correct mechanism and of a broken one, seed by seed.

`python -m simulations.studies.audit run --only broken` runs it; the tests hold it to its rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from fedpriv.accounting.accountants import spent
from fedpriv.accounting.calibration import noise_multiplier_for
from fedpriv.accounting.lmo import parameters as lmo_parameters
from fedpriv.accounting.lmo.parameters import LmoParameters, UniformPart
from fedpriv.audit import canaries, checks
from fedpriv.audit.bounds import one_run_audit
from fedpriv.audit.harness import HEAD, A, B, LinearModel, Setup, observe, observed, records_of, update_spec
from fedpriv.audit.white_box import matched_scores
from simulations.studies.audit import broken_mechanisms as broken

SEEDS = range(20)
# Of the statistical tests: 20 seeds of 5 tests give a false alarm with probability 1e-4.
FALSE_ALARM = 1e-6
DELTA, CLAIM = 1e-5, 4.0
SIZES = {A: 256, B: 256, HEAD: 32}
DIMENSION = sum(SIZES.values())
# So many are guessed that the coins leave enough canaries on either side: of 256, 100 in and 100 out.
GUESSES, GUESSES_IN_B = 440, 200
LMO_CANARIES, LMO_DIMENSION, LMO_GUESSES = 2048, 2048, 1000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a detector said: flagged where `value` is beyond `limit`."""

    flagged: bool
    value: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """A broken mechanism, its detector, and the configuration at which both are run."""

    name: str
    detector: str
    configuration: str
    detect: Callable[[int], Finding]
    breaking: Callable[[], Any]


@cache
def noise_for(epsilon: float) -> float:
    return noise_multiplier_for(epsilon, DELTA, sampling_probability=1.0, steps=1)


def setup(seed: int, **changes: Any) -> Setup:
    spec = update_spec(**{"noise_multiplier": noise_for(CLAIM), "batch_size": 1000} | changes)
    return Setup(spec=spec, num_registered=1000, seed=seed, sizes=SIZES)


def audited(of: Setup, directions: torch.Tensor, guesses: int, claim: float) -> Finding:
    included = canaries.inclusions(len(directions), of.source("coins"))
    seen = observe(of, directions, included)
    scores = matched_scores(seen.local, noise_stddev=1.0, sampling_probability=1.0)  # any scale orders alike at q = 1
    found = one_run_audit(scores, included, num_guesses=guesses, delta=DELTA)
    return Finding(flagged=bool(found.epsilon_lower > claim), value=found.epsilon_lower, limit=claim)


def audit_everywhere(seed: int) -> Finding:
    """Canaries along the coordinates of all tensors, one for each."""
    of = setup(seed)
    return audited(of, canaries.coordinate_directions(DIMENSION, range(DIMENSION), DIMENSION), GUESSES, CLAIM)


def audit_of_b(seed: int) -> Finding:
    """Canaries along coordinates of B alone, one for each."""
    of = setup(seed)
    places = range(SIZES[A], SIZES[A] + SIZES[B])
    return audited(of, canaries.coordinate_directions(SIZES[B], places, DIMENSION), GUESSES_IN_B, CLAIM)


# u uniform close to 5: Laplace noise of scale 1/5, for which `published` is all but exact on one number.
LMO = LmoParameters(combination="mixture", uniform=UniformPart(weight=1.0, low=4.9, high=5.1))


def lmo_setup(seed: int) -> Setup:
    spec = update_spec(
        noise_multiplier=1.0,
        batch_size=LMO_CANARIES,
        mechanism="lmo",
        mechanism_parameters=json.dumps({**lmo_parameters.to_dict(LMO), "accounting": "published"}),
    )
    return Setup(spec=spec, num_registered=LMO_CANARIES, seed=seed, sizes={A: LMO_DIMENSION})


@cache
def lmo_claim(accounting: str) -> float:
    return spent([replace(lmo_setup(0).event, accounting=accounting)], DELTA, "rdp", unproven=True).epsilon


def audit_of_lmo(seed: int, *, dense: bool = True, accounting: str = "published") -> Finding:
    of = lmo_setup(seed)
    if dense:
        directions = canaries.dense_directions(LMO_CANARIES, LMO_DIMENSION, of.source("directions"))
    else:
        directions = canaries.coordinate_directions(LMO_CANARIES, range(LMO_DIMENSION), LMO_DIMENSION)
    return audited(of, directions, LMO_GUESSES, lmo_claim(accounting))


def idle_noise(of: Setup, rounds: int) -> np.ndarray:
    """[rounds, values] uploads of a client with no records, in units of C."""
    model = LinearModel(torch.zeros(1, of.dimension), of.sizes)
    return torch.stack([observed(of, model, [records_of([])], round_)[0] for round_ in range(rounds)]).numpy()


def noise_scale(seed: int) -> Finding:
    of = setup(seed, clip_norm=2.5)
    p = checks.noise_scale_p_value(idle_noise(of, 4), of.spec.noise_multiplier)
    return Finding(flagged=bool(p < FALSE_ALARM), value=p, limit=FALSE_ALARM)


def repeated_noise(seed: int) -> Finding:
    p = checks.repeated_noise_p_value(idle_noise(setup(seed), 8))
    return Finding(flagged=bool(p < FALSE_ALARM), value=p, limit=FALSE_ALARM)


def influence(seed: int) -> Finding:
    of = Setup(spec=update_spec(noise_multiplier=1.0, batch_size=5), num_registered=5, seed=seed, sizes=SIZES)
    found = checks.largest_influence(of, seed=seed)
    return Finding(flagged=bool(found > 1 + checks.ROUNDING), value=found, limit=1 + checks.ROUNDING)


def batch_sizes(seed: int) -> Finding:
    """By the uploads of 100 clients of 200 records whose gradients are all alike, at q = 0.1."""
    of = Setup(spec=update_spec(noise_multiplier=0.01, batch_size=20), num_registered=200, seed=seed, sizes={A: 1})
    model = LinearModel(torch.full((1, 1), 1e3), of.sizes)
    sums = observed(of, model, [records_of([0] * 200)] * 100, 0).numpy()
    p = checks.batch_size_p_value(np.round(sums), num_records=200, sampling_probability=0.1)
    return Finding(flagged=bool(p < FALSE_ALARM), value=p, limit=FALSE_ALARM)


def cases() -> Iterator[Case]:
    """All broken mechanisms."""
    one = f"claim {CLAIM:g} at delta {DELTA:g}, one release, q = 1"
    every = f"{one}; {DIMENSION} canaries along all coordinates, {GUESSES} guesses"
    in_b = f"{one}; {SIZES[B]} canaries along the coordinates of B, {GUESSES_IN_B} guesses"
    scale = f"4 uploads of {DIMENSION} values, nothing drawn, C = 2.5"
    raw = "5 records, raw gradients 1e3 and 1e6 times C, A, B and head"
    yield Case(
        name="no noise", detector="audit", configuration=every, detect=audit_everywhere, breaking=broken.no_noise
    )
    yield Case(
        name="noise on A only",
        detector="audit",
        configuration=in_b,
        detect=audit_of_b,
        breaking=lambda: broken.noise_on_a_only(SIZES),
    )
    yield Case(
        name="LMO under published accounting",
        detector="audit",
        configuration=f"u uniform in [4.9, 5.1], one release; {LMO_CANARIES} canaries along dense directions of "
        f"{LMO_DIMENSION} values, {LMO_GUESSES} guesses; what is broken is the accounting",
        detect=audit_of_lmo,
        breaking=nullcontext,
    )
    yield Case(
        name="noise not scaled by C",
        detector="noise scale",
        configuration=scale,
        detect=noise_scale,
        breaking=broken.noise_not_scaled,
    )
    yield Case(
        name="half the multiplier",
        detector="noise scale",
        configuration=scale,
        detect=noise_scale,
        breaking=broken.half_the_noise,
    )
    yield Case(
        name="clipping of the mean",
        detector="influence",
        configuration=raw,
        detect=influence,
        breaking=broken.mean_clipped,
    )
    yield Case(
        name="head left unclipped",
        detector="influence",
        configuration=raw,
        detect=influence,
        breaking=lambda: broken.head_unclipped(SIZES[HEAD]),
    )
    yield Case(
        name="same noise in every round",
        detector="repeated noise",
        configuration=f"8 uploads of {DIMENSION} values, nothing drawn",
        detect=repeated_noise,
        breaking=broken.same_noise_every_round,
    )
    yield Case(
        name="fixed batches claimed as Poisson",
        detector="batch sizes",
        configuration="100 batches of 200 records at q = 0.1",
        detect=batch_sizes,
        breaking=broken.fixed_batches,
    )


def finding(case: Case, seed: int) -> Finding:
    """What the case's detector says of its broken mechanism."""
    with case.breaking():
        return case.detect(seed)


def finding_of_correct(case: Case, seed: int) -> Finding:
    """What it says of the correct one; for LMO, of the same noise under `sound` accounting."""
    if case.detect is audit_of_lmo:
        return audit_of_lmo(seed, accounting="sound")
    return case.detect(seed)


def run(case: Case, seeds: range = SEEDS) -> dict[str, Any]:
    """How often the broken and the correct mechanism are flagged, as a line of the study."""
    found = [finding(case, seed) for seed in seeds]
    right = [finding_of_correct(case, seed) for seed in seeds]
    return {
        "kind": "broken",
        "name": case.name,
        "detector": case.detector,
        "configuration": case.configuration,
        "num_seeds": len(seeds),
        "num_flagged": sum(one.flagged for one in found),
        "median": float(np.median([one.value for one in found])),
        "limit": found[0].limit,
        "num_flagged_correct": sum(one.flagged for one in right),
        "median_correct": float(np.median([one.value for one in right])),
        "limit_correct": right[0].limit,
    }

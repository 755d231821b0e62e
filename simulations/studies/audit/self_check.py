"""The self-check: what each detector says of the correct mechanism and of a broken one, seed by seed.

`python -m simulations.studies.audit run --only broken` runs it; the tests hold the detectors to their rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.calibration import noise_multiplier_for
from fedpriv.accounting.lmo.parameters import LmoParameters, UniformPart
from fedpriv.audit import inclusions, one_run_audit
from simulations.studies.audit import broken_mechanisms as broken
from simulations.studies.audit import harness
from simulations.studies.audit.harness import (
    HEAD,
    A,
    B,
    LinearModel,
    Setup,
    matched_scores,
    observe,
    observed,
    records_of,
    update_spec,
)

SEEDS = range(20)
# Of the statistical tests: 20 seeds of 5 tests raise a false alarm with probability 1e-4.
FALSE_ALARM = 1e-6
DELTA, CLAIM = 1e-5, 4.0
SIZES = {A: 256, B: 256, HEAD: 32}
DIMENSION = sum(SIZES.values())
# Few enough that the coins leave enough canaries on either side: of 256, 100 in and 100 out.
NUM_GUESSES, NUM_GUESSES_IN_B = 440, 200
LMO_CANARIES, LMO_DIMENSION, LMO_NUM_GUESSES = 2048, 2048, 1000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A detector's finding: flagged where `value` is beyond `limit`."""

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
    breaking: Callable[[], broken.Broken]


@cache
def noise_for(epsilon: float) -> float:
    """The noise multiplier at which one release at q = 1 costs epsilon."""
    return noise_multiplier_for(epsilon, DELTA, sampling_probability=1.0, steps=1)


def setup(seed: int, **changes: Any) -> Setup:
    """One release of 1000 records at q = 1 with the noise of the claim, unless changed."""
    spec = update_spec(**{"noise_multiplier": noise_for(CLAIM), "batch_size": 1000} | changes)
    return Setup(spec=spec, num_registered=1000, seed=seed, sizes=SIZES)


def audited(setup: Setup, directions: torch.Tensor, num_guesses: int, claim: float) -> Finding:
    """Whether a one-run audit with canaries along these directions finds more than the claimed epsilon."""
    included = inclusions(len(directions), setup.source("coins"))
    seen = observe(setup, directions, included)
    # At q = 1 the scale of the noise does not change the order of the scores.
    scores = matched_scores(seen.local, noise_stddev=1.0, sampling_probability=1.0)
    result = one_run_audit(scores, included, num_guesses=num_guesses, delta=DELTA)
    return Finding(flagged=bool(result.epsilon_lower > claim), value=result.epsilon_lower, limit=claim)


def audit_everywhere(seed: int) -> Finding:
    """Canaries along the coordinates of all tensors, one for each."""
    directions = harness.coordinate_directions(DIMENSION, range(DIMENSION), DIMENSION)
    return audited(setup(seed), directions, NUM_GUESSES, CLAIM)


def audit_of_b(seed: int) -> Finding:
    """Canaries along the coordinates of B alone, one for each."""
    coordinates = range(SIZES[A], SIZES[A] + SIZES[B])
    directions = harness.coordinate_directions(SIZES[B], coordinates, DIMENSION)
    return audited(setup(seed), directions, NUM_GUESSES_IN_B, CLAIM)


# u uniform close to 5: Laplace noise of scale 1/5, for which `published` is all but exact on one number.
LMO = LmoParameters(combination="mixture", uniform=UniformPart(weight=1.0, low=4.9, high=5.1))


def lmo_setup(seed: int, accounting: str = "published") -> Setup:
    """One release of 2048 records at q = 1 with LMO noise."""
    spec = update_spec(
        noise_multiplier=1.0,
        batch_size=LMO_CANARIES,
        mechanism="lmo",
        mechanism_parameters=json.dumps({**LMO.to_dict(), "accounting": accounting}),
    )
    return Setup(spec=spec, num_registered=LMO_CANARIES, seed=seed, sizes={A: LMO_DIMENSION})


@cache
def lmo_claim(accounting: str) -> float:
    """The epsilon of the LMO noise by either accounting."""
    return epsilon_of([lmo_setup(0, accounting).event], DELTA, "rdp", allow_unproven=True).epsilon


def audit_of_lmo(seed: int, *, dense: bool = True, accounting: str = "published") -> Finding:
    """Canaries along dense directions, or along the coordinates, against the claim of an accounting."""
    setup = lmo_setup(seed)
    if dense:
        directions = harness.dense_directions(LMO_CANARIES, LMO_DIMENSION, setup.source("directions"))
    else:
        directions = harness.coordinate_directions(LMO_CANARIES, range(LMO_DIMENSION), LMO_DIMENSION)
    return audited(setup, directions, LMO_NUM_GUESSES, lmo_claim(accounting))


def idle_noise(setup: Setup, num_rounds: int) -> np.ndarray:
    """[rounds, values] uploads of a client without records, in units of C."""
    model = LinearModel(torch.zeros(1, setup.dimension), setup.sizes)
    uploads = [observed(setup, model, [records_of([])], round_)[0] for round_ in range(num_rounds)]
    return np.asarray(torch.stack(uploads))


def noise_scale(seed: int) -> Finding:
    """Whether the noise of four uploads has another scale than claimed."""
    scaled = setup(seed, clip_norm=2.5)
    return _by_p_value(harness.noise_scale_p_value(idle_noise(scaled, 4), scaled.spec.noise_multiplier))


def repeated_noise(seed: int) -> Finding:
    """Whether the noise of eight uploads repeats itself."""
    return _by_p_value(harness.repeated_noise_p_value(idle_noise(setup(seed), 8)))


def influence(seed: int) -> Finding:
    """Whether one record moves an upload by more than the claimed sensitivity."""
    spec = update_spec(noise_multiplier=1.0, batch_size=5)
    largest = harness.largest_influence(Setup(spec=spec, num_registered=5, seed=seed, sizes=SIZES), seed=seed)
    return Finding(flagged=bool(largest > 1 + harness.ROUNDING), value=largest, limit=1 + harness.ROUNDING)


def batch_sizes(seed: int) -> Finding:
    """Whether batch sizes are not Poisson's, by uploads of 100 clients of 200 records of equal gradients, q = 0.1."""
    spec = update_spec(noise_multiplier=0.01, batch_size=20)
    alike = Setup(spec=spec, num_registered=200, seed=seed, sizes={A: 1})
    model = LinearModel(torch.full((1, 1), 1e3), alike.sizes)
    sums = observed(alike, model, [records_of([0] * 200)] * 100, 0).numpy()
    return _by_p_value(harness.batch_size_p_value(np.round(sums), num_records=200, sampling_probability=0.1))


def _by_p_value(p_value: float) -> Finding:
    return Finding(flagged=bool(p_value < FALSE_ALARM), value=p_value, limit=FALSE_ALARM)


def cases() -> Iterator[Case]:
    """All broken mechanisms."""
    one = f"claim {CLAIM:g} at delta {DELTA:g}, one release, q = 1"
    every = f"{one}; {DIMENSION} canaries along all coordinates, {NUM_GUESSES} guesses"
    in_b = f"{one}; {SIZES[B]} canaries along the coordinates of B, {NUM_GUESSES_IN_B} guesses"
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
        breaking=partial(broken.noise_on_a_only, SIZES),
    )
    yield Case(
        name="LMO under published accounting",
        detector="audit",
        configuration=f"u uniform in [4.9, 5.1], one release; {LMO_CANARIES} canaries along dense directions of "
        f"{LMO_DIMENSION} values, {LMO_NUM_GUESSES} guesses; what is broken is the accounting",
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
        breaking=partial(broken.head_unclipped, SIZES[HEAD]),
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
    """The finding of the case's detector on its broken mechanism."""
    with case.breaking():
        return case.detect(seed)


def finding_of_correct(case: Case, seed: int) -> Finding:
    """Its finding on the correct mechanism; for LMO, on the same noise under `sound` accounting."""
    if case.detect is audit_of_lmo:
        return audit_of_lmo(seed, accounting="sound")
    return case.detect(seed)


def run(case: Case, seeds: range = SEEDS) -> dict[str, Any]:
    """How often the broken and the correct mechanism are flagged, as a line of the study."""
    of_broken = [finding(case, seed) for seed in seeds]
    of_correct = [finding_of_correct(case, seed) for seed in seeds]
    return {
        "kind": "broken",
        "name": case.name,
        "detector": case.detector,
        "configuration": case.configuration,
        "num_seeds": len(seeds),
        "num_flagged": sum(each.flagged for each in of_broken),
        "median": float(np.median([each.value for each in of_broken])),
        "limit": of_broken[0].limit,
        "num_flagged_correct": sum(each.flagged for each in of_correct),
        "median_correct": float(np.median([each.value for each in of_correct])),
        "limit_correct": of_correct[0].limit,
    }

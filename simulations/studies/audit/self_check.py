"""The self-check: what each detector says of mechanisms broken on purpose, and how often the bounds are wrong.

A mechanism is broken by replacing one piece of the engine. `python -m simulations.studies.audit run --only broken`
runs the detectors seed by seed, `--only coverage` the bounds on exactly epsilon-DP and exactly Gaussian mechanisms; the
tests hold the detectors to their rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy import special
from torch import Tensor

from fedpriv.learning.training import PoissonSampler, stacked
from fedpriv.learning.training.local_update import planned_event
from fedpriv.learning.training.private_sums import Parts, add_clipped, clip_unit, clipped_rows
from fedpriv.methods.audit import f_dp, inclusions, ladder, num_correct, one_run_audit, one_run_epsilon
from fedpriv.privacy.accounting import trade_off
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters, UniformPart
from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource
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
from simulations.studies.harness import Line

SEEDS = range(20)
# Of the statistical tests: 20 seeds of 5 tests raise a false alarm with probability 1e-4.
FALSE_ALARM = 1e-6
DELTA, CLAIM = 1e-5, 4.0
SIZES = {A: 256, B: 256, HEAD: 32}
DIMENSION = sum(SIZES.values())
# Few enough that the coins leave enough canaries on either side: of 256, 100 in and 100 out.
NUM_GUESSES, NUM_GUESSES_IN_B = 440, 200
LMO_CANARIES, LMO_DIMENSION, LMO_NUM_GUESSES = 2048, 2048, 1000
TRIALS, CONFIDENCE = 2000, 0.95


Broken = AbstractContextManager[Any]


def _noise_changed(change: Callable[[Tensor, Tensor, float], Tensor]) -> Broken:
    """Gaussian noise whose events claim what they should, but whose result is `change(sums, noised, clip_norm)`."""
    gaussian = MECHANISMS["gaussian"]
    add_noise = gaussian.add_noise

    def changed(sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]) -> tuple[Tensor, list[Event]]:
        noised, events = add_noise(sums, request, sources)
        return change(sums, noised, request.clip_norm), events

    return patch.object(gaussian, "add_noise", changed)


def no_noise() -> Broken:
    """The sums are released as they are."""
    return _noise_changed(lambda sums, noised, clip_norm: sums.clone())


def noise_on_a_only(sizes: Mapping[str, int]) -> Broken:
    """B and a head get no noise."""
    names = list(sizes)
    start = sum(sizes[name] for name in names[: names.index(A)])
    columns = slice(start, start + sizes[A])

    def change(sums: Tensor, noised: Tensor, clip_norm: float) -> Tensor:
        result = sums.clone()
        result[:, columns] = noised[:, columns]
        return result

    return _noise_changed(change)


def noise_not_scaled() -> Broken:
    """The standard deviation is z, whatever C is."""
    return _noise_changed(lambda sums, noised, clip_norm: sums + (noised - sums) / clip_norm)


def half_the_noise() -> Broken:
    """The noise multiplier is half of what is claimed."""
    return _noise_changed(lambda sums, noised, clip_norm: sums + (noised - sums) / 2)


def same_noise_every_round() -> Broken:
    """Every round adds the noise of the first."""
    first: list[Tensor] = []

    def change(sums: Tensor, noised: Tensor, clip_norm: float) -> Tensor:
        if not first:
            first.append(noised - sums)
        return sums + first[0]

    return _noise_changed(change)


def mean_clipped() -> Broken:
    """The mean of the batch is clipped, then multiplied by the batch size to give the sum."""

    def add(totals: Tensor, rows: Tensor, owners: Tensor, clip_norm: float, parts: Parts) -> None:
        for owner in owners.unique().tolist():
            own = rows[owners == owner]
            mean = clipped_rows(own.mean(dim=0, keepdim=True), clip_norm, parts)[0]
            totals[owner] += (len(own) * mean / clip_unit(clip_norm)).to(torch.int64)

    return patch.object(stacked, "add_clipped", add)


def head_unclipped(head_size: int) -> Broken:
    """The last values, those of a head, bypass the clipping."""

    def add(totals: Tensor, rows: Tensor, owners: Tensor, clip_norm: float, parts: Parts) -> None:
        body = rows.clone()
        body[:, -head_size:] = 0
        add_clipped(totals, body, owners, clip_norm, parts)
        steps = (rows[:, -head_size:].double() / clip_unit(clip_norm)).to(torch.int64)
        totals[:, -head_size:].index_add_(0, owners, steps)

    return patch.object(stacked, "add_clipped", add)


def fixed_batches() -> Broken:
    """Every batch has the expected size: shuffled, not Poisson."""

    def draw(self: PoissonSampler, num_records: int) -> list[int]:
        size = min(num_records, self.expected_batch_size)
        order = torch.argsort(self.source.normal(num_records))
        chosen: list[int] = order[:size].tolist()
        return chosen

    return patch.object(PoissonSampler, "draw", draw)


def half_charged() -> Broken:
    """A release of several steps is charged as one of half as many."""

    def halved(*planned: Any) -> Event:
        event = planned_event(*planned)
        return event.with_count(event.count // 2)

    return patch.object(harness, "planned_event", halved)


@dataclass(frozen=True, kw_only=True)
class SelfCheckFinding:
    """A detector's finding: flagged where `value` is beyond `limit`."""

    flagged: bool
    value: float
    limit: float


@dataclass(frozen=True)
class BrokenMechanism:
    """A broken mechanism, its detector, and the configuration at which both are run."""

    name: str
    detector: str
    configuration: str
    detect: Callable[[int], SelfCheckFinding]
    breaking: Callable[[], Broken]


@cache
def noise_for(epsilon: float) -> float:
    """The noise multiplier at which one release at q = 1 costs epsilon."""
    return noise_multiplier_for(epsilon, DELTA, sampling_probability=1.0, steps=1)


def setup(seed: int, **changes: Any) -> Setup:
    """One release of 1000 records at q = 1 with the noise of the claim, unless changed."""
    spec = update_spec(**{"noise_multiplier": noise_for(CLAIM), "batch_size": 1000} | changes)
    return Setup(spec=spec, num_registered=1000, seed=seed, sizes=SIZES)


def audited(setup: Setup, directions: torch.Tensor, num_guesses: int, claim: float) -> SelfCheckFinding:
    """Whether a one-run audit with canaries along these directions finds more than the claimed epsilon."""
    included = inclusions(len(directions), setup.source("coins"))
    seen = observe(setup, directions, included)
    # At q = 1 the scale of the noise does not change the order of the scores.
    scores = matched_scores(seen.local, noise_stddev=1.0, sampling_probability=1.0)
    result = one_run_audit(scores, included, num_guesses=num_guesses, delta=DELTA)
    return SelfCheckFinding(flagged=bool(result.epsilon_lower > claim), value=result.epsilon_lower, limit=claim)


def audit_everywhere(seed: int) -> SelfCheckFinding:
    """Canaries along the coordinates of all tensors, one for each."""
    directions = harness.coordinate_directions(DIMENSION, range(DIMENSION), DIMENSION)
    return audited(setup(seed), directions, NUM_GUESSES, CLAIM)


def audit_of_b(seed: int) -> SelfCheckFinding:
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


def audit_of_lmo(seed: int, *, dense: bool = True, accounting: str = "published") -> SelfCheckFinding:
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


def noise_scale(seed: int) -> SelfCheckFinding:
    """Whether the noise of four uploads has another scale than claimed."""
    scaled = setup(seed, clip_norm=2.5)
    return _by_p_value(harness.noise_scale_p_value(idle_noise(scaled, 4), scaled.spec.noise_multiplier))


def charged_steps(seed: int) -> SelfCheckFinding:
    """Whether the noise of four uploads is that of another number of steps than each is charged for."""
    several = setup(seed, local_steps=4)
    charged = several.spec.noise_multiplier * several.event.count**0.5
    return _by_p_value(harness.noise_scale_p_value(idle_noise(several, 4), charged))


def repeated_noise(seed: int) -> SelfCheckFinding:
    """Whether the noise of eight uploads repeats itself."""
    return _by_p_value(harness.repeated_noise_p_value(idle_noise(setup(seed), 8)))


def influence(seed: int) -> SelfCheckFinding:
    """Whether one record moves an upload by more than the claimed sensitivity."""
    spec = update_spec(noise_multiplier=1.0, batch_size=5)
    largest = harness.largest_influence(Setup(spec=spec, num_registered=5, seed=seed, sizes=SIZES), seed=seed)
    return SelfCheckFinding(flagged=bool(largest > 1 + harness.ROUNDING), value=largest, limit=1 + harness.ROUNDING)


def batch_sizes(seed: int) -> SelfCheckFinding:
    """Whether batch sizes are not Poisson's, by uploads of 100 clients of 200 records of equal gradients, q = 0.1."""
    spec = update_spec(noise_multiplier=0.01, batch_size=20)
    alike = Setup(spec=spec, num_registered=200, seed=seed, sizes={A: 1})
    model = LinearModel(torch.full((1, 1), 1e3), alike.sizes)
    sums = observed(alike, model, [records_of([0] * 200)] * 100, 0).numpy()
    return _by_p_value(harness.batch_size_p_value(np.round(sums), num_records=200, sampling_probability=0.1))


def _by_p_value(p_value: float) -> SelfCheckFinding:
    return SelfCheckFinding(flagged=bool(p_value < FALSE_ALARM), value=p_value, limit=FALSE_ALARM)


def cases() -> Iterator[BrokenMechanism]:
    """All broken mechanisms."""
    one = f"claim {CLAIM:g} at delta {DELTA:g}, one release, q = 1"
    every = f"{one}; {DIMENSION} canaries along all coordinates, {NUM_GUESSES} guesses"
    in_b = f"{one}; {SIZES[B]} canaries along the coordinates of B, {NUM_GUESSES_IN_B} guesses"
    of_lmo = (
        f"u uniform in [4.9, 5.1], one release; {LMO_CANARIES} canaries along dense directions of {LMO_DIMENSION} "
        f"values, {LMO_NUM_GUESSES} guesses; what is broken is the accounting"
    )
    scale = f"4 uploads of {DIMENSION} values, nothing drawn, C = 2.5"
    steps = f"4 uploads of 4 steps and {DIMENSION} values, nothing drawn"
    repeated = f"8 uploads of {DIMENSION} values, nothing drawn"
    raw = "5 records, raw gradients 1e3 and 1e6 times C, A, B and head"
    batches = "100 batches of 200 records at q = 0.1"
    yield BrokenMechanism("no noise", "audit", every, audit_everywhere, no_noise)
    yield BrokenMechanism("noise on A only", "audit", in_b, audit_of_b, partial(noise_on_a_only, SIZES))
    yield BrokenMechanism("LMO under published accounting", "audit", of_lmo, audit_of_lmo, nullcontext)
    yield BrokenMechanism("noise not scaled by C", "noise scale", scale, noise_scale, noise_not_scaled)
    yield BrokenMechanism("half the multiplier", "noise scale", scale, noise_scale, half_the_noise)
    yield BrokenMechanism("charges for half of the steps", "noise scale", steps, charged_steps, half_charged)
    yield BrokenMechanism("clipping of the mean", "influence", raw, influence, mean_clipped)
    yield BrokenMechanism("head left unclipped", "influence", raw, influence, partial(head_unclipped, SIZES[HEAD]))
    yield BrokenMechanism(
        "same noise in every round", "repeated noise", repeated, repeated_noise, same_noise_every_round
    )
    yield BrokenMechanism("fixed batches claimed as Poisson", "batch sizes", batches, batch_sizes, fixed_batches)


def finding(case: BrokenMechanism, seed: int) -> SelfCheckFinding:
    """The finding of the case's detector on its broken mechanism."""
    with case.breaking():
        return case.detect(seed)


def finding_of_correct(case: BrokenMechanism, seed: int) -> SelfCheckFinding:
    """Its finding on the correct mechanism; for LMO, on the same noise under `sound` accounting."""
    if case.detect is audit_of_lmo:
        return audit_of_lmo(seed, accounting="sound")
    return case.detect(seed)


def broken_run(name: str, seeds: range = SEEDS) -> Line:
    """How often a case's broken and correct mechanism are flagged."""
    (case,) = (each for each in cases() if each.name == name)
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


def randomised_response(epsilon: float, num_canaries: int) -> Line:
    """The share of trials in which the one-run bound exceeds epsilon, all canaries guessed."""
    generator = np.random.default_rng([21, 0])
    correct = generator.binomial(num_canaries, special.expit(epsilon), size=TRIALS)
    bounds = one_run_epsilon(
        num_canaries=num_canaries, num_guesses=num_canaries, num_correct=correct, delta=0.0, confidence=CONFIDENCE
    )
    return {
        "kind": "coverage",
        "mechanism": "randomised response",
        "epsilon": epsilon,
        "num_canaries": num_canaries,
        "trials": TRIALS,
        "num_exceeding": int((bounds > epsilon).sum()),
        "median": float(np.median(bounds)),
    }


def graded(epsilon: float, num_canaries: int = 5000) -> Line:
    """The same with graded scores and a number of guesses that is fixed, searched for, or searched for and paid for.

    Each canary's answer is randomised response; its score is the answer's sign times an uninformative size.
    """
    generator = np.random.default_rng([22, 0])
    sizes = ladder(num_canaries)
    correct = np.empty((TRIALS, len(sizes)), dtype=np.int64)
    for trial in range(TRIALS):
        included = generator.random(num_canaries) < 0.5
        truthful = generator.random(num_canaries) < special.expit(epsilon)
        signs = np.where(included == truthful, 1.0, -1.0)
        correct[trial] = num_correct(signs * generator.random(num_canaries), included, sizes)
    fixed = len(sizes) // 2

    def bound(confidence: float) -> np.ndarray:
        return one_run_epsilon(
            num_canaries=num_canaries, num_guesses=sizes, num_correct=correct, delta=0.0, confidence=confidence
        )

    alone = bound(CONFIDENCE)
    paid = bound(1 - (1 - CONFIDENCE) / len(sizes))
    return {
        "kind": "graded",
        "epsilon": epsilon,
        "num_canaries": num_canaries,
        "trials": TRIALS,
        "num_sizes": len(sizes),
        "num_exceeding_fixed": int((alone[:, fixed] > epsilon).sum()),
        "num_exceeding_unpaid": int((alone.max(axis=1) > epsilon).sum()),
        "num_exceeding_paid": int((paid.max(axis=1) > epsilon).sum()),
    }


def gaussian(mu: float, num_canaries: int, num_guesses: int) -> Line:
    """The share of trials in which the f-DP test rejects mu-GDP at the level 5 % for an exactly mu-GDP mechanism."""
    generator = np.random.default_rng([23, 0])
    sizes = np.array([num_guesses])
    counts = np.empty(TRIALS, dtype=np.int64)
    for trial in range(TRIALS):
        included = generator.random(num_canaries) < 0.5
        scores = included + generator.standard_normal(num_canaries) / mu
        counts[trial] = num_correct(scores, included, sizes)[0]
    worst = {
        int(count): bool(
            f_dp.rejected(trade_off.gaussian(mu), 1 - CONFIDENCE, num_canaries, num_guesses, int(count))[0]
        )
        for count in np.unique(counts)
    }
    return {
        "kind": "coverage",
        "mechanism": "Gaussian, f-DP bound",
        "epsilon": trade_off.gaussian_epsilon(mu, 1e-5),
        "num_canaries": num_canaries,
        "trials": TRIALS,
        "num_exceeding": sum(worst[int(count)] for count in counts),
        "median": None,
    }

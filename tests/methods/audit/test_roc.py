"""The curve that is printed as the most an attacker finds, held against the attacker of the real engine."""

import math
from functools import cache

import numpy as np
import pytest

from fedpriv.methods.audit import inclusions
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.risk import Risk, risk_of
from simulations.studies.audit import white_box
from simulations.studies.audit.harness import matched_scores, observe

# Each of the two bands of a ROC misses the truth with at most this probability.
MISSED = 5e-4


def excess(scores: np.ndarray, included: np.ndarray, risk: Risk) -> float:
    """How far a measured ROC, less its bands by Dvoretzky, Kiefer, Wolfowitz and Massart, lies above the curve."""
    thresholds = np.unique(scores)
    outside, inside = (np.sort(scores[included == world]) for world in (False, True))
    fpr, tpr = (1 - np.searchsorted(world, thresholds) / len(world) for world in (outside, inside))
    low, high = (math.sqrt(math.log(2 / MISSED) / (2 * len(world))) for world in (inside, outside))
    return float((tpr - low - np.array(risk.curve(np.minimum(fpr + high, 1.0)))).max())


@cache
def measured(name: str, seed: int, num: int) -> tuple[np.ndarray, np.ndarray, SubsampledGaussian]:
    """Scores of the best attacker on uploads of the engine, the canaries' coins, and the event that was charged."""
    schedule, dimension = white_box.SCHEDULES[name], num // white_box.CLIENTS
    audited = white_box.setup(schedule, 4.0, seed, dimension)
    included = inclusions(num, audited.source("coins"))
    directions = white_box.own_coordinates(num, dimension, disjoint=False)
    seen = observe(audited, directions, included, num_clients=white_box.CLIENTS)
    noise, q = audited.spec.noise_multiplier, schedule.sampling_probability
    return matched_scores(seen.local, noise_stddev=noise, sampling_probability=q), included, audited.event


def check(name: str, seed: int, num: int) -> bool:
    """Whether a claim of 1.7 times the noise is refuted; the true one never is."""
    scores, included, event = measured(name, seed, num)
    assert excess(scores, included, risk_of([event], 1e-5)) <= 0, (name, seed)
    return excess(scores, included, risk_of([event.with_noise(1.7)], 1e-5)) > 0


def test_the_measured_roc_lies_under_the_printed_curve():
    assert check("q = 1, 10 rounds", 0, 5000)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(white_box.SCHEDULES))
def test_the_measured_roc_lies_under_the_printed_curve_in_all_of_ten_seeds(name):
    assert sum(check(name, seed, 5000) for seed in range(10)) >= 9

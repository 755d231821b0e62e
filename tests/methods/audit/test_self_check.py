"""Every deliberately broken mechanism is flagged by the detector that has power over it, and the correct one passes."""

from collections.abc import Iterable

import pytest
import torch

from simulations.studies.audit import self_check
from simulations.studies.audit.self_check import (
    CLAIM,
    SEEDS,
    audit_of_lmo,
    audited,
    cases,
    finding,
    finding_of_correct,
    setup,
)

CASES = {case.name: case for case in cases()}


# A kind of each fault every day; these take longest.
LONG = ("LMO under published accounting", "fixed batches claimed as Poisson", "noise on A only")


def every_day(names: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in names]


@pytest.mark.parametrize("name", every_day(CASES))
def test_broken_mechanism_is_flagged_in_19_of_20_seeds(name):
    assert sum(finding(CASES[name], seed).flagged for seed in SEEDS) >= 19


@pytest.mark.parametrize("name", every_day({case.detect: name for name, case in CASES.items()}.values()))
def test_correct_mechanism_passes(name):
    # A bound above the claim has probability 5 % at most, and in truth far less; the tests' false alarm is 1e-6.
    seeds = SEEDS if CASES[name].detector != "audit" else range(5)
    assert not any(finding_of_correct(CASES[name], seed).flagged for seed in seeds)


def test_single_coordinates_cannot_see_published_accounting():
    assert not any(audit_of_lmo(seed, dense=False).flagged for seed in range(3))
    assert self_check.lmo_claim("published") < self_check.lmo_claim("sound")


def test_noise_at_half_the_multiplier_is_too_little_for_the_audit_to_flag():
    """Why the noise's scale has a test of its own: the true epsilon is some 9, what is found stays below the claim."""
    directions = torch.eye(self_check.DIMENSION)
    with self_check.half_the_noise():
        found = audited(setup(0), directions, 100, CLAIM)
    assert 0.5 < found.value < CLAIM

"""Calibration finds the least noise that meets a target, and the most rounds that a budget allows."""

import math
from dataclasses import replace

import pytest

from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import (
    _smallest,
    calibrate,
    calibrate_all,
    noise_multiplier_for,
    rounds_within,
)
from fedpriv.privacy.accounting.events import SubsampledLmo
from fedpriv.privacy.accounting.gaussian import MAX_NOISE
from tests.events import gaussian
from tests.privacy.accounting.lmo_oracle import uniform

DELTA = 1e-5


def cost(z, q, steps, accountant):
    return epsilon_of([gaussian(z, q, steps)], DELTA, accountant).epsilon


def test_a_larger_target_needs_less_noise_also_beyond_100():
    targets = (80.0, 100.0, 110.0)
    noise = [noise_multiplier_for(target, DELTA, sampling_probability=0.5, steps=300) for target in targets]
    assert [cost(z, 0.5, 300, "pld") for z in noise] == pytest.approx(targets, rel=1e-3)
    assert noise == sorted(set(noise), reverse=True)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_releases_whose_noise_is_given_count_towards_the_target(accountant):
    fixed = [gaussian(4.0)]

    def schedule(z):
        return [gaussian(z, 0.16, 30)]

    z = calibrate(schedule, 2.0, DELTA, accountant, fixed=fixed)
    assert z == calibrate_all([(schedule, DELTA)], 2.0, accountant, fixed=fixed)
    assert z > calibrate(schedule, 2.0, DELTA, accountant)
    costs = [epsilon_of([*schedule(noise), *fixed], DELTA, accountant).epsilon for noise in (z, 0.998 * z)]
    assert costs[0] <= 2.0 < costs[1]


def test_half_the_scale_needs_twice_the_noise_multiplier():
    options = {"sampling_probability": 0.1, "steps": 20, "accountant": "rdp"}
    plain, half = (noise_multiplier_for(1.0, DELTA, scale=scale, **options) for scale in (1.0, 0.5))
    assert half == pytest.approx(2 * plain, rel=2e-4)


@pytest.mark.parametrize(("accountant", "per_round"), [("pld", 3), ("rdp", 1)])
def test_one_more_round_would_exceed_the_budget(accountant, per_round):
    each_round = gaussian(1.2, 0.1, per_round)
    rounds = rounds_within(3.0, DELTA, each_round=each_round, accountant=accountant)
    assert rounds >= 1
    assert cost(1.2, 0.1, rounds * per_round, accountant) <= 3.0 < cost(1.2, 0.1, (rounds + 1) * per_round, accountant)


def test_a_budget_below_the_cost_of_one_round_allows_none():
    one = gaussian(0.5, 0.5)
    found = {rounds_within(0.01, DELTA, each_round=one, **most) for most in ({}, {"at_most": 0}, {"at_most": 1})}
    assert found == {0}


def test_earlier_releases_leave_fewer_rounds_and_the_count_stops_at_the_given_maximum():
    each_round = gaussian(1.2, 0.1)
    alone = rounds_within(2.0, DELTA, each_round=each_round)
    before = [replace(each_round, count=alone - 3)]
    for most, expected in (({}, 3), ({"at_most": 2}, 2), ({"at_most": 9}, 3)):
        assert rounds_within(2.0, DELTA, each_round=each_round, spent_before=before, **most) == expected


@pytest.mark.parametrize(
    "change",
    [{"epsilon": 0.0}, {"epsilon": float("inf")}, {"delta": 0.0}, {"sampling_probability": 0.0}, {"scale": 0.0}],
)
def test_impossible_targets_are_refused_by_name(change):
    arguments = {"epsilon": 1.0, "delta": DELTA, "sampling_probability": 0.1, "steps": 10, "scale": 1.0, **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        noise_multiplier_for(arguments.pop("epsilon"), arguments.pop("delta"), **arguments)


def test_one_noise_multiplier_keeps_every_client_within_the_target():
    clients = [(0.05, 1e-5), (0.16, 1e-5), (0.15, 1e-9)]

    def schedule(q):
        return lambda z: [gaussian(z, q, 30)]

    z = calibrate_all([(schedule(q), delta) for q, delta in clients], 2.0, accountant="rdp")
    costs = [epsilon_of(schedule(q)(z), delta, "rdp").epsilon for q, delta in clients]
    assert max(costs) <= 2.0 < max(costs) * 1.01
    assert costs.index(max(costs)) == 2, "here the smaller delta needs more noise than the larger sampling probability"
    with pytest.raises(ValueError, match="at least one"):
        calibrate_all([], 2.0)


def test_noise_without_a_privacy_loss_distribution_is_calibrated_by_rdp():
    def schedule(z):
        scaled = uniform(0.1, 0.5).scaled(1 / z)
        return [SubsampledLmo(parameters=scaled, sensitivity=1.0, dimension=1, sampling_probability=0.1, count=20)]

    z = calibrate(schedule, 2.0, DELTA)
    assert epsilon_of(schedule(z), DELTA).epsilon <= 2.0 < epsilon_of(schedule(z * 0.998), DELTA).epsilon


@pytest.mark.parametrize("threshold", [1e-5, 0.7, 1.0, 3.1, 5e3, 9.9e5, MAX_NOISE])
@pytest.mark.parametrize(
    "cost", [lambda low: 1.0, lambda low: math.inf, lambda low: low], ids=["step", "pole", "slope"]
)
def test_the_smallest_noise_is_found_whatever_the_cost_looks_like_and_none_is_refused(threshold, cost):
    def excess(z):
        return -1.0 if z >= threshold else cost(threshold / z - 1)

    found = _smallest(excess, start=1.0, tolerance=1e-4)
    assert threshold <= found <= threshold * (1 + 1e-4)
    with pytest.raises(ValueError, match="no noise multiplier up to 1e"):
        _smallest(lambda z: 1.0, start=1.0, tolerance=1e-4)

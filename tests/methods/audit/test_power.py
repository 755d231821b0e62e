"""The power of an audit: what it could find at most, against closed forms and audits of exact noise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from fedpriv.errors import InputError
from fedpriv.methods.audit import audit_power, one_run_audit
from fedpriv.privacy.accounting import SubsampledGaussian, epsilon_of


def _gaussian(noise: float, count: int = 1) -> SubsampledGaussian:
    return SubsampledGaussian(noise_multiplier=noise, sampling_probability=1.0, count=count)


def test_the_most_that_can_be_found_is_that_of_guesses_that_are_all_right():
    power = audit_power([_gaussian(4.0)], 1e-5, 400)
    included = np.random.default_rng(0).random(400) < 0.5
    found = one_run_audit(included.astype(float), included, delta=1e-5, num_guesses=power.num_guesses)
    assert power.largest == found.epsilon_lower
    assert power.ideal < power.largest


def test_an_ideal_attacker_is_right_as_often_as_gaussian_tails_say():
    """At mu = 2 and of all canaries guessed, each guess is right with probability Phi(1)."""
    power = audit_power([_gaussian(1.0, count=4)], 1e-5, 24)
    assert power.num_guesses == 24
    assert power.num_correct == pytest.approx(24 * special.ndtr(1.0), abs=1.5)


def test_two_releases_are_weighed_by_their_noise():
    """A release with much noise after one with little takes nothing away."""
    alone = audit_power([_gaussian(1.0)], 1e-5, 1000)
    both = audit_power([_gaussian(1.0), _gaussian(50.0)], 1e-5, 1000)
    assert both.num_correct >= alone.num_correct - 2


def test_bounds_stay_below_the_claim_and_rise_with_canaries():
    event = SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.2, count=20)
    claimed = epsilon_of([event], 1e-5).epsilon
    powers = [audit_power([event], 1e-5, num) for num in (50, 400, 3000)]
    assert powers[0].largest < powers[1].largest < powers[2].largest
    assert powers[0].ideal_f_dp < powers[2].ideal_f_dp < claimed
    assert all(power.ideal <= power.ideal_f_dp for power in powers)


def test_what_has_no_power_is_refused():
    with pytest.raises(InputError, match="num_canaries = 1"):
        audit_power([_gaussian(1.0)], 1e-5, 1)
    with pytest.raises(InputError, match="Gaussian noise alone"):
        audit_power([_gaussian(0.0)], 1e-5, 10)

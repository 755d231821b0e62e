"""Views of one history, the closed form, accounts."""

from __future__ import annotations

import math

import pytest

from fedpriv.accounting.accounts import Accounts
from fedpriv.accounting.curves import closed_form, spent
from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.accounting.views import Release, default_delta, rho_bar, seen_by

EVENT = SubsampledGaussian(noise_multiplier=1.88, sampling_probability=0.16, count=3)


def test_rho_bar_of_equal_and_unequal_weights():
    assert rho_bar([0.2] * 5) == pytest.approx(1 / math.sqrt(5))
    assert rho_bar([0.3, 0.25, 0.2, 0.15, 0.1]) == pytest.approx(math.sqrt(0.225))
    assert rho_bar([1.0]) == 1.0
    with pytest.raises(ValueError, match="sum to"):
        rho_bar([0.5, 0.4])


def test_rho_view_scales_the_noise_of_each_round_by_its_own_rho_bar():
    releases = [Release(event=EVENT, rho_bar=0.5), Release(event=EVENT, rho_bar=0.25)]
    assert [event.noise_multiplier for event in seen_by(releases, "local")] == [1.88, 1.88]
    assert [event.noise_multiplier for event in seen_by(releases, "rho")] == pytest.approx([0.94, 0.47])
    assert all(event.count == 3 for event in seen_by(releases, "rho"))


def test_default_delta():
    assert default_delta(400) == 1e-5
    assert default_delta(10**6) == 1e-7
    with pytest.raises(ValueError, match="num_records"):
        default_delta(0)


def test_accounts_compose_first_and_convert_once():
    accounts = Accounts({0: 400, 1: 10**6})
    for _ in range(10):
        accounts.record(0, Release(event=EVENT, rho_bar=0.5))
    whole = SubsampledGaussian(noise_multiplier=1.88, sampling_probability=0.16, count=30)
    assert accounts.spent(0, "local", "pld") == spent([whole], 1e-5, "pld")
    assert accounts.spent(0, "rho", "rdp").epsilon > accounts.spent(0, "local", "rdp").epsilon
    assert accounts.spent(1, "local", "pld").epsilon == 0
    assert accounts.deltas == {0: 1e-5, 1: 1e-7}
    assert accounts.largest("local", "rdp") == accounts.spent(0, "local", "rdp").epsilon
    assert accounts.num_releases(0) == 10


def test_accounts_refuse_strangers_and_impossible_deltas():
    with pytest.raises(KeyError):
        Accounts({0: 10}).record(1, Release(event=EVENT, rho_bar=1.0))
    with pytest.raises(ValueError, match="delta = 2"):
        Accounts({0: 10}, delta=2.0)


def test_closed_form_reproduces_the_papers_formula():
    # Liu et al., Eq. 9 with c2 = 2, worked by hand: 2 * 0.01 * sqrt(100 ln 1e5) / (0.5 * 2) = 0.67861...
    answer = closed_form(noise_multiplier=2.0, sampling_probability=0.01, steps=100, delta=1e-5, rho_bar=0.5)
    assert answer.epsilon == pytest.approx(0.678614, abs=1e-6)
    assert not answer.conditions_hold
    assert answer.violated == ("epsilon < c1 q^2 T",)


def test_closed_form_can_under_report_where_its_conditions_hold():
    answer = closed_form(noise_multiplier=1.0, sampling_probability=0.04, steps=10**5, delta=1e-5)
    assert answer.conditions_hold
    assert answer.epsilon == pytest.approx(86, abs=0.5)
    event = SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.04, count=10**5)
    assert spent([event], 1e-5, "rdp").epsilon > 190


def test_closed_form_names_every_condition_that_fails():
    answer = closed_form(noise_multiplier=0.5, sampling_probability=0.5, steps=10, delta=1e-5)
    assert answer.violated == ("rho_bar * sigma >= 1", "q < 1 / (16 rho_bar * sigma)", "epsilon < c1 q^2 T")

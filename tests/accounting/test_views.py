"""Views of one history, and accounts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.accounting.accounts import Accounts
from fedpriv.accounting.curves import spent
from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.accounting.views import Release, default_delta, rho_bar

EVENT = SubsampledGaussian(noise_multiplier=1.88, sampling_probability=0.16, count=3)


def test_rho_bar_of_equal_and_unequal_weights():
    assert rho_bar([0.2] * 5) == pytest.approx(1 / math.sqrt(5))
    assert rho_bar([0.3, 0.25, 0.2, 0.15, 0.1]) == pytest.approx(math.sqrt(0.225))
    assert rho_bar([1.0]) == 1.0
    with pytest.raises(ValueError, match="sum to"):
        rho_bar([0.5, 0.4])


def test_rho_view_scales_the_noise_of_each_round_by_its_own_rho_bar():
    releases = [Release(event=EVENT, rho_bar=0.5), Release(event=EVENT, rho_bar=0.25)]
    assert [release.seen_by("local").noise_multiplier for release in releases] == [1.88, 1.88]
    assert [release.seen_by("rho").noise_multiplier for release in releases] == pytest.approx([0.94, 0.47])
    assert all(release.seen_by("rho").count == 3 for release in releases)


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


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.floats(0, 1e3))
def test_rho_view_never_has_more_noise_than_local(sizes, z):
    share = rho_bar([size / sum(sizes) for size in sizes])
    assert len(sizes) ** -0.5 * (1 - 1e-9) <= share <= 1
    event = SubsampledGaussian(noise_multiplier=z, sampling_probability=0.1)
    local, rho = (Release(event=event, rho_bar=share).seen_by(view) for view in ("local", "rho"))
    assert rho.noise_multiplier <= local.noise_multiplier
    assert (rho.sampling_probability, rho.count) == (local.sampling_probability, local.count)


@pytest.mark.parametrize("view", ["aggregate", "Local", ""])
def test_unknown_view_is_refused(view):
    with pytest.raises(ValueError, match="view"):
        Release(event=EVENT, rho_bar=0.5).seen_by(view)


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, math.nan])
def test_release_with_impossible_rho_bar_is_refused(bad):
    with pytest.raises(ValueError, match="rho_bar"):
        Release(event=EVENT, rho_bar=bad)

"""Accounts grow only, belong to one client each, and convert at that client's delta."""

from __future__ import annotations

import math

import pytest

from fedpriv.accounting.accounts import Accounts
from fedpriv.accounting.curves import spent
from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.accounting.views import Release


def release(z=1.5, rho_bar=0.5):
    return Release(event=SubsampledGaussian(noise_multiplier=z, sampling_probability=0.1, count=2), rho_bar=rho_bar)


def test_one_clients_release_costs_no_other_client():
    accounts = Accounts({0: 50, 1: 50})
    accounts.record(0, release())
    assert accounts.spent(1, "local", "rdp").epsilon == 0
    assert accounts.spent(0, "local", "rdp").epsilon > 0


@pytest.mark.parametrize("view", ["local", "rho"])
def test_every_release_raises_the_cost(view):
    accounts, costs = Accounts({0: 50}), []
    for _ in range(4):
        accounts.record(0, release())
        costs.append(accounts.spent(0, view, "rdp").epsilon)
    assert costs == sorted(set(costs))
    assert accounts.num_releases(0) == 4


def test_asking_changes_nothing():
    accounts = Accounts({0: 50})
    accounts.record(0, release())
    assert len({accounts.spent(0, "rho", "rdp") for _ in range(3)}) == 1
    assert accounts.num_releases(0) == 1


def test_given_delta_replaces_every_default():
    accounts = Accounts({0: 50, 1: 10**7}, delta=1e-6)
    assert accounts.deltas == {0: 1e-6, 1: 1e-6}


def test_order_of_releases_does_not_matter():
    one, other = Accounts({0: 50}), Accounts({0: 50})
    for z in (0.8, 2.0, 5.0):
        one.record(0, release(z))
    for z in (5.0, 0.8, 2.0):
        other.record(0, release(z))
    assert one.spent(0, "rho", "rdp") == other.spent(0, "rho", "rdp")


def test_each_round_keeps_its_own_rho_bar():
    accounts = Accounts({0: 50})
    for share in (0.25, 1.0):
        accounts.record(0, release(2.0, share))
    events = [SubsampledGaussian(noise_multiplier=z, sampling_probability=0.1, count=2) for z in (0.5, 2.0)]
    assert accounts.spent(0, "rho", "rdp") == spent(events, 1e-5, "rdp")


def test_largest_compares_every_client_at_its_own_delta():
    accounts = Accounts({0: 50, 1: 10**9})
    for client in (0, 1):
        accounts.record(client, release())
    assert accounts.largest("local", "rdp") == accounts.spent(1, "local", "rdp").epsilon
    assert accounts.largest("local", "rdp") > accounts.spent(0, "local", "rdp").epsilon


def test_one_release_without_noise_makes_the_largest_infinite():
    accounts = Accounts({0: 50, 1: 50})
    accounts.record(1, release(z=0.0))
    assert accounts.largest("local", "pld") == math.inf


def test_nobody_spent_nothing():
    assert Accounts({}).largest("local", "pld") == 0
    with pytest.raises(KeyError):
        Accounts({}).spent(0, "local", "pld")

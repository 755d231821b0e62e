"""Accounts grow only, belong to one client each, and convert at that client's delta."""

import math
from typing import get_args

import pytest

from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.accounts import Accounts, Part


def release(z=1.5, rho_bar=0.5, q=0.1):
    return Release(event=SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=2), rho_bar=rho_bar)


@pytest.mark.parametrize("view", ["local", "rho"])
def test_every_release_raises_the_cost_of_its_client_alone_and_asking_changes_nothing(view):
    accounts, costs = Accounts({0: 50, 1: 50}), []
    for _ in range(4):
        accounts.record(0, release())
        (cost,) = {accounts.epsilon_of(0, view, "rdp").epsilon for _ in range(3)}
        costs.append(cost)
    assert costs == sorted(set(costs))
    assert (accounts.num_releases(0), accounts.epsilon_of(1, view, "rdp").epsilon) == (4, 0)


def test_each_round_keeps_its_own_rho_bar():
    accounts = Accounts({0: 50})
    for share in (0.25, 1.0):
        accounts.record(0, release(2.0, share))
    events = [SubsampledGaussian(noise_multiplier=z, sampling_probability=0.1, count=2) for z in (0.5, 2.0)]
    assert accounts.epsilon_of(0, "rho", "rdp") == epsilon_of(events, 1e-5, "rdp")


def test_one_release_without_noise_costs_everything():
    accounts = Accounts({0: 50, 1: 50})
    accounts.record(1, release(z=0.0))
    assert [cost.epsilon for cost in accounts.final("local").values()] == [0, math.inf]


def test_final_figures_are_each_clients_own_at_its_own_delta():
    accounts = Accounts({0: 50, 1: 10**9, 2: 50}, earlier={1: [release()], 2: [release(3.0)]})
    for client in accounts.deltas:
        accounts.record(client, release())
    for part in get_args(Part):
        expected = {c: accounts.epsilon_of(c, "rho", "pld", part=part) for c in accounts.deltas}
        assert accounts.final("rho", part=part) == expected
    assert accounts.final("aggregate") == dict.fromkeys(accounts.deltas)


@pytest.mark.slow
def test_many_different_histories_get_upper_bounds():
    accounts = Accounts({client: 200 + client for client in range(40)}, delta=1e-5)
    for client in accounts.deltas:
        for z in (2.0, 2.0, 3.0 if client < 3 else 2.0):
            accounts.record(client, release(z, q=20 / (200 + client)))
    costs = accounts.final("local")
    assert all(cost.upper_bound_only for cost in costs.values())
    for client in (0, 3, 39):
        exact = accounts.epsilon_of(client, "local", "pld").epsilon
        assert exact * (1 - 1e-3) <= costs[client].epsilon <= 1.5 * exact


def test_clients_that_released_nothing_cost_nothing_and_take_no_time():
    accounts = Accounts({client: 40 + client % 3 for client in range(100_000)}, earlier={7: [release()], 8: []})
    accounts.record(5, release())
    assert accounts.spenders() == {5, 7}
    assert (accounts.spenders("this run"), accounts.spenders("before")) == ({5}, {7})
    costs = accounts.final("local")
    assert [costs[client].epsilon > 0 for client in (0, 1, 2, 5, 6, 7, 99_999)] == [0, 0, 0, 1, 0, 1, 0]
    assert accounts.risks("local")[6].mu == 0 < accounts.risks("local")[5].mu
    assert accounts.epsilon_of(6, "local", "rdp").epsilon == 0
    assert accounts.num_releases(6) == accounts.num_releases(7) == 0
    with pytest.raises(KeyError):
        accounts.record(100_000, release())
    assert Accounts({}).final("local") == {}


def test_the_worst_clients_events_hold_for_all_only_where_they_cover_them():
    """Client 1 samples more; then client 0 releases with other noise, and no one curve holds for both."""
    accounts = Accounts({0: 50, 1: 10**7})
    accounts.record(0, release(q=0.1))
    accounts.record(1, release(q=0.3))
    events, cost = accounts.worst("local")
    assert events == accounts.history(1, "local")
    assert (cost.epsilon, cost.delta) == (accounts.final("local")[1].epsilon, accounts.deltas[0])
    accounts.record(0, release(z=20.0))
    events, cost = accounts.worst("local")
    assert (events, cost.epsilon) == ([], accounts.final("local")[1].epsilon)

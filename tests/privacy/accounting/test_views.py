"""Views of one history, accounts that compose releases on each, and what a participant sees who reads the sum."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.signal import fftconvolve

from fedpriv.holder.sums import smallest_threshold
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.views import (
    Release,
    aggregate_objections,
    aggregate_scale,
    default_delta,
    rho_bar,
    smallest_aggregate_scales,
    smallest_rho_bars,
)
from fedpriv.privacy.ledger.accounts import Accounts
from tests.events import gaussian
from tests.privacy.mechanisms.test_discrete_gaussian import law

EVENT = gaussian(1.88, 0.16, 3)
HOLDS = {"local_steps": 1, "optimizer": "sgd", "noise_on": "gradients", "linear": True, "secure_aggregation": True}
DELTA = 1e-5
SIGMA = 1500.0  # of the client with scale 1, in steps of the grid
NOISE_MULTIPLIER = 1.2
SCALES = {
    3: [(1.0, 1.0, 1.0), (1.0, 0.8, 0.7), (0.75, 1.0, 0.75)],
    5: [(1.0,) * 5, (1.0, 0.9, 0.8, 0.75, 0.7), (0.7, 0.7, 1.0, 1.0, 1.0)],
}
SUMS = [(3, 3, 0), (5, 3, 0), (5, 5, 0), (5, 5, 1), (5, 5, 2)]


def test_rho_bar_is_the_root_of_the_sum_of_squared_weights_and_scales_the_noise_of_its_round():
    assert rho_bar([0.2] * 5) == pytest.approx(1 / math.sqrt(5))
    assert rho_bar([0.3, 0.25, 0.2, 0.15, 0.1]) == pytest.approx(math.sqrt(0.225))
    assert rho_bar([1.0]) == 1.0
    with pytest.raises(ValueError, match="sum to"):
        rho_bar([0.5, 0.4])
    releases = [Release(event=EVENT, rho_bar=0.5), Release(event=EVENT, rho_bar=0.25)]
    assert [release.seen_by("local").noise_multiplier for release in releases] == [1.88, 1.88]
    assert [release.seen_by("rho").noise_multiplier for release in releases] == pytest.approx([0.94, 0.47])
    assert all(release.seen_by("rho").count == 3 for release in releases)


def test_default_delta_is_a_tenth_of_one_over_n_and_at_most_1e_5():
    assert default_delta(400) == 1e-5
    assert default_delta(10**6) == 1e-7
    with pytest.raises(ValueError, match="num_records"):
        default_delta(0)


def test_accounts_compose_first_and_convert_once():
    accounts = Accounts({0: 400, 1: 10**6})
    for _ in range(10):
        accounts.record(0, Release(event=EVENT, rho_bar=0.5))
    assert accounts.epsilon_of(0, "local", "pld") == epsilon_of([EVENT.with_count(30)], 1e-5, "pld")
    assert accounts.epsilon_of(0, "rho", "rdp").epsilon > accounts.epsilon_of(0, "local", "rdp").epsilon
    assert accounts.deltas == {0: 1e-5, 1: 1e-7}
    assert Accounts({0: 400, 1: 10**6}, delta=1e-6).deltas == {0: 1e-6, 1: 1e-6}
    with pytest.raises(ValueError, match="delta = 2"):
        Accounts({0: 10}, delta=2.0)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.floats(0, 1e3))
def test_rho_view_never_has_more_noise_than_local(sizes, z):
    scale = rho_bar([size / sum(sizes) for size in sizes])
    assert len(sizes) ** -0.5 * (1 - 1e-9) <= scale <= 1
    local, rho = (Release(event=gaussian(z, 0.1), rho_bar=scale).seen_by(view) for view in ("local", "rho"))
    assert rho.noise_multiplier <= local.noise_multiplier
    assert (rho.sampling_probability, rho.count) == (local.sampling_probability, local.count)


@pytest.mark.parametrize("view", ["aggregate", "Local", ""])
def test_a_view_that_is_unknown_or_does_not_hold_is_refused(view):
    with pytest.raises(ValueError, match="view"):
        Release(event=EVENT, rho_bar=0.5).seen_by(view)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("rho_bar", bad) for bad in (0.0, -0.5, 1.5, math.nan)),
        *(("aggregate_scale", bad) for bad in (0.5, math.inf, math.nan)),
    ],
)
def test_a_release_with_an_impossible_scale_is_refused(name, bad):
    with pytest.raises(ValueError, match=name):
        Release(event=EVENT, **{"rho_bar": 0.5, name: bad})


@given(st.lists(st.integers(1, 1000) | st.floats(1e-3, 1e3), min_size=1, max_size=7))
def test_smallest_rho_bar_is_the_minimum_over_all_sets_of_survivors(sizes):
    clients = dict(enumerate(sizes))
    smallest = smallest_rho_bars(clients)
    for client in clients:
        others = [other for other in clients if other != client]
        every = [
            rho_bar(size / sum(survivors) for size in survivors)
            for num in range(len(clients))
            for rest in itertools.combinations(others, num)
            for survivors in [[clients[c] for c in (client, *rest)]]
        ]
        assert smallest[client] == pytest.approx(min(every), rel=1e-9)
        assert smallest[client] <= min(every), "never above a value that can occur"


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 6))
def test_smallest_rho_bar_of_sums_of_few_uploads_is_never_above_one_that_can_occur(sizes, most):
    clients = dict(enumerate(sizes))
    smallest = smallest_rho_bars(clients, of=[0], most=most)
    assert smallest.keys() == {0}
    for num in range(min(most, len(sizes))):
        for rest in itertools.combinations(sizes[1:], num):
            together = (sizes[0], *rest)
            assert smallest[0] <= rho_bar(size / sum(together) for size in together)
    assert smallest[0] >= max(smallest_rho_bars(clients)[0], (1 - 1e-11) / math.sqrt(most))


def test_aggregate_noise_is_that_of_the_sum_relative_to_the_clients_own_weight():
    # Equal z, C, B and lr: z_eff rho_bar / rho_k, worked by hand for sizes 3, 4, 5 of 12.
    weights, sizes = [3 / 12, 4 / 12, 5 / 12], {0: 3, 1: 4, 2: 5}
    noise = math.hypot(*(weight * 2.0 for weight in weights)) / (weights[1] * math.sqrt(2))
    assert noise == pytest.approx(2 / math.sqrt(2) * math.sqrt(50) / 4)
    release = Release(event=EVENT, rho_bar=0.6, aggregate_scale=math.sqrt(50) / 4)
    assert release.seen_by("aggregate").noise_multiplier == pytest.approx(1.88 * math.sqrt(50) / 4)
    # The loudest other reads the sum, and knows its own noise.
    assert [aggregate_scale(sizes, client) for client in sizes] == pytest.approx([5 / 3, 5 / 4, math.sqrt(34) / 5])


def test_colluding_clients_take_their_noise_with_them():
    sizes = {0: 3, 1: 4, 2: 5}
    scales = [aggregate_scale(sizes, 0, colluding=num) for num in range(4)]
    assert scales == pytest.approx([5 / 3, 5 / 3, 1.0, 1.0]), "one that colludes with nobody reads the sum too"


@given(
    st.lists(st.integers(1, 50) | st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 7), st.integers(0, 3)
)
def test_smallest_aggregate_scale_is_the_minimum_over_all_sums_that_are_seen(weights, threshold, colluding):
    """Against every set of at least `threshold` survivors, and every set of those among them who read the sum."""
    clients = dict(enumerate(weights))
    smallest = smallest_aggregate_scales(clients, threshold=threshold, colluding=colluding)
    for client, own in clients.items():
        others = [other for other in clients if other != client]
        every = [
            math.sqrt(own**2 + sum(clients[c] ** 2 for c in rest if c not in readers)) / own
            for num in range(min(threshold - 1, len(others)), len(others) + 1)
            for rest in itertools.combinations(others, num)
            for readers in itertools.combinations(rest, min(max(colluding, 1), num))
        ]
        assert smallest[client] == pytest.approx(min(every), rel=1e-9)
        assert smallest[client] <= max(1.0, min(every)), "never above a value that can occur"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"local_steps": 2}, "local_steps = 2"),
        ({"optimizer": "adamw"}, "optimizer = adamw"),
        ({"linear": False}, "aggregation"),
        ({"secure_aggregation": False}, "secure_aggregation"),
        ({"norms_limited": True}, "max_update_norm"),
    ],
)
def test_the_aggregate_view_is_refused_with_the_condition_that_fails(change, name):
    on_updates = {"noise_on": "upload", "local_steps": 9, "optimizer": "adamw"}  # of which no number of steps matters
    assert aggregate_objections(**HOLDS) == aggregate_objections(**HOLDS | on_updates) == ()
    (objection,) = aggregate_objections(**HOLDS | change)
    assert objection.startswith(name)


def test_one_release_outside_the_aggregate_view_ends_it_for_the_client_and_counts_in_full_against_a_budget():
    accounts = Accounts({0: 100, 1: 100})
    for client, scale in ((0, 2.0), (0, None), (1, 2.0)):
        accounts.record(client, Release(event=EVENT, rho_bar=0.5, aggregate_scale=scale))
    assert accounts.epsilon_of(0, "aggregate", "rdp") is None
    assert accounts.epsilon_of(1, "aggregate", "rdp").epsilon < accounts.epsilon_of(1, "local", "rdp").epsilon
    assert accounts.final("aggregate")[0] is None
    seen = sorted(event.noise_multiplier for event in accounts.history(0, "aggregate"))
    assert seen == [EVENT.noise_multiplier, 2 * EVENT.noise_multiplier]


def test_earlier_runs_count_unless_they_are_excluded():
    earlier = {0: [Release(event=EVENT, rho_bar=0.5)]}
    accounts = Accounts({0: 100}, earlier=earlier)
    assert accounts.epsilon_of(0, "local", "rdp", part="this run").epsilon == 0
    accounts.record(0, Release(event=EVENT, rho_bar=0.5))
    alone = accounts.epsilon_of(0, "local", "rdp", part="this run").epsilon
    assert accounts.epsilon_of(0, "local", "rdp").epsilon > alone > 0


def divergence(noise: np.ndarray, shift: int, probability: float, epsilon: float) -> float:
    """The larger hockey-stick divergence between the noise, and the noise with a record that moves it by `shift`."""
    without = np.concatenate([noise, np.zeros(shift)])
    included = np.concatenate([np.zeros(shift), noise])
    with_record = (1 - probability) * without + probability * included
    pairs = ((without, with_record), (with_record, without))
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in pairs)


def true_epsilon(noise: np.ndarray, shift: int, probability: float) -> float:
    """The smallest epsilon at DELTA, by bisection."""
    return float(brentq(lambda epsilon: divergence(noise, shift, probability, epsilon) - DELTA, 1e-6, 60))


def view_of(reader: set[int], survivors: tuple[int, ...], scales: tuple[float, ...]) -> np.ndarray:
    """What is left of the sum once those who read it have subtracted their own vectors: the others' noise."""
    noise = np.ones(1)
    for client in set(survivors) - reader:
        noise = fftconvolve(noise, law(SIGMA * scales[client], math.ceil(12 * SIGMA * scales[client])))
    return np.clip(noise, 0, None)


def charged(client: int, scales: tuple[float, ...], threshold: int, colluding: int, probability: float) -> float:
    """The epsilon that the ledger has for one round."""
    sigma = SIGMA * scales[client]
    event = gaussian(math.sqrt(sigma**2 - 9) / round(sigma / NOISE_MULTIPLIER), probability)
    weights = dict(enumerate(scales))
    scale = smallest_aggregate_scales(weights, threshold=threshold, colluding=colluding)[client]
    return epsilon_of([Release(event=event, rho_bar=1.0, aggregate_scale=scale).seen_by("aggregate")], DELTA).epsilon


# Every day each sum of the second scales, which all differ, and with some of the records.
@pytest.mark.parametrize(
    ("threshold", "colluding", "scales", "probability"),
    [
        pytest.param(threshold, colluding, scales, q, marks=[] if (number, q) == (1, 0.3) else pytest.mark.slow)
        for (num_clients, threshold, colluding), q in itertools.product(SUMS, (1.0, 0.3))
        for number, scales in enumerate(SCALES[num_clients])
    ],
)
def test_no_readers_view_costs_more_than_is_charged_and_the_worst_as_much(threshold, colluding, scales, probability):
    """Readers are all but the client itself: also the one with the most noise, and c of them together."""
    num_clients, readers = len(scales), max(colluding, 1)
    assert threshold >= smallest_threshold(num_clients, colluding)
    for client in {scales.index(each) for each in scales}:
        epsilon = charged(client, scales, threshold, colluding, probability)
        shift = round(SIGMA * scales[client] / NOISE_MULTIPLIER)
        others = [k for k in range(num_clients) if k != client]
        # Equal multisets of noise give equal views.
        views = {
            tuple(sorted(scales[k] for k in rest if k not in together)): view_of(set(together), (client, *rest), scales)
            for rest in itertools.combinations(others, threshold - 1)
            for together in itertools.combinations(rest, readers)
        }
        costs = [true_epsilon(noise, shift, probability) for noise in views.values()]
        assert 0.99 * epsilon <= max(costs) <= epsilon

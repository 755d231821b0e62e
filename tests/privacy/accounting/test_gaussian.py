"""Gaussian noise on a sample, and of a person at several holders: dp-accounting's figures, integrals, the mixture."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_poisson_subsampled_gaussian as by_dp_accounting
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import norm

from fedpriv.privacy.accounting import risk
from fedpriv.privacy.accounting.accountants import ORDERS, delta_of, epsilon_of
from fedpriv.privacy.accounting.events import PureEpsilon, SummedGaussian, from_json, group, to_json
from fedpriv.privacy.accounting.filters import RenyiFilter
from fedpriv.privacy.accounting.gaussian import MAX_HOLDERS, _single_loss, sampled_curve, worst_other_holders
from fedpriv.privacy.accounting.many_clients import costliest, epsilons
from fedpriv.privacy.accounting.risk import risk_of, risks_of
from fedpriv.privacy.accounting.views import Release, aggregate_scale
from fedpriv.privacy.ledger.accounts import Accounts
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.mechanisms.discrete_gaussian import MECHANISM, integers, sensitivity
from fedpriv.privacy.mechanisms.registry import NoiseRequest
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.events import gaussian
from tests.marks import slow
from tests.privacy.ledger.test_evidence import charged_ledger, verified_ledger
from tests.privacy.mechanisms.test_discrete_gaussian import without_noise

pytestmark = pytest.mark.usefixtures("quiet_absl")
# At 0.573 and z = 0.3, the thousandth term of order 1.3 is e^-29.99 of the sum.
PROBABILITIES = [1e-6, 1e-4, 0.01, 1 / 16, 0.25, 0.5, 0.5732762522853087, 0.9, 0.999, 1 - 1e-9]
DELTA = 1e-5
gaussians = st.builds(gaussian, st.sampled_from([1.0, 2.0]), st.sampled_from([0.0, 0.1, 0.2, 1.0]), st.integers(1, 3))
# Each of 256 values moves by C / 16: three steps of the first holder's grid, one of the second's. The least noise that
# is allowed on the second is 2^10 steps.
DIMENSION, GRIDS, NOISE = 256, (48.0, 16.0), 64.0


# Every day at each seventh order, which are whole and broken ones, 1.3 among them.
@pytest.mark.parametrize("orders", [ORDERS[2::7], *slow(ORDERS)], ids=len)
@pytest.mark.parametrize("z", [1e-3, 0.3, 1.0, 1e6, *slow(0.05, 0.7, 2.0, 50.0)])
def test_the_curve_is_that_of_dp_accounting_and_known_where_theirs_is(z, orders):
    for q in PROBABILITIES:
        ours, theirs = sampled_curve(q, z, orders), by_dp_accounting(q, z, list(orders))
        known = np.isfinite(theirs)
        assert (np.isfinite(ours) == known).all()
        # They stop a series at terms of e^-30; ours goes on, so where terms fall slowly it is a little higher.
        np.testing.assert_allclose(ours[known], theirs[known], rtol=1e-9, atol=1e-9)


def by_integration(q, z, order):
    """log E ((1 - q) + q exp((2 x - 1) / (2 z^2)))^order over x ~ N(0, z^2), by the trapezoidal rule."""
    x = np.linspace(-40 * z, order + 40 * z, 400_001)
    power = order * np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    log_density = -(x**2) / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi))
    return logsumexp(power + log_density + math.log(x[1] - x[0]))


@pytest.mark.parametrize("order", [1.5, 2, 3.7, 10.9, 12, 63])
@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.125, 5.0), (0.5, 0.9), (1 / 16, 0.7)])
def test_the_curve_is_the_integral_that_defines_it(q, z, order):
    (ours,) = sampled_curve(q, z, [order])
    exact = by_integration(q, z, order) / (order - 1)
    if order == int(order):
        assert ours == pytest.approx(exact, rel=1e-6)
    else:
        # Terms beyond the order alternate and are all counted as positive, which weighs at the smallest orders.
        assert ours >= exact * (1 - 1e-6)
        assert order < 3 or ours <= 1.01 * exact


def test_divergences_far_below_the_rounding_of_one_are_kept():
    # order q^2 (exp(1 / z^2) - 1) / 2, to first order in q^2
    first = 1e-9**2 * math.expm1(1)
    np.testing.assert_allclose(sampled_curve(1e-9, 1.0, [2, 8]), [first, 4 * first], rtol=1e-6)


@pytest.mark.parametrize("z", [0.05, 1.0, 500.0, *slow(0.7, 5.0)])
@pytest.mark.parametrize("q", [0.25, 1.0, *slow(1e-6, 1e-4, 0.01, 0.999)])
def test_the_losses_are_those_of_dp_accounting(q, z):
    """Both neighbours, at every epsilon of the grid: losses above 709, whose exponential is infinite, too."""
    interval = 1e-3 if z > 0.1 else 0.05
    ours = _single_loss(z, q, interval)
    theirs = from_gaussian_mechanism(z, value_discretization_interval=interval, sampling_prob=q)
    for kind in ("_pmf_remove", "_pmf_add"):
        one, other = (getattr(each, kind).to_dense_pmf() for each in (ours, theirs))
        assert (one._lower_loss, one.size) == (other._lower_loss, other.size)
        np.testing.assert_allclose(one._probs, other._probs, rtol=1e-9, atol=1e-11)
        assert one._infinity_mass == pytest.approx(other._infinity_mass, rel=1e-9, abs=1e-30)
    for delta in (1e-2, 1e-5, 1e-9):
        expected = theirs.self_compose(3).get_epsilon_for_delta(delta)
        assert ours.self_compose(3).get_epsilon_for_delta(delta) == pytest.approx(expected, rel=1e-7, abs=1e-7)


def summed(noise: float, moves: Sequence[float], coins: Sequence[float], count: int = 1) -> SummedGaussian:
    return SummedGaussian(
        noise_multiplier=noise, sensitivities=tuple(moves), sampling_probabilities=tuple(coins), count=count
    )


def shares(moves: Sequence[float], coins: Sequence[float]) -> list[tuple[float, float]]:
    """[(amount, probability)] of each set of holders that draw the person, one by one."""
    found = []
    for drawn in itertools.product((False, True), repeat=len(moves)):
        chance = math.prod(q if is_in else 1 - q for q, is_in in zip(coins, drawn, strict=True))
        found.append((sum(s for s, is_in in zip(moves, drawn, strict=True) if is_in), chance))
    return found


def divergence(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    """The larger hockey-stick divergence of two laws that are given by their values on a grid."""
    return max(float(np.maximum(0.0, p - math.exp(epsilon) * q).sum()) for p, q in ((one, other), (other, one)))


def test_one_holder_is_a_sample_with_gaussian_noise():
    one = summed(2.0, [1.0], [0.1], 7)
    same = gaussian(2.0, 0.1, 7, unit="person")
    assert (one.rdp(ORDERS) == same.rdp(ORDERS)).all()
    assert epsilon_of([one], DELTA).epsilon == epsilon_of([same], DELTA).epsilon
    assert (one.effective_noise_multiplier, one.sampling_probability) == (2.0, 0.1)


@pytest.mark.parametrize(
    ("noise", "moves", "coins"),
    [
        (1.0, (1.0, 1.0), (0.01, 0.01)),
        pytest.param(1.5, (1.0, 2.5), (0.3, 0.05), marks=pytest.mark.slow),
        (2.0, (1.0, 0.5, 1.0), (0.2, 0.9, 1.0)),
    ],
)
def test_delta_is_that_of_the_mixture_on_a_grid(noise, moves, coins):
    x, step = np.linspace(-9 * noise, sum(moves) + 9 * noise, 100_001, retstep=True)
    with_person = sum(chance * norm.pdf(x, moved, noise) for moved, chance in shares(moves, coins))
    for epsilon in (0.1, 0.5, 1.5):
        exact = divergence(with_person, norm.pdf(x, 0, noise), epsilon) * step
        assert exact - 1e-8 <= delta_of([summed(noise, moves, coins)], epsilon) <= 1.001 * exact + 1e-8


def test_delta_of_three_sums_is_that_of_simulated_ones():
    """By 100,000 draws; accounting with two thirds or with one and a half times the noise fails."""
    noise, moves, coins, epsilon = 1.5, (1.0, 2.0), (0.3, 0.1), 1.0
    rng = np.random.default_rng(43)
    drawn = sum(s * (rng.random((100_000, 3)) < q) for s, q in zip(moves, coins, strict=True))
    x = drawn + noise * rng.standard_normal((100_000, 3))
    ratio = sum(chance * norm.pdf(x, moved, noise) for moved, chance in shares(moves, coins)) / norm.pdf(x, 0, noise)
    excess = np.maximum(0, 1 - np.exp(epsilon) / ratio.prod(axis=1))
    error = 4 * excess.std() / math.sqrt(len(excess))
    found = {factor: delta_of([summed(factor * noise, moves, coins, 3)], epsilon) for factor in (2 / 3, 1, 3 / 2)}
    assert [factor for factor, delta in found.items() if abs(delta - excess.mean()) < error] == [1]


def test_noise_over_all_moves_with_one_coin_says_too_much_or_too_little():
    """One coin for two holders: 6.48 where 1.53 is true; and nothing where a draw is rarer than delta."""
    true = epsilon_of([summed(1.0, (1.0, 1.0), (0.01, 0.01), 100)], DELTA).epsilon
    wrong = epsilon_of([gaussian(0.5, 0.01, 100)], DELTA).epsilon
    assert (true, wrong) == (pytest.approx(1.53, abs=0.005), pytest.approx(6.48, abs=0.005))
    assert epsilon_of([gaussian(0.4, 0.9e-5)], DELTA).epsilon == 0
    assert delta_of([summed(0.4, (1.0, 1.0), (0.9e-5, 0.9e-5))], 0.0) > 1.3 * DELTA


def test_renyi_divergence_is_a_bound():
    noise, moves, coins = 2.0, (1.0, 1.5), (0.2, 0.1)
    x, step = np.linspace(-25, 40, 100_001, retstep=True)
    without = norm.pdf(x, 0, noise)
    with_person = sum(chance * norm.pdf(x, moved, noise) for moved, chance in shares(moves, coins))
    orders = [1.5, 2.0, 4.0, 8.0]
    bounds = summed(noise, moves, coins).rdp(orders)
    for order, bound in zip(orders, bounds, strict=True):
        for p, q in ((with_person, without), (without, with_person)):
            assert math.log(((p / q) ** order * q).sum() * step) / (order - 1) <= bound + 1e-9
    sums = [summed(noise, moves, coins, 20)]
    assert epsilon_of(sums, DELTA, "rdp").epsilon > epsilon_of(sums, DELTA).epsilon
    assert RenyiFilter(order=4).cost(sums[0]) == pytest.approx(20 * bounds[2])


def test_parts_in_other_directions_cost_no_more():
    """Two holders may move a sum at right angles: exact hockey-stick divergences in the plane, on a grid."""
    noise, coins, epsilon = 1.0, (0.3, 0.2), 0.5
    grid = np.linspace(-8, 9, 400)
    x, y = np.meshgrid(grid, grid)
    cell = (grid[1] - grid[0]) ** 2

    def around(at: tuple[float, float]) -> np.ndarray:
        return norm.pdf(x, at[0], noise) * norm.pdf(y, at[1], noise)

    places = {(0.0, 0.0): 0.56, (1.0, 0.0): 0.24, (0.0, 1.0): 0.14, (1.0, 1.0): 0.06}
    p, q = sum(chance * around(at) for at, chance in places.items()), around((0.0, 0.0))
    assert 0.01 < divergence(p, q, epsilon) * cell < delta_of([summed(noise, (1.0, 1.0), coins)], epsilon)


def test_the_worst_other_holders_are_the_worst_of_all_sets():
    rng = random.Random(5)
    for _ in range(3):
        weights = {client: rng.uniform(0.5, 2) for client in range(4)}
        coins = {client: rng.uniform(0.02, 0.3) for client in range(4)}
        scale = aggregate_scale(weights, 0)

        def cost(others: Sequence[tuple[float, float]], q: float = coins[0], scale: float = scale) -> float:
            event, holders = gaussian(2.0, q, 5, unit="person"), tuple(others)
            release = Release(event=event, rho_bar=0.5, aggregate_scale=scale, other_holders=holders)
            return epsilon_of([release.seen_by("aggregate")], DELTA).epsilon

        worst = cost(worst_other_holders(weights, coins, 0, 3))
        sets = itertools.combinations((1, 2, 3), 2)
        assert all(cost([(weights[j] / weights[0], coins[j]) for j in others]) <= worst + 1e-9 for others in sets)
    assert worst_other_holders(weights, coins, 0, 1) == ()
    assert len(worst_other_holders(weights, coins, 0, 8)) == 3


def test_events_convert_to_json_and_wrong_ones_are_refused():
    event = summed(2.0, (1.0, 0.5), (0.1, 0.2), 3)
    assert from_json(to_json(event)) == event
    assert hash(event.with_noise(2.0)) != hash(event)
    assert event.with_noise(2.0).with_count(1) == summed(4.0, (1.0, 0.5), (0.1, 0.2))
    for moves, coins, message in (
        ((), (), "must be those of 1"),
        ((1.0,) * (MAX_HOLDERS + 1), (0.1,) * (MAX_HOLDERS + 1), "must be those of 1"),
        ((1.0, 0.0), (0.1, 0.1), "must be > 0"),
        ((1.0, 1.0), (0.1,), "one for each"),
        ((1.0, math.inf), (0.1, 0.1), "sensitivity = inf"),
        ((1.0, 1.0), (0.1, 1.5), "sampling_probability = 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            summed(1.0, moves, coins)


def test_without_noise_the_cost_is_infinite_and_without_a_coin_nothing():
    assert epsilon_of([summed(0.0, (1.0, 1.0), (0.1, 0.1))], DELTA).epsilon == math.inf
    assert epsilon_of([summed(1.0, (1.0, 1.0), (0.0, 0.0))], DELTA).epsilon == 0
    everywhere = epsilon_of([summed(4.0, (1.0, 1.0), (1.0, 1.0))], DELTA).epsilon
    assert everywhere == epsilon_of([gaussian(2.0)], DELTA).epsilon


def test_a_ledger_keeps_other_holders_and_the_verifier_computes_the_mixture(tmp_path):
    event, others = gaussian(8.0, 0.1, unit="person"), ((1.0, 0.1), (1.5, 0.2))
    release = Release(event=event, rho_bar=0.6, aggregate_scale=2.0, num_readers=1, other_holders=others)
    path = charged_ledger(tmp_path / "ledger.sqlite", *[release] * 4)
    with Ledger(path) as ledger:
        assert ledger.releases_in_order(ledger.data_set().id) == [release] * 4
    code, lines = verified_ledger(path)
    assert code == 0, lines
    expected = epsilon_of([summed(16.0, (1.0, 1.0, 1.5), (0.1, 0.1, 0.2), 4)], DELTA).epsilon
    stated = next(line for line in lines if "epsilon_aggregate" in line and "by pld" in line)
    assert float(stated.rpartition(" ")[2]) == pytest.approx(expected, rel=1e-5)


def test_noise_of_which_no_mixture_is_known_is_refused():
    with pytest.raises(ValueError, match="PureEpsilon is not known"):
        Release(event=PureEpsilon(epsilon=1.0), rho_bar=1.0, aggregate_scale=2.0, other_holders=((1.0, 0.1),))


def accounts(holders: int, *noises: float, probabilities: Sequence[float] = ()) -> Accounts:
    made = Accounts(dict.fromkeys(range(len(noises)), 1000), DELTA, holders=holders)
    for client, (noise, q) in enumerate(zip(noises, probabilities or [0.1] * len(noises), strict=True)):
        made.record(client, Release(event=gaussian(noise, q, 3, unit="person"), rho_bar=0.5))
    return made


@pytest.mark.parametrize(("view", "holders", "paying"), [("local", 2, "13"), ("rho", 3, "123")])
def test_a_person_pays_for_its_costliest_holders(view, holders, paying):
    made = accounts(holders, 4.0, 2.0, 3.0, 2.0)
    events = [made.history(int(client), view)[0] for client in paying]
    assert made.largest(view).epsilon == epsilon_of(events, DELTA).epsilon
    assert made.largest_bound(view).epsilon >= epsilon_of(events, DELTA, "rdp").epsilon
    assert made.largest_risk(view).mu == risk_of(events, DELTA).mu
    nobody = Accounts({0: 1000, 1: 1000}, DELTA, holders=2)
    assert (nobody.largest(view).epsilon, nobody.largest_bound(view).epsilon) == (0, 0)


def test_where_noise_is_the_same_the_largest_probabilities_are_exact_however_many_holders_there_are():
    probabilities = [0.01 + i / 1000 for i in range(40)]
    made = accounts(4, *[2.0] * 40, probabilities=probabilities)
    worst = epsilon_of([made.history(client, "local")[0] for client in range(36, 40)], DELTA)
    assert made.largest("local") == worst


def test_of_many_different_holders_the_bound_is_never_below():
    made = accounts(2, *[2.0 + i / 10 for i in range(14)])
    worst = [made.history(client, "local")[0] for client in (0, 1)]
    bound = made.largest("local")
    assert bound.upper_bound_only
    assert epsilon_of(worst, DELTA).epsilon < bound.epsilon < 3 * epsilon_of(worst, DELTA).epsilon
    assert made.largest_risk("local").advantage > risk_of(worst, DELTA).advantage


@pytest.mark.parametrize("few", [4, *slow(risk._FEW_HISTORIES)])
def test_many_sums_with_coins_of_their_own_are_accounted_at_once(monkeypatch, few):
    monkeypatch.setattr(risk, "_FEW_HISTORIES", few)
    sums = {i: [summed(4.0, (1.0, 1.0), (0.01, 0.01 + i / 1000), 1 + i % 7)] for i in range(few + 2)}
    bounds = epsilons([event for (event,) in sums.values()], [DELTA] * len(sums))
    risks = risks_of({i: (events, DELTA) for i, events in sums.items()})
    for i in (0, few + 1):
        exact = epsilon_of(sums[i], DELTA).epsilon
        assert exact - 1e-9 <= bounds[i] <= 1.01 * exact
        assert risk_of(sums[i], DELTA).advantage <= risks[i].advantage + 1e-9


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(gaussians, max_size=2).map(group), min_size=1, max_size=7), st.integers(1, 3))
def test_what_is_left_out_never_costs_more_than_what_is_kept(histories, number):
    number, orders = min(number, len(histories)), range(2, 20)

    def worst(known):
        curves = [sum((event.rdp(orders) for event in each), np.zeros(len(orders))) for each in known]
        return np.max([sum(several) for several in itertools.combinations(curves, number)], axis=0)

    kept = costliest(dict(enumerate(histories)), number)
    np.testing.assert_allclose(worst([histories[client] for client in kept]), worst(histories), rtol=1e-12)


def asked(grids: Sequence[float] = GRIDS, coins: Sequence[float] = (1.0, 1.0)) -> NoiseRequest:
    fields = {"clip_norm": 1.0, "unit": "person", "grids": tuple(grids), "bounds": (9.0,) * len(grids)}
    return NoiseRequest(noise_multiplier=NOISE, dimension=DIMENSION, sampling_probabilities=tuple(coins), **fields)


def steps_moved(monkeypatch) -> list[int]:
    """The steps by which a person moves each value of either holder's integers, at most: from half a step on."""
    without_noise(monkeypatch)
    without = torch.tensor([[0.5 / grid] * DIMENSION for grid in GRIDS], dtype=torch.float64)
    sums = [without, without + 1 / math.sqrt(DIMENSION)]
    rounded = [MECHANISM.add_noise(each, asked(), [SeededSource(0)] * 2)[0] for each in sums]
    moved = [integers(rounded[1][k], grid) - integers(rounded[0][k], grid) for k, grid in enumerate(GRIDS)]
    assert all(each.unique().numel() == 1 for each in moved)
    return [int(each[0]) for each in moved]


def exact_delta_on_grids(moves: Sequence[int], coins: Sequence[float], epsilon: float) -> float:
    """The larger hockey-stick divergence of both holders' noised integers, added up, from those without the person.

    The ratio of their probabilities depends on the total of all values alone, whose noise is a discrete Gaussian too.
    """
    variance = DIMENSION * sum((grid * NOISE) ** 2 for grid in GRIDS)
    reach = int(12 * math.sqrt(variance))
    at = np.arange(-reach, reach + DIMENSION * sum(moves))

    def law(moved: float) -> np.ndarray:
        weights = np.exp(-((at - DIMENSION * moved) ** 2) / (2 * variance))
        return weights / weights.sum()

    return divergence(sum(chance * law(moved) for moved, chance in shares(moves, coins)), law(0), epsilon)


def charged(client: int, coins: Sequence[float], moves: Mapping[int, float]) -> Release:
    """One release of a client in the sum of both, where a person moves their parts by so much at most."""
    noises = [grid * NOISE for grid in GRIDS]
    event, scale = MECHANISM.planned_events(asked(coins=coins))[client], math.hypot(*noises) / noises[client]
    others = worst_other_holders(moves, dict(enumerate(coins)), client, 2)
    return Release(event=event, rho_bar=1.0, aggregate_scale=scale, other_holders=others)


@pytest.mark.parametrize("coins", [(1.0, 1.0), (0.3, 0.2), (0.05, 0.9)])
def test_no_sum_of_two_holders_integers_costs_more_than_is_charged(coins, monkeypatch):
    """With the ratio of grids, without each holder's own rounding, delta was up to a tenth too small."""
    moves = steps_moved(monkeypatch)
    assert moves == [4, 2], "one step more than without rounding"
    bounds = {client: sensitivity(asked(coins=coins), client) for client in (0, 1)}
    for client, bound in bounds.items():
        assert moves[client] * math.sqrt(DIMENSION) == pytest.approx(bound, rel=1e-9), "which the worst case attains"
    for epsilon in (0.0, 0.01):
        exact = exact_delta_on_grids(moves, coins, epsilon)
        for client in (0, 1):
            delta = delta_of([charged(client, coins, bounds).seen_by("aggregate")], epsilon)
            assert exact <= delta <= 1.001 * exact + 1e-7
    by_grid = charged(0, coins, dict(enumerate(GRIDS))).seen_by("aggregate")
    assert delta_of([by_grid], 0.0) < 0.99 * exact_delta_on_grids(moves, coins, 0.0)

"""Risk: trade-off functions against closed forms, integration and simulated attackers; filters; targets."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import special, stats

from fedpriv import texts
from fedpriv.errors import InputError
from fedpriv.privacy.accounting import accountants, risk, trade_off
from fedpriv.privacy.accounting.accountants import ORDERS
from fedpriv.privacy.accounting.calibration import calibrate_to_risk, noise_multiplier_for
from fedpriv.privacy.accounting.events import EpsilonDelta, Event, PureEpsilon, SubsampledGaussian
from fedpriv.privacy.accounting.filters import CommittedPlan, CommittedPlans, GaussianFilter, RenyiFilter
from fedpriv.privacy.accounting.risk import Risk, RiskTarget, risk_of, risks_of
from tests.events import by_dp_accounting, gaussian
from tests.marks import slow

X = np.linspace(0.001, 0.999, 99)
RATES = np.array(risk.FALSE_POSITIVE_RATES)


@pytest.mark.parametrize("mu", [0.1, 0.925, 3.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_epsilon_meets_dp_accounting(mu, delta):
    theirs = dp_accounting.get_epsilon_gaussian(1 / mu, delta)
    assert trade_off.gaussian_epsilon(mu, delta) == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def test_each_function_is_its_own_inverse_and_a_pair_is_two_lines():
    for f in (trade_off.gaussian(1.3), trade_off.renyi(np.array([4.0]), np.array([0.7]))):
        assert f(f(X)) == pytest.approx(X, abs=1e-9)
    pair = trade_off.profile(np.array([1.0]), np.array([0.01]))
    inside = X < 0.98
    assert pair(pair(X[inside])) == pytest.approx(X[inside])
    assert 1 - pair(X) == pytest.approx(np.minimum(0.01 + math.e * X, 1 - (0.99 - X) / math.e).clip(max=1))


@pytest.mark.parametrize("delta", [1e-13, 1e-14, 1e-16])
def test_a_tiny_delta_has_a_finite_mu_by_renyi_curves_too(delta):
    """Of no smaller mu than a larger delta, and of none below the Gaussian's own."""
    f = trade_off.renyi(ORDERS, ORDERS / 2)
    assert 1.0 < trade_off.mu_of(f, 1e-9) <= trade_off.mu_of(f, delta) < 1.5


def test_a_delta_below_the_rounding_of_a_loss_distribution_has_the_finite_mu_of_divergences():
    """The advantage next to it is that of the characteristic function of the total loss, inverted (Gil-Pelaez)."""
    z, q, steps, width = 0.7, 1e-3, 100_000, 5e-3
    x = np.arange(-10.0, 11.5, width)
    ratio = np.expm1((2 * x - 1) / (2 * z**2))
    outside = stats.norm.pdf(x, scale=z) * width
    t = (np.arange(225) + 0.5) * 0.04
    exceed = {}
    for world, density in {"in": outside * (1 + q * ratio), "out": outside}.items():
        of_one = [np.dot(density, np.expm1(1j * at * np.log1p(q * ratio))) for at in t]
        exceed[world] = 0.5 + np.sum(np.exp(steps * np.log1p(of_one)).imag / t) * 0.04 / np.pi
    true = exceed["in"] - exceed["out"]
    found, at_larger = (risk_of([gaussian(z, q, steps)], delta) for delta in (1e-12, 1e-8))
    assert true == pytest.approx(0.313305, abs=1e-6)
    assert true <= found.advantage <= true * (1 + 1e-3)
    assert at_larger.mu <= found.mu < 1.1


def test_profile_of_gaussian_dp_is_weaker_than_the_curve_and_close():
    epsilons = np.concatenate([[0.0], np.geomspace(0.01, 12, 200)])
    deltas = special.ndtr(0.5 - epsilons) - np.exp(epsilons) * special.ndtr(-epsilons - 0.5)
    approximate, exact = trade_off.profile(epsilons, deltas)(X), trade_off.gaussian(1.0)(X)
    assert (approximate <= exact + 1e-12).all()
    assert approximate == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize("mu", [0.2, 1.0, 4.0])
def test_the_figures_of_gaussian_dp_are_those_of_its_mu(mu):
    f = trade_off.gaussian(mu)
    assert trade_off.mu_of(f, 1e-9) == pytest.approx(mu, rel=2e-4)
    assert trade_off.regret_of(f, mu) == pytest.approx(0.0, abs=1e-9)
    assert trade_off.advantage_of(f) == pytest.approx(2 * special.ndtr(mu / 2) - 1)
    # A larger mu claims less: the errors of its curve must rise until they meet the true one.
    assert trade_off.regret_of(f, 1.2 * mu) > 0.005


@pytest.mark.parametrize("delta", [1e-5, 1e-12])
@pytest.mark.parametrize(
    "f",
    [
        RenyiFilter(order=6).trade_off(0.2734),  # with a smooth hill and, higher and narrower, a corner
        RenyiFilter(order=20).trade_off(1.3),
        trade_off.of_group(trade_off.gaussian(0.5), 2),
        risk.trade_off_of((gaussian(1.5, 0.125, 2),)),
    ],
)
def test_no_test_of_a_fine_grid_asks_for_more_than_mu(f, delta):
    grids = np.array_split(special.ndtr(np.linspace(-20, 6, 20_001)), 20)
    needed = max(float((-special.ndtri(np.minimum(f(x) + delta, 1)) - special.ndtri(x)).max()) for x in grids)
    assert needed * (1 - 1e-5) <= trade_off.mu_of(f, delta) <= needed * (1 + 3e-4)


def losses(event: SubsampledGaussian, x: np.ndarray) -> np.ndarray:
    """log P/Q at x, in units of the sensitivity."""
    q, z = event.sampling_probability, event.noise_multiplier
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z)))


def hull(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The upper concave hull of points from (0, 0) to (1, 1)."""
    kept: list[tuple[float, float]] = []
    for point in sorted({(0.0, 0.0), (1.0, 1.0), *zip(x.tolist(), y.tolist(), strict=True)}):
        while len(kept) > 1 and (kept[-1][1] - kept[-2][1]) * (point[0] - kept[-2][0]) <= (point[1] - kept[-2][1]) * (
            kept[-1][0] - kept[-2][0]
        ):
            kept.pop()
        kept.append(point)
    return np.interp(at, *zip(*kept, strict=True))


def integrated(events: list[SubsampledGaussian], at: np.ndarray) -> np.ndarray:
    """The true share found, of both questions, by convolving the densities of the losses on a fine grid."""
    spread = math.sqrt(sum(e.count * e.sampling_probability**2 * math.expm1(1 / e.noise_multiplier**2) for e in events))
    step, size = min(spread, 1.0) / 2000, 2**19
    under = {}
    for world in ("out", "in"):
        total = np.ones(size // 2 + 1, dtype=complex)
        for event in events:
            q, z = event.sampling_probability, event.noise_multiplier
            edges = (np.arange(-size // 2, size // 2 + 1) - 0.5) * step
            with np.errstate(divide="ignore", invalid="ignore"):
                x = 0.5 + z * z * (np.log(np.expm1(edges) + q) - math.log(q))
            x = np.where(np.exp(np.minimum(edges, 1.0)) <= 1 - q, -np.inf, x)
            below = special.ndtr(x / z)
            if world == "in":
                below = (1 - q) * below + q * special.ndtr((x - 1) / z)
            mass = np.fft.ifftshift(np.diff(below))
            total *= np.fft.rfft(mass) ** event.count
        under[world] = np.clip(np.fft.fftshift(np.fft.irfft(total, size)), 0.0, None)
    accused = {world: np.cumsum(mass[::-1])[::20] for world, mass in under.items()}
    x, y = accused["out"], accused["in"]
    return hull(np.concatenate([x, 1 - y]), np.concatenate([y, 1 - x]), at)


def random_schedule(rng: np.random.Generator, *, with_sampling: bool) -> list[SubsampledGaussian]:
    """One or two kinds of steps that together cost an epsilon of some 0.3 to 10."""
    events = []
    for _ in range(rng.integers(1, 3)):
        steps, spend = int(np.exp(rng.uniform(0, math.log(150)))), np.exp(rng.uniform(-1.6, 0.7))
        q = float(np.exp(rng.uniform(math.log(0.02), math.log(0.6)))) if with_sampling else 1.0
        z = q * math.sqrt(steps) / spend
        events.append(gaussian(max(float(z), 0.6 if with_sampling else 0.0), q, steps))
    return events


def found_by(events: list[Event]) -> np.ndarray:
    return np.array(risk_of(events, 1e-5).found)


def simulated(events: list[SubsampledGaussian], rng: np.random.Generator, trials: int) -> np.ndarray:
    """The share that the best attacker finds in a simulation, for either question, of each rate: [questions, rates]."""
    scores = {}
    for world in ("out", "in"):
        total = np.zeros(trials)
        for event in events:
            for _ in range(event.count):
                is_drawn = rng.random(trials) < event.sampling_probability if world == "in" else np.zeros(trials, bool)
                total += losses(event, event.noise_multiplier * rng.standard_normal(trials) + is_drawn)
        scores[world] = np.sort(total)
    joined = 1 - np.searchsorted(scores["in"], np.quantile(scores["out"], 1 - RATES), side="right") / trials
    left = np.searchsorted(scores["out"], np.quantile(scores["in"], RATES), side="left") / trials
    return np.stack([joined, left])


def check(events: list[SubsampledGaussian], truth: np.ndarray, *, rounding: float = 0.0) -> np.ndarray:
    """The printed share, which is never below the true one, and little above."""
    told = found_by(list(events))
    assert (told >= truth * (1 - rounding)).all(), (events, told, truth)
    assert (told <= truth * 1.02).all(), (events, told, truth)
    return told


@pytest.mark.parametrize(("epsilon", "mu", "found"), [(2, 0.50, 0.034), (4, 0.93, 0.081), (8, 1.67, 0.255)])
def test_reference_values_of_gaussian_noise(epsilon, mu, found):
    z = noise_multiplier_for(epsilon, 1e-5, sampling_probability=1.0, steps=25)
    told = risk_of([gaussian(z, count=25)], 1e-5)
    assert told.mu == pytest.approx(5 / z)
    assert told.mu == pytest.approx(mu, abs=0.006)
    assert told.tpr_at_fpr["0.01"] == pytest.approx(found, abs=6e-4)
    assert told.mu_regret == 0
    alone = 1 - trade_off.profile(np.array([float(epsilon)]), np.array([1e-5]))(np.array([0.01]))[0]
    assert alone > 2 * found


def test_mu_and_regret_are_those_of_other_code():
    # gdpnum 0.1.0's README: noise multiplier 9.4, sample rate 0.328, 2000 steps.
    told = risk_of([gaussian(9.4, 0.328, 2000)], 1e-10)
    assert told.mu == pytest.approx(1.5685621993, rel=2e-3)
    assert told.mu_regret == pytest.approx(0.00102, rel=0.2)


def test_epsilon_of_mu_is_never_below_the_accountants():
    events = [gaussian(1.0, 0.01, 1000)]
    told = risk_of(events, 1e-5)
    epsilon = accountants.epsilon_of(events, 1e-5).epsilon
    assert trade_off.gaussian_epsilon(told.mu, 1e-5) == pytest.approx(epsilon, rel=0.15)
    z = special.ndtri(np.geomspace(1e-4, 0.99, 50))
    assert (told.curve(special.ndtr(z)) <= special.ndtr(z + told.mu) + 1e-5).all()


def test_one_sampled_release_has_its_closed_form():
    q, z = 0.2, 0.8
    joined = (1 - q) * RATES + q * stats.norm.cdf(stats.norm.ppf(RATES) + 1 / z)
    x = np.linspace(1e-6, 1, 400_000)
    left = 1 - np.interp(1 - RATES, (1 - q) * x + q * stats.norm.cdf(stats.norm.ppf(x) + 1 / z), x)
    assert found_by([gaussian(z, q)]) == pytest.approx(np.maximum(joined, left), rel=0.01)
    assert (found_by([gaussian(z, q)]) >= np.maximum(joined, left) - 1e-9).all()


@pytest.mark.parametrize("num", [2, *slow(100)])
def test_an_attacker_finds_no_more_than_is_told(num):
    rng = np.random.default_rng(7)
    for _ in range(num):
        events = random_schedule(rng, with_sampling=False)
        mu = math.sqrt(sum(event.count / event.noise_multiplier**2 for event in events))
        check(events, stats.norm.cdf(stats.norm.ppf(RATES) + mu), rounding=1e-9)
        events = random_schedule(rng, with_sampling=True)
        told = check(events, integrated(events, RATES), rounding=2e-4)
        trials = 100_000 if num > 10 else 10_000
        error = np.sqrt(told / trials + (told / RATES) ** 2 * RATES / trials)
        assert (simulated(events, rng, trials) <= told + 5 * error).all(), events


def test_advantage_is_delta_at_epsilon_zero():
    events = [gaussian(1.1, 0.1, 40)]
    delta = by_dp_accounting("pld", *events).get_delta(0.0)
    assert delta * 0.999 <= risk_of(events, 1e-5).advantage == pytest.approx(delta, rel=0.01)
    assert risk_of([gaussian(2.0)], 1e-5).advantage == pytest.approx(2 * stats.norm.cdf(0.25) - 1)


@pytest.mark.parametrize("events", [[gaussian(0.9, 0.1, 60)], [gaussian(1.0)], [PureEpsilon(epsilon=1.0)]])
def test_a_curve_is_symmetric_convex_and_falls(events):
    f = risk_of(events, 1e-5).trade_off
    x = np.linspace(0.0, 1.0, 201)
    assert f(f(x))[1:] == pytest.approx(x[1:], abs=1e-3)
    assert (np.diff(f(x)) <= 1e-12).all()
    assert (np.diff(f(x), 2) >= -1e-9).all()
    assert (f(x) <= 1 - x + 1e-12).all()


def test_stated_costs_have_their_own_lines():
    found = risk_of([PureEpsilon(epsilon=1.0)], 1e-5).found
    assert found == pytest.approx(np.minimum(math.e * RATES, 1), rel=1e-3)
    leaky = risk_of([EpsilonDelta(epsilon=1.0, delta=0.01)], 1e-5)
    assert leaky.found[1] == pytest.approx(0.01 + math.e * 0.01, rel=1e-2)
    assert leaky.mu == math.inf


@pytest.mark.parametrize(
    "events", [[gaussian(0.0)], [gaussian(1.0), gaussian(0.0, 0.1)], [EpsilonDelta(epsilon=1, delta=1)]]
)
def test_without_a_guarantee_everybody_may_be_found_and_without_a_release_nobody(events):
    told, nothing = risk_of(events, 1e-5), risk_of([], 1e-5)
    assert (nothing.mu, nothing.advantage, *nothing.found) == pytest.approx((0.0, 0.0, *RATES), abs=1e-9)
    assert (told.mu, told.advantage, set(told.found)) == (math.inf, 1.0, {1.0})
    (words,) = texts.risk_in_words(told.values, 1e-5)
    assert words.startswith("Nothing bounds what an attacker finds")


def test_units_do_not_mix():
    for event in (gaussian(1.0), PureEpsilon(epsilon=1.0)):
        with pytest.raises(ValueError, match="units"):
            risk_of([event, gaussian(1.0, unit="client")], 1e-5)


def test_a_schedule_with_large_losses_and_little_sampling_takes_a_coarser_grid_and_no_minutes(monkeypatch):
    """One of 1e-5 would have six million losses; a tenth as many hardly tell more."""
    events = [gaussian(0.3, 1e-4, 100_000)]
    monkeypatch.setattr(accountants, "_MOST_LOSSES", 3e5)
    interval = accountants.affordable(events, 1e-5)
    assert 1e-5 < interval < 1e-3
    found = found_by(events)
    fine = by_dp_accounting("pld", *events, interval=interval / 2)
    epsilons = np.linspace(0.0, 20.0, 200)
    least = 1 - trade_off.profile(epsilons, np.asarray(fine.get_delta(epsilons)))(RATES)
    assert (least * 0.999 <= found).all()
    assert found == pytest.approx(least, rel=0.02)


# --- Renyi divergences, and filters ---


def test_the_renyi_bound_of_an_order_is_met_by_two_coins():
    x, y, order = 0.02, 0.3, 5.0
    divergence = max(
        math.log(p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)) / (order - 1)
        for p, q in ((x, y), (y, x))
    )
    found = 1 - trade_off.renyi(np.array([order]), np.array([divergence]))(np.array([x]))[0]
    assert found == pytest.approx(y, rel=1e-9)


def test_the_renyi_bound_is_above_the_true_curve_and_stands_for_one_that_is_not_known():
    by_renyi = 1 - trade_off.renyi(ORDERS, gaussian(1.3, 0.1, 30).rdp(ORDERS))(RATES)
    exact = found_by([gaussian(1.3, 0.1, 30)])
    assert (by_renyi > exact).all()
    assert (by_renyi < 2 * exact).all()
    event = PureEpsilon(epsilon=800.0)  # has no loss distribution
    assert found_by([event]) == pytest.approx(1 - trade_off.renyi(ORDERS, event.rdp(ORDERS))(RATES))


def test_a_filter_tells_what_it_lets_pass_and_not_what_was_spent():
    rule, budget = RenyiFilter.derived(4.0, 1e-5), {"epsilon": 4.0, "delta": 1e-5}
    assert GaussianFilter().risk([], **budget).found[1] == pytest.approx(0.0805, abs=1e-3), "the reference"
    little = [gaussian(5.0, 0.1, 3)]
    told = rule.risk(little, **budget)
    assert told.found == rule.risk([], **budget).found
    assert told.found[1] > 10 * found_by(little)[1]
    expected = 1 - trade_off.renyi(np.array([float(rule.order)]), np.array([rule.limit(4.0, 1e-5)]))(RATES)
    assert told.found == pytest.approx(expected)
    so_far = rule.risk(little, epsilon=None, delta=1e-5)
    assert found_by(little)[1] < so_far.found[1] < told.found[1]


def test_a_filter_does_not_tell_less_than_was_released_before_it():
    rule = GaussianFilter()
    spent = [gaussian(0.5)]
    assert rule.risk(spent, epsilon=1.0, delta=1e-5).mu == pytest.approx(2.0, rel=1e-3)
    assert rule.risk([PureEpsilon(epsilon=1.0)], epsilon=1.0, delta=1e-5).found == (1.0, 1.0, 1.0)


def test_a_plan_tells_of_all_its_slots():
    plan = CommittedPlan.of([gaussian(1.0, 0.05, 40)], 1e-5)
    told = CommittedPlans(plans=(plan,)).risk([gaussian(1.0, 0.05)], epsilon=None, delta=1e-5)
    assert told.found == pytest.approx(found_by([gaussian(1.0, 0.05, 40)]))


# --- many histories ---


@pytest.fixture(params=[8, *slow(64)])
def most_shared(request, monkeypatch) -> int:
    """How many histories are priced at most; every day an eighth of a run's numbers."""
    assert (risk._FEW_HISTORIES, risk._MOST_SHARED, risk._NUM_NODES) == (32, 64, 16)
    monkeypatch.setattr(risk, "_FEW_HISTORIES", request.param // 2)
    monkeypatch.setattr(risk, "_MOST_SHARED", request.param)
    monkeypatch.setattr(risk, "_NUM_NODES", request.param // 4)
    return request.param


def test_few_histories_have_their_own_risk():
    histories = {size: ([gaussian(1.0, 30 / size, 20)], 1e-5) for size in (100, 200, 400)}
    for size, told in risks_of(histories).items():
        assert told.found == tuple(found_by(list(histories[size][0])))


def test_many_histories_cost_a_few_and_none_is_told_less(most_shared):
    sizes = {8: range(120, 170), 64: range(120, 3000, 11)}[most_shared]
    histories = {size: ([gaussian(1.2, 60 / size, 20), gaussian(8.0)], 1e-5) for size in sizes}
    told = risks_of(histories)
    assert len(set(told.values())) <= most_shared
    for size in (120, sizes[len(sizes) // 6], sizes[-1]):
        own = found_by(list(histories[size][0]))
        assert (np.array(told[size].found) >= own * (1 - 1e-9)).all()
        assert told[size].found[1] < 1.1 * own[1]
    assert told[120].found == tuple(found_by(list(histories[120][0])))
    assert Risk.worst(told.values()).found == told[120].found


@pytest.mark.parametrize("kinds", ["one", "many"])
def test_histories_of_different_noise_share_bounds(kinds, most_shared):
    """Of one kind, less noise; of histories with one release, two and so on of different noise, Renyi curves."""
    rng = np.random.default_rng(2)
    histories = {
        who: ([gaussian(float(z), 0.05, 4) for z in rng.uniform(0.8, 2.0, 2 if kinds == "one" else 1 + who)], 1e-5)
        for who in range(most_shared + 2)
    } | {"bare": ([gaussian(0.0)], 1e-5)}
    told = risks_of(histories)
    assert told["bare"].found == (1.0, 1.0, 1.0)
    for who in (0, 5 * most_shared // 8 + 1):
        own = found_by(list(histories[who][0]))
        assert (np.array(told[who].found) >= own).all()
        if kinds == "one":
            assert told[who].found[1] < 1.5 * own[1]
    assert len(set(told.values())) <= (most_shared if kinds == "one" else most_shared // 4 + 1)


# --- targets and words ---


def test_the_noise_for_a_target_meets_it_and_hardly_more():
    def schedule(z: float) -> list[SubsampledGaussian]:
        return [gaussian(z, 0.2, 10)]

    target = RiskTarget.parse("tpr=0.1@fpr=0.01")
    z = calibrate_to_risk([(schedule, 1e-5)], target)
    assert 0.098 < risk_of(schedule(z), 1e-5).tpr_at_fpr["0.01"] <= 0.1
    of_all = calibrate_to_risk([(lambda z: [gaussian(z, count=4)], 1e-5)], RiskTarget(mu=0.5))
    assert of_all == pytest.approx(4.0, rel=1e-3)
    assert of_all >= 4.0


@pytest.mark.parametrize("text", ["0.1", "tpr=0.1", "tpr=0.1@fpr=0.2", "tpr=1@fpr=0.01", "mu=0", "mu=x", "mu=inf", ""])
def test_a_target_reads_what_it_writes_and_one_that_says_nothing_is_refused(text):
    with pytest.raises(InputError, match="target_risk"):
        RiskTarget.parse(text)
    assert [str(RiskTarget.parse(good)) for good in ("tpr=0.1@fpr=0.01", "mu=0.9")] == ["tpr=0.1@fpr=0.01", "mu=0.9"]


@pytest.mark.parametrize(("unit", "words"), [("record", "records"), ("person", "participants"), ("client", "clients")])
def test_the_sentence_names_the_unit_and_rounds_up(unit, words):
    told = risk_of([gaussian(2.0, unit=unit)], 1e-5)
    found, of_delta = texts.risk_in_words(told.values, 1e-5)
    assert found.endswith(f"identifies at most 3.4 % of the {words}.")
    assert of_delta.startswith("Delta, 1e-5, ")
    assert texts.percent_up(0.03401) == "3.5 %"

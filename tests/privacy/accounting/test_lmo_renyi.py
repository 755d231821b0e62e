"""LMO noise: bounds never below the exact divergence, known values, sampling, events, and their composition."""

import json
import math
from dataclasses import replace
from functools import reduce

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import ORDERS, delta_of, epsilon_of, stays_within
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.events import SubsampledGaussian, SubsampledLmo, from_json, to_json
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import ExponentialPart, GammaPart, LmoParameters, UniformPart
from fedpriv.privacy.accounting.lmo_renyi import check_domain, largest_loss, poisson_sampled, published, sound
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.accounts import Accounts
from tests.events import by_dp_accounting, gaussian
from tests.marks import slow
from tests.privacy.accounting.lmo_oracle import (
    best_split,
    composed_losses,
    exact_divergence,
    gamma,
    log_density,
    random_parameters,
    uniform,
)

EXAMPLE = Columns.of(uniform(0.1, 0.5))
THREE_ORDERS = [2, 8, 32]
DELTA = 1e-5
PARAMETERS = LmoParameters(
    combination="mixture",
    gamma=GammaPart(weight=0.25, shape=2.0, scale=0.004),
    exponential=ExponentialPart(weight=0.25, rate=90.0),
    uniform=UniformPart(weight=0.5, low=0.1, high=0.5),
)
UNIFORM = {"weight": 1, "low": 0.1, "high": 0.5}


def quadratic_limit(of, orders):
    return np.array(orders) * of.tilted_moments(0.0)[1] / 2


# Reference: u uniform on [0.1, 0.5], by an independent script; C = 1, to four places.
def test_curves_of_the_example_have_the_reference_values():
    assert published(EXAMPLE, THREE_ORDERS) == pytest.approx([0.0896, 0.2557, 0.3969], abs=5e-5)
    assert sound(EXAMPLE, THREE_ORDERS, dimension=74_883) == pytest.approx([0.1033, 0.4131, 1.6523], abs=5e-5)
    assert 1 / EXAMPLE.tilted_moments(0.0)[1] == pytest.approx(9.68, abs=5e-3)
    # For C = 2, where Theorem 4.2 of Yang et al. says 0.319: by the Laplace divergence.
    assert published(Columns.of(uniform(0.5, 0.5)), 4, 2.0) == pytest.approx(0.814, abs=5e-4)
    assert published(EXAMPLE, 4, 0.0) == 0


@pytest.mark.parametrize("seed", [*range(40), *slow(*range(40, 100))])
def test_scalar_curve_is_never_below_the_exact_divergence(seed):
    generator = np.random.default_rng(seed)
    order, shift = int(generator.choice([2, 3, 5, 8, 17, 32])), generator.uniform(0.2, 2)
    parameters = random_parameters(generator, order, shift)
    exact = exact_divergence(parameters, order, shift)
    assert exact <= published(Columns.of(parameters), order, shift)[0] * (1 + 1e-9)


@pytest.mark.parametrize("b", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("order", [2, 8, 64])
def test_scalar_curve_of_a_point_mass_is_the_exact_divergence_and_that_of_dp_accounting(b, order):
    parameters = uniform(1 / b, 1 / b)
    divergence = published(Columns.of(parameters), order)[0]
    assert divergence == pytest.approx(exact_divergence(parameters, order, 1.0), rel=1e-6)
    accountant = rdp.RdpAccountant([order])
    accountant.compose(dp_accounting.LaplaceDpEvent(b))
    assert divergence == pytest.approx(accountant.rdp[0], rel=1e-9)
    # The oracle tells smaller and larger divergences apart.
    assert exact_divergence(uniform(0.1, 0.5), 8, 1.0) < 0.95 * published(EXAMPLE, 8)[0]
    assert exact_divergence(uniform(0.1, 0.5), 8, 1.5) > published(EXAMPLE, 8)[0]


@pytest.mark.parametrize("seed", [*range(6), *slow(*range(6, 12))])
def test_sound_is_within_five_percent_of_brute_force_and_never_below_it(seed):
    generator = np.random.default_rng(1000 + seed)
    order = int(generator.choice([2, 3, 4, 8, 16, 32]))
    of = Columns.of(random_parameters(generator, order))
    steps = np.sqrt(np.linspace(0, 1, 241))
    curve = np.array([published(of, order, step)[0] for step in steps])
    for dimension, best in enumerate(best_split(curve, 8), start=1):
        bound = sound(of, order, dimension=dimension)[0]
        assert best <= bound * (1 + 1e-9)
        assert bound <= 1.05 * best


@pytest.mark.parametrize(
    ("parameters", "order", "max_ratio"),
    [(uniform(0.1, 0.5), 2, 1.4), (uniform(0.1, 0.5), 8, 1.4), (gamma(1, 0.3), 4, 4.0), (gamma(2, 0.05), 8, 2.0)],
)
def test_sound_is_never_below_the_exact_divergence_of_a_vector(parameters, order, max_ratio):
    steps = np.sqrt(np.linspace(0, 1, 25))
    curve = np.array([0.0, *(exact_divergence(parameters, order, step) for step in steps[1:])])
    for dimension, best in enumerate(best_split(curve, 8), start=1):
        bound = sound(Columns.of(parameters), order, dimension=dimension)[0]
        assert best <= bound
        assert bound <= max_ratio * best, "revealing u costs something, but not everything"


def test_sound_tends_to_its_limit_from_below():
    bounds = [sound(EXAMPLE, THREE_ORDERS, dimension=d) for d in (1, 2, 8, 100, 10**5, 10**12, math.inf)]
    assert (np.diff(bounds, axis=0) >= -1e-12).all()
    assert bounds[0] == pytest.approx(published(EXAMPLE, THREE_ORDERS))
    assert bounds[-1] == pytest.approx(quadratic_limit(EXAMPLE, THREE_ORDERS), rel=5e-5)
    assert (bounds[-1] >= quadratic_limit(EXAMPLE, THREE_ORDERS)).all()


def test_one_coordinate_can_be_the_worst_direction():
    heavy = Columns.of(gamma(1, 0.3))
    assert quadratic_limit(heavy, 4) == pytest.approx(0.36)
    for dimension in (1, 2, 1000, math.inf):
        assert sound(heavy, 4, dimension=dimension) == pytest.approx(0.592, abs=5e-4)


def test_a_coarse_grid_only_raises_the_sound_bound():
    of = Columns.of(random_parameters(np.random.default_rng(3), 8))
    fine, coarse = (sound(of, [2, 8], dimension=20, points=points) for points in (4096, 24))
    assert (fine <= coarse).all()
    assert (coarse <= 1.2 * fine).all()


def test_sensitivity_acts_as_a_scale_of_u():
    parameters = random_parameters(np.random.default_rng(4), 8, 3.0)
    scaled = Columns.of(parameters.scaled(3.0))
    for curve in (published, lambda of, orders, s=1.0: sound(of, orders, dimension=9, sensitivity=s)):
        assert curve(Columns.of(parameters), [2, 8], 3.0) == pytest.approx(curve(scaled, [2, 8]), rel=1e-6)


# Jensen: exp is convex, so a constant u with the same mean has a smaller moment generating function, and costs less.
@pytest.mark.parametrize("seed", [*range(6), *slow(*range(6, 20))])
def test_no_lmo_noise_costs_less_than_laplace_noise_of_the_same_mean_inverse_scale(seed):
    of = Columns.of(random_parameters(np.random.default_rng(seed), 8))
    mean = float(of.tilted_moments(0.0)[0])
    constant = Columns.of(uniform(mean, mean))
    assert (published(constant, [2, 5, 8]) <= published(of, [2, 5, 8]) * (1 + 1e-9)).all()
    assert (sound(constant, [2, 8], dimension=50) <= sound(of, [2, 8], dimension=50) * (1 + 1e-4)).all()


def test_orders_outside_the_domain_cost_infinity_and_are_refused_by_name():
    of = Columns.of(gamma(2, 0.1))
    assert of.domain_end == pytest.approx(10)
    for curve in (published(of, [10, 11, 12]), sound(of, [10, 11, 12], dimension=7)):
        assert np.isfinite(curve).tolist() == [True, False, False]
    check_domain(of, 10, 1.0)
    with pytest.raises(InputError, match=r"order = 11: \(order - 1\) \* sensitivity must be < 10"):
        check_domain(of, 11, 1.0)
    with pytest.raises(InputError, match="order = 6"):
        check_domain(of, 6, 2.0)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: published(EXAMPLE, [1.0]), "order = 1.0"),
        (lambda: published(EXAMPLE, math.nan), "order = nan"),
        (lambda: published(EXAMPLE, 2, -1.0), "sensitivity = -1.0"),
        (lambda: sound(EXAMPLE, 2, dimension=0), "dimension = 0"),
        (lambda: sound(EXAMPLE, 2, dimension=3, sensitivity=math.inf), "sensitivity = inf"),
    ],
)
def test_orders_dimensions_and_sensitivities_out_of_range_are_refused_by_name(call, part):
    with pytest.raises(InputError, match=part):
        call()


def test_many_candidates_at_once_have_the_same_curves_as_each_alone():
    generator = np.random.default_rng(5)
    singles = [Columns.of(random_parameters(generator, 8)) for _ in range(6)]
    singles = [single for single in singles if single.combination == singles[0].combination]
    assert len(singles) > 1
    stacked = Columns(
        combination=singles[0].combination,
        weights=np.stack([single.weights for single in singles], axis=1),
        **{name: np.array([getattr(s, name) for s in singles]) for name in ("shape", "scale", "rate", "low", "high")},
    )
    together = sound(stacked, [2, 8], dimension=30, points=200), published(stacked, [2, 8], 0.7)
    for index, single in enumerate(singles):
        assert together[0][index] == pytest.approx(sound(single, [2, 8], dimension=30, points=200), rel=1e-12)
        assert together[1][index] == pytest.approx(published(single, [2, 8], 0.7), rel=1e-12)


# Quadrature by scipy would lose precision at small t; the series in the moments does not.
@pytest.mark.parametrize("t", [-1e-8, -1e-3, 1e-3, 1e-8])
def test_near_zero_the_log_moment_generating_function_is_its_series(t):
    parameters = LmoParameters(
        combination="mixture",
        gamma=GammaPart(weight=0.3, shape=2, scale=0.1),
        uniform=UniformPart(weight=0.7, low=0.2, high=0.6),
    )
    mean = 0.3 * 0.2 + 0.7 * 0.4
    second = 0.3 * 6 * 0.01 + 0.7 * (0.04 + 0.12 + 0.36) / 3
    assert Columns.of(parameters).log_mgf(t) == pytest.approx(mean * t + (second - mean**2) * t**2 / 2, rel=1e-6)
    assert [float(value) for value in Columns.of(parameters).tilted_moments(0.0)] == pytest.approx([mean, second])


def event(parameters=PARAMETERS, q=0.1, **changes):
    fields = {"parameters": parameters, "sensitivity": 1.0, "dimension": 500, "sampling_probability": q, **changes}
    return SubsampledLmo(**fields)


def changed(**changes):
    fields = json.loads(to_json(event())) | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize("parameters", [PARAMETERS, uniform(0.5, 0.5), gamma(2, 0.1)])
@pytest.mark.parametrize("accounting", ["sound", "published"])
def test_json_round_trip_is_exact(parameters, accounting):
    original = event(parameters, q=0.37, accounting=accounting, count=7, sensitivity=math.sqrt(2))
    assert from_json(to_json(original)) == original
    assert LmoParameters.from_dict(json.loads(json.dumps(parameters.to_dict()))) == parameters
    linear = {"combination": "linear", "uniform": UNIFORM | {"weight": 3}}
    assert Columns.of(LmoParameters.from_dict(linear)).weights.tolist() == [0, 0, 3], "of any weights"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (changed(accounting="hopeful"), "accounting = 'hopeful'"),
        (changed(dimension=0), "dimension = 0"),
        (changed(dimension=2.5), "dimension = 2.5"),
        (changed(sensitivity=0), "sensitivity = 0"),
        (changed(sensitivity=-1), "sensitivity = -1"),
        (changed(sampling_probability=1.5), "sampling_probability = 1.5"),
        (changed(unit="client"), "sampling_probability = 0.1"),
        (changed(count=0), "count = 0"),
        (changed(parameters=None), "parameters"),
        (changed(parameters=[]), "parameters: must be a JSON object"),
        (changed(parameters={"combination": "mixture"}), "no part has weight"),
        (changed(shared_scale=True), "shared_scale"),
    ],
)
def test_impossible_events_are_refused_by_name(text, part):
    with pytest.raises(ValueError, match=part):
        from_json(text)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"combination": "sum", "uniform": UNIFORM}, "combination = 'sum'"),
        ({"uniform": UNIFORM}, "combination is missing"),
        ({"combination": "mixture", "uniform": UNIFORM | {"weight": 0.9}}, "weights sum to 0.9"),
        ({"combination": "mixture", "uniform": UNIFORM | {"low": 0.6}}, "uniform.low = 0.6"),
        ({"combination": "mixture", "uniform": UNIFORM | {"low": -1}}, "uniform.low = -1"),
        ({"combination": "mixture", "uniform": UNIFORM | {"high": math.nan}}, "uniform.high = nan"),
        ({"combination": "mixture", "uniform": UNIFORM | {"high": 0, "low": 0}}, "uniform.high = 0"),
        ({"combination": "mixture", "uniform": {"weight": 1, "low": 0.1}}, "uniform: must be a JSON object with"),
        ({"combination": "mixture", "uniform": UNIFORM | {"weight": "1"}}, "uniform.weight = '1'"),
        ({"combination": "mixture", "gamma": {"weight": 1, "shape": 0, "scale": 1}}, "gamma.shape = 0"),
        ({"combination": "mixture", "gamma": {"weight": 1, "shape": 1, "scale": math.inf}}, "gamma.scale = inf"),
        ({"combination": "mixture", "exponential": {"weight": 1, "rate": 0}}, "exponential.rate = 0"),
        ({"combination": "mixture", "exponential": {"weight": 1, "scale": 2}}, "weight, rate and nothing else"),
        ({"combination": "linear", "uniform": UNIFORM | {"weight": 0}}, "no part has weight"),
        ({"combination": "linear", "uniform": UNIFORM | {"weight": -1}}, "uniform.weight = -1"),
        ({"combination": "linear", "normal": {}}, "'normal' is unknown"),
        ({"combination": "linear", "shared": True}, "'shared' is unknown"),
    ],
)
def test_invalid_parameters_are_refused_in_one_line(values, part):
    with pytest.raises(InputError) as refusal:
        LmoParameters.from_dict(values)
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


# The moments of (1 - q) Q + q P against Q by the binomial theorem, evaluated literally.
@pytest.mark.parametrize("q", [0.01, 0.3])
def test_sampled_curve_is_the_binomial_sum_of_the_moments(q):
    curve = published(Columns.of(uniform(0.5, 1.0)), range(2, 13))
    orders = np.array([2, 3, 7, 12])
    for order, result in zip(orders.tolist(), poisson_sampled(curve, orders, q), strict=True):
        terms = [(math.comb(order, n), n, math.exp((n - 1) * curve[n - 2]) if n > 1 else 1) for n in range(order + 1)]
        total = sum(number * q**n * (1 - q) ** (order - n) * moment for number, n, moment in terms)
        assert result == pytest.approx(math.log(total) / (order - 1), rel=1e-9)


def test_sampled_curve_is_precise_where_small_and_infinite_from_the_first_infinite_order():
    curve = np.array([0.1, 0.2, np.inf])
    small = poisson_sampled(curve, np.array([2, 3, 4]), 1e-9)
    assert small[0] == pytest.approx(1e-18 * math.expm1(0.1), rel=1e-6)
    assert np.isfinite(small).tolist() == [True, True, False]


# The divergence of (1 - q) p + q p(x - 1) from p, and the reverse, by quadrature over smooth pieces of the line.
@pytest.mark.parametrize("parameters", [uniform(1.0, 1.0), uniform(0.1, 1.5)], ids=["laplace", "lmo"])
@pytest.mark.parametrize("q", [0.02, 0.3])
@pytest.mark.parametrize("order", [2, 4, 16])
def test_sampled_curve_is_never_below_the_exact_divergence(parameters, q, order):
    nodes, weights = np.polynomial.legendre.leggauss(80)
    pieces = [(low, low + 1) for low in range(-60, 61)]
    x = np.concatenate([low + (high - low) * (1 + nodes) / 2 for low, high in pieces])
    dx = np.tile(weights / 2, len(pieces))
    without = np.exp(log_density(parameters, x))
    with_record = (1 - q) * without + q * np.exp(log_density(parameters, x - 1))
    forward = math.log(np.sum(dx * without * (with_record / without) ** order)) / (order - 1)
    reverse = math.log(np.sum(dx * with_record * (without / with_record) ** order)) / (order - 1)
    curve = published(Columns.of(parameters), range(2, order + 1))
    (result,) = poisson_sampled(curve, np.array([order]), q)
    assert 0 < reverse <= forward <= result * (1 + 1e-9)
    assert result <= (1 + 1e-6 if parameters == uniform(1.0, 1.0) else 2) * forward, "exact where u is known"


def by_hand(events, delta=DELTA):
    """Epsilon of the summed Renyi curves at integer orders, converted by dp-accounting."""
    is_whole = [float(order).is_integer() for order in ORDERS]
    orders = np.array(ORDERS)[is_whole].astype(int)
    total = np.zeros(len(orders))
    for each in events:
        if isinstance(each, SubsampledGaussian):
            total += by_dp_accounting("rdp", each).rdp[is_whole]
        else:
            curve = sound(Columns.of(each.parameters), range(2, 1025), dimension=each.dimension, points=512)
            total += each.count * poisson_sampled(curve, orders, each.sampling_probability)
    return rdp.compute_epsilon(orders, total, delta)[0]


def test_lmo_and_gaussian_noise_compose_by_rdp_at_integer_orders():
    events = [event(count=20), gaussian(2.0, 0.1, 30)]
    by_rdp, by_pld = (epsilon_of(events, DELTA, accountant) for accountant in ("rdp", "pld"))
    assert by_rdp.epsilon == by_pld.epsilon == pytest.approx(by_hand(events), rel=1e-9)
    assert by_rdp.accountant == by_pld.accountant == "rdp"
    assert (by_rdp.upper_bound_only, by_pld.upper_bound_only) == (False, True)
    assert by_pld.is_guarantee
    assert delta_of(events, by_rdp.epsilon) == pytest.approx(DELTA, rel=1e-6)


def test_fewer_coordinates_and_less_sensitivity_never_cost_more():
    def cost(factor=1.0, dimension=20, sensitivity=1.0):
        of = event(PARAMETERS.scaled(factor), dimension=dimension, sensitivity=sensitivity, count=5)
        return epsilon_of([of], DELTA).epsilon

    base = cost()
    assert cost(dimension=1) < base < cost(dimension=500)
    assert base < cost(sensitivity=1.5) == pytest.approx(cost(factor=1.5), rel=1e-6)


def test_published_accounting_is_not_a_guarantee_and_never_enforces_a_budget():
    paper = event(accounting="published", count=5)
    assert not paper.is_guarantee
    assert event().is_guarantee
    default = epsilon_of([paper], DELTA)
    assert (default.epsilon, default.is_guarantee) == (math.inf, False)
    assert epsilon_of([event(), paper], DELTA).epsilon == math.inf
    assert delta_of([paper], 5.0) == 1.0
    assert not stays_within([paper], DELTA, 1e6)
    shown = epsilon_of([paper], DELTA, allow_unproven=True)
    assert 0 < shown.epsilon < epsilon_of([replace(paper, accounting="sound")], DELTA).epsilon
    assert not shown.is_guarantee


def test_noise_without_a_finite_order_costs_what_the_gaussian_noise_costs_that_dominates_it():
    heavy = event(gamma(2, 1.5), q=1.0)
    assert np.isinf(sound(Columns.of(heavy.parameters), [2, 3], dimension=500)).all()
    dominating = gaussian(heavy.effective_noise_multiplier)
    assert epsilon_of([heavy], DELTA).epsilon == epsilon_of([dominating], DELTA).epsilon
    assert epsilon_of([replace(heavy, accounting="published")], DELTA, allow_unproven=True).epsilon == math.inf


# A record may move all coordinates, or one; the loss of each is that of a Laplace mechanism of this shift, u being 1.
# Optimistic losses of dp-accounting bound the true divergence from below.
@pytest.mark.parametrize("length", [1.0, *slow(0.05, 6.0)])
@pytest.mark.parametrize("direction", [(1,), (3, 1, 1, 1), (1,) * 16, *slow((1, 1))])
def test_gaussian_noise_of_the_effective_multiplier_dominates_every_direction(direction, length):
    shifts = length * np.array(direction) / np.linalg.norm(direction)
    losses = [
        privacy_loss_distribution.from_laplace_mechanism(1.0, shift, pessimistic_estimate=False, use_connect_dots=False)
        for shift in shifts.tolist()
    ]
    total = reduce(lambda one, other: one.compose(other), losses)
    of = event(uniform(1.0, 1.0), q=1.0, sensitivity=length, dimension=len(direction))
    assert of.effective_noise_multiplier == pytest.approx(math.sqrt(2 / math.pi) / length)
    epsilons = np.linspace(0, 1.5 * length, 7)
    mu = 1 / of.effective_noise_multiplier
    dominating = stats.norm.cdf(mu / 2 - epsilons / mu) - np.exp(epsilons) * stats.norm.cdf(-mu / 2 - epsilons / mu)
    exact = np.array([total.get_delta_for_epsilon(epsilon) for epsilon in epsilons])
    assert (exact <= dominating + 1e-12).all()
    assert exact[0] >= 0.65 * dominating[0], "and by little"
    assert total.get_delta_for_epsilon(of.max_loss) <= 1e-12
    if len(set(direction)) == 1:
        assert total.get_delta_for_epsilon(0.9 * of.max_loss) > 1e-12, "Theorem A.2 is tight"


# The same for random parameters, sizes and directions, by quadrature, which gives a lower bound. What it says of every
# epsilon holds on a Poisson sample too: the divergence there is that without sampling, at another epsilon.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_gaussian_noise_of_the_effective_multiplier_dominates_noise_of_any_parameters(seed):
    generator = np.random.default_rng(seed)
    closest = 0.0
    for _ in range(10):
        length = 10 ** generator.uniform(-1.5, 1)
        parameters = random_parameters(generator, generator.uniform(1.2, 20), length)
        shifts = generator.exponential(size=generator.integers(1, 9)) ** generator.choice([0.2, 1, 4])
        shifts *= length / np.linalg.norm(shifts)
        losses, masses = composed_losses(parameters, shifts)
        assert masses.sum() == pytest.approx(1, abs=1e-5)
        of = event(parameters, q=1.0, sensitivity=length, dimension=len(shifts))
        reached = losses[masses > 1e-12].max()
        assert reached <= of.max_loss
        mu, epsilons = 1 / of.effective_noise_multiplier, np.linspace(0, 0.9 * reached, 9)
        lower = np.array([(masses * -np.expm1(np.minimum(epsilon - losses, 0))).sum() for epsilon in epsilons])
        dominating = stats.norm.cdf(mu / 2 - epsilons / mu)
        dominating -= np.exp(epsilons + stats.norm.logcdf(-mu / 2 - epsilons / mu))
        assert (lower <= dominating).all()
        closest = max(closest, lower[0] / dominating[0])
    assert closest > 0.6, "and for some by little"


# Of dp-accounting, for a single shift and a known scale: with sampling, and over several steps.
@pytest.mark.parametrize(("q", "steps"), [(1.0, 1), (0.05, 30)])
def test_a_scalar_costs_no_less_than_the_exact_laplace_loss_and_little_more(q, steps):
    exact = privacy_loss_distribution.from_laplace_mechanism(1.0, sampling_prob=q, pessimistic_estimate=False)
    lower = exact.self_compose(steps).get_epsilon_for_delta(DELTA)
    of = event(uniform(1.0, 1.0), q=q, dimension=1, count=steps)
    assert lower <= epsilon_of([of], DELTA).epsilon <= (1 + 1e-3 if steps == 1 else 1.5) * lower + 1e-4


# Without sampling, over many coordinates, the Gaussian limit bounds what any accounting may say from below.
@pytest.mark.parametrize(
    ("q", "steps", "epsilon"), [(0.04, 50, 3.0), pytest.param(0.008, 50, 0.3, marks=pytest.mark.slow)]
)
def test_laplace_noise_on_a_gradient_needs_at_most_1_8_times_the_deviation_of_gaussian_noise(q, steps, epsilon):
    needed = noise_multiplier_for(epsilon, DELTA, sampling_probability=q, steps=steps)
    for ratio, is_enough in ((1.8, True), (math.sqrt(2), False)):
        u = math.sqrt(2) / (ratio * needed)
        of = event(uniform(u, u), q=q, dimension=76_808, count=steps)
        assert (epsilon_of([of], DELTA).epsilon <= epsilon) == is_enough


# Yang et al., Theorem A.2: the largest ratio of the density to the shifted one, u being hidden.
@pytest.mark.parametrize("seed", [*range(6), *slow(*range(6, 12))])
def test_the_largest_loss_is_the_largest_ratio_of_densities(seed):
    generator = np.random.default_rng(seed)
    parameters, shift = random_parameters(generator, 4), generator.uniform(0.1, 3)
    of = event(parameters, q=1.0, dimension=1, sensitivity=shift)
    x = np.concatenate([-np.geomspace(1e-9, 1e3, 2000), [0.0], np.geomspace(1e-9, 1e3, 2000)])
    ratios = log_density(parameters, x) - log_density(parameters, x - shift)
    assert ratios.max() == pytest.approx(of.max_loss, rel=1e-6)
    assert of.max_loss == pytest.approx(ratios[2000], rel=1e-6), "at 0"
    several = [replace(of, dimension=d).max_loss for d in (1, 2, 7, 10**6, 2**53)]
    assert (np.diff(several) > 0).all(), "a record that moves every coordinate is the worst"
    sampled = replace(of, sampling_probability=0.01, count=3).max_loss
    assert sampled == pytest.approx(3 * math.log1p(0.01 * math.expm1(of.max_loss)))


# Laplace noise of scale 1 / u, of which the loss is u for each unit of the shift: sqrt(d) C u over d coordinates.
@pytest.mark.parametrize(("u", "shift"), [(6.424e-8, 2.6e-8), (1.4e-8, 1.2e-6), (9.7e-9, 1.1e-7), (3e8, 1e-23)])
def test_the_largest_loss_is_not_lost_in_the_rounding_of_a_scale_far_from_1(u, shift):
    found = largest_loss(Columns.of(uniform(u, u)), dimension=1.0, sensitivity=shift)
    assert u * shift <= found <= u * shift * (1 + 1e-6) + 5e-15


# A 0.3-DP Laplace noise; and u uniform on [0.1, 0.5], whose loss is log E[u] / E[u e^-u], of 0.3 and
# (1.1 e^-0.1 - 1.5 e^-0.5) / 0.4.
@pytest.mark.parametrize(("low", "high", "epsilon"), [(0.3, 0.3, 0.3), (0.1, 0.5, 0.339)])
def test_a_scalar_is_charged_theorem_a_2(low, high, epsilon):
    of = event(uniform(low, high), q=1.0, dimension=1)
    assert epsilon_of([of], 1e-10).epsilon == pytest.approx(epsilon, abs=5e-4)
    assert epsilon_of([replace(of, accounting="published")], 1e-10, allow_unproven=True).epsilon > epsilon + 0.01


def test_accounts_compose_and_limit_lmo_releases():
    accounts = Accounts({0: 1000})
    accounts.record(0, Release(event=event(count=3), rho_bar=0.5))
    expected = epsilon_of([event(count=3)], 1e-5).epsilon
    assert accounts.epsilon_of(0, "local", "pld").epsilon == expected
    assert not accounts.fits(0, [Release(event=event(count=3), rho_bar=0.5)], "local", expected)


def test_epsilon_is_finite_if_the_lower_integer_orders_are():
    sampled = event(gamma(2, 0.1), q=0.2)
    curve = published(Columns.of(sampled.parameters), range(2, 12))
    assert np.isfinite(curve).sum() == 9
    assert epsilon_of([sampled], DELTA).epsilon < math.inf

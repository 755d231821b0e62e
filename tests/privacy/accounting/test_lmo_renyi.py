"""The bounds on LMO noise are never below the exact divergence, of one number or a vector, and give known values."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import GammaPart, LmoParameters, UniformPart
from fedpriv.privacy.accounting.lmo_renyi import check_domain, published, quadratic_limit, sound
from tests.privacy.accounting.lmo_oracle import (
    best_split,
    equation_1,
    exact_divergence,
    gamma,
    random_parameters,
    theorem_4_2,
    uniform,
)

EXAMPLE = Columns.of(uniform(0.1, 0.5))
ORDERS = [2, 8, 32]


# Reference: u uniform on [0.1, 0.5], by an independent script; C = 1, to four places.
def test_curves_of_the_example_have_the_reference_values():
    assert published(EXAMPLE, ORDERS) == pytest.approx([0.0896, 0.2557, 0.3969], abs=5e-5)
    assert sound(EXAMPLE, ORDERS, dimension=74_883) == pytest.approx([0.1033, 0.4131, 1.6523], abs=5e-5)
    assert 1 / EXAMPLE.tilted_moments(0.0)[1] == pytest.approx(9.68, abs=5e-3)


# Yang et al., Theorem 4.2 at u = 0.5, order 4, C = 2: its value, and the true one by the Laplace divergence.
def test_theorem_4_2_is_too_small_and_is_not_zero_at_sensitivity_zero():
    half = Columns.of(uniform(0.5, 0.5))
    assert theorem_4_2(half, 4, 2.0) == pytest.approx(0.319, abs=5e-4)
    assert published(half, 4, 2.0) == pytest.approx(0.814, abs=5e-4)
    assert theorem_4_2(half, 4, 0.0) > 0.2
    assert published(half, 4, 0.0) == 0
    assert theorem_4_2(EXAMPLE, ORDERS) == pytest.approx(published(EXAMPLE, ORDERS))


def test_equation_1_as_printed_calls_noise_near_zero_private():
    almost_none = Columns.of(uniform(1.1, 1.1))
    epsilons = equation_1(published(almost_none, [2, 128]), [2, 128], 1e-10)
    assert epsilons[1] < 0 < 2 < epsilons[0]


@pytest.mark.parametrize("seed", range(100))
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


def test_the_oracle_tells_smaller_and_larger_divergences_apart():
    parameters = uniform(0.1, 0.5)
    assert exact_divergence(parameters, 8, 1.0) < 0.95 * published(EXAMPLE, 8)[0]
    assert exact_divergence(parameters, 8, 1.5) > published(EXAMPLE, 8)[0]


@pytest.mark.parametrize("seed", range(12))
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
    bounds = [sound(EXAMPLE, ORDERS, dimension=d) for d in (1, 2, 8, 100, 10**5, 10**12, math.inf)]
    assert (np.diff(bounds, axis=0) >= -1e-12).all()
    assert bounds[0] == pytest.approx(published(EXAMPLE, ORDERS))
    assert bounds[-1] == pytest.approx(quadratic_limit(EXAMPLE, ORDERS), rel=5e-5)
    assert (bounds[-1] >= quadratic_limit(EXAMPLE, ORDERS)).all()


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
@pytest.mark.parametrize("seed", range(20))
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

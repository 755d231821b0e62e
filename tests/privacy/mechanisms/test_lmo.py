"""LMO noise has the distribution that its parameters describe, on every coordinate, and its event states the same."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.events import SubsampledLmo
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import ExponentialPart, GammaPart, LmoParameters, UniformPart
from fedpriv.privacy.mechanisms.lmo import MECHANISM, _inverse_scales, _lmo_noise
from fedpriv.privacy.mechanisms.registry import NoiseRequest
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource, laplace_from_words, uniform_from_words

FALSE_ALARM = 1e-6
FROM_0 = {"weight": 1, "low": 0, "high": 1}
NUM = 40_000


def parameters(combination="mixture", **parts):
    kinds = {"gamma": GammaPart, "exponential": ExponentialPart, "uniform": UniformPart}
    return LmoParameters(combination=combination, **{name: kinds[name](**part) for name, part in parts.items()})


ALL = {
    "gamma": {"weight": 0.3, "shape": 3.5, "scale": 0.1},
    "exponential": {"weight": 0.3, "rate": 4.0},
    "uniform": {"weight": 0.4, "low": 0.2, "high": 0.6},
}
EVERY = {
    "laplace": parameters(uniform={"weight": 1, "low": 0.5, "high": 0.5}),
    "uniform": parameters(uniform={"weight": 1, "low": 0.1, "high": 0.5}),
    "mixture": parameters(**ALL),
    "linear": parameters("linear", **ALL),
    "small-shape": parameters(gamma={"weight": 1, "shape": 0.4, "scale": 2.0}),
    "exponential": parameters(exponential={"weight": 1, "rate": 4.0}),
}
LAPLACE, EXAMPLE, MIXTURE, LINEAR, _, EXPONENTIAL = EVERY.values()


# What uniform words become does not depend on their source.
@pytest.mark.parametrize(
    ("name", "source"), [*((name, SeededSource(0)) for name in EVERY), ("mixture", SecureSource())]
)
def test_noise_fits_its_distribution_and_no_other_scale(name, source):
    values, cdf = _lmo_noise(EVERY[name], NUM, source), Columns.of(EVERY[name]).cdf
    assert [factor for factor in (2 / 3, 1, 3 / 2) if stats.kstest(values * factor, cdf).pvalue > FALSE_ALARM] == [1]


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("gamma", stats.gamma(3.5, scale=0.1)),
        ("exponential", stats.expon(scale=1 / 4.0)),
        ("uniform", stats.uniform(0.2, 0.4)),
        # By rejection, and raised from below 1.
        *(("gamma", stats.gamma(shape)) for shape in (0.1, 0.7, 1.0, 2.5, 60.0)),
    ],
)
def test_every_part_of_u_fits_scipys_distribution_and_no_other_scale(name, law):
    part = ALL[name] | {"weight": 1}
    if name == "gamma":
        part |= {"shape": law.args[0], "scale": law.kwds.get("scale", 1.0)}
    values = _inverse_scales(parameters(**{name: part}), NUM, SeededSource(7))
    accepted = [factor for factor in (2 / 3, 1, 3 / 2) if stats.kstest(values * factor, law.cdf).pvalue > FALSE_ALARM]
    assert accepted == [1]


# Marsaglia and Tsang 2000, Section 4. With 0.025 it would accept too much.
@pytest.mark.parametrize("shape", [1.0, 1.2, 2.0, 60.0])
def test_the_squeeze_of_gamma_values_accepts_nothing_that_the_condition_does_not(shape):
    d, x = shape - 1 / 3, np.linspace(-3, 3, 100_001)
    root = np.maximum(1 + x / math.sqrt(9 * d), 0)
    with np.errstate(divide="ignore"):
        accepted = np.exp(x**2 / 2 + d - d * root**3 + 3 * d * np.log(root))
    assert (1 - 0.0331 * x**4 <= accepted + 1e-12).all()
    assert shape > 1 or (1 - 0.025 * x**4 > accepted).any()


def test_a_mixture_draws_each_part_as_often_as_its_weight_says():
    far, near = {"weight": 0.2, "shape": 1e4, "scale": 1e-2}, {"weight": 0.8, "low": 0.1, "high": 0.2}
    chosen = int((_inverse_scales(parameters(gamma=far, uniform=near), NUM, SeededSource(4)) > 1).sum())
    assert stats.binomtest(chosen, NUM, 0.2).pvalue > FALSE_ALARM
    assert stats.binomtest(chosen, NUM, 0.3).pvalue < FALSE_ALARM


# The distribution without the moment generating function: Laplace averaged over u with scipy's densities.
@pytest.mark.parametrize("x", [-7.0, -0.4, 0.0, 1e-3, 2.0, 30.0])
def test_cdf_is_the_average_of_laplace_distributions(x):
    def average(pdf, low, high):
        return integrate.quad(lambda u: pdf(u) * stats.laplace.cdf(x, scale=1 / u), low, high, epsabs=1e-12)[0]

    gamma = average(lambda u: stats.gamma.pdf(u, 3.5, scale=0.1), 1e-9, 8)
    exponential = average(lambda u: stats.expon.pdf(u, scale=0.25), 1e-12, 12)
    uniform = average(lambda u: stats.uniform.pdf(u, 0.2, 0.4), 0.2, 0.6)
    assert Columns.of(MIXTURE).cdf(x) == pytest.approx(0.3 * gamma + 0.3 * exponential + 0.4 * uniform, abs=1e-8)


@pytest.mark.parametrize("name", EVERY)
def test_density_is_the_derivative_of_the_cdf_and_quantile_its_inverse(name):
    of, x = Columns.of(EVERY[name]), np.array([-3.0, -0.2, 0.5, 4.0])
    assert of.density(x) == pytest.approx((of.cdf(x + 1e-5) - of.cdf(x - 1e-5)) / 2e-5, rel=1e-5)
    p = np.array([1e-6, 0.1, 0.5, 0.75, 0.999])
    assert of.cdf(of.quantile(p)) == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize(
    "chosen",
    [EXAMPLE, LINEAR, pytest.param(parameters(gamma={"weight": 1, "shape": 6, "scale": 0.2}), marks=pytest.mark.slow)],
)
def test_moments_entropy_and_information_are_those_of_the_density(chosen):
    of = Columns.of(chosen)

    def over_line(function, pieces=((0, 20), (20, 400), (400, 1e5))):
        return 2 * sum(integrate.quad(function, *piece, limit=400, epsabs=1e-12)[0] for piece in pieces)

    def p(x):
        return float(of.density(x))

    assert over_line(p) == pytest.approx(1, rel=1e-6)
    assert over_line(lambda x: p(x) * x) == pytest.approx(float(of.mean_absolute), rel=1e-4)
    assert over_line(lambda x: p(x) * x * x) == pytest.approx(float(of.variance), rel=2e-3)
    minus_p_log_p = over_line(lambda x: -p(x) * math.log(max(p(x), 1e-300)))
    assert minus_p_log_p == pytest.approx(of.entropy, rel=1e-4)
    step = 1e-4
    information = over_line(lambda x: ((p(x + step) - p(x)) / step) ** 2 / p(x), ((0, 20), (20, 100)))
    assert information == pytest.approx(of.fisher_information, rel=2e-3)


# Laplace noise by its closed forms. For u uniform on [0.1, 0.5], 2 / (low high) and an independent quadrature.
def test_measures_have_their_closed_forms_and_reference_values():
    laplace, example = Columns.of(LAPLACE), Columns.of(EXAMPLE)
    assert (float(laplace.variance), float(laplace.mean_absolute)) == pytest.approx((8.0, 2.0))
    assert (laplace.entropy, laplace.fisher_information) == pytest.approx((1 + math.log(4), 0.25))
    assert float(laplace.quantile(0.75)) == pytest.approx(2 * math.log(2))
    assert float(example.variance) == pytest.approx(40)
    assert example.fisher_information == pytest.approx(0.09198, abs=5e-6)


@pytest.mark.parametrize(
    ("chosen", "mean_is_finite", "variance_is_finite"),
    [
        (EXPONENTIAL, False, False),
        (MIXTURE, False, False),
        (LINEAR, True, True),
        (parameters(gamma={"weight": 1, "shape": 1.5, "scale": 1.0}), True, False),
        (parameters(gamma={"weight": 1, "shape": 2.1, "scale": 1.0}), True, True),
        (parameters(uniform=FROM_0), False, False),
        (parameters("linear", exponential={"weight": 1, "rate": 1}, uniform=FROM_0), True, False),
        (parameters("linear", gamma={"weight": 1, "shape": 2.1, "scale": 1.0}), True, True),
    ],
)
def test_moments_are_infinite_exactly_if_u_is_too_often_small(chosen, mean_is_finite, variance_is_finite):
    of = Columns.of(chosen)
    assert math.isfinite(of.mean_absolute) == mean_is_finite
    assert math.isfinite(of.variance) == variance_is_finite


@pytest.mark.parametrize("probability", [0.0, 1.0, math.nan])
def test_a_quantile_outside_the_open_unit_interval_is_refused(probability):
    with pytest.raises(InputError, match="probability"):
        Columns.of(LAPLACE).quantile(probability)


# --- words ---


def test_uniform_and_laplace_values_invert_their_distributions():
    words = np.array([0, 2**63, 2**64 - 1, 2**62, 3 * 2**62], dtype=np.uint64)
    assert uniform_from_words(words).tolist() == pytest.approx([2.0**-65, 0.5, 1.0, 0.25, 0.75], abs=1e-15)
    values = laplace_from_words(words)
    assert values[:3].tolist() == pytest.approx([45.05, -45.05, 0.0], abs=0.01)
    assert values[3:].tolist() == pytest.approx([math.log(2), -math.log(2)])
    assert stats.kstest(laplace_from_words(SecureSource().words(NUM)), "laplace").pvalue > FALSE_ALARM


# --- the mechanism ---


def noised(total, chosen=MIXTURE, accounting="sound", **changes):
    parameters = json.dumps({**chosen.to_dict(), "accounting": accounting})
    fields = {"noise_multiplier": 1.0, "clip_norm": 4.0, "sampling_probabilities": (0.25,)} | changes
    request = NoiseRequest(parameters=parameters, dimension=len(total), **fields)
    sums, (event,) = MECHANISM.add_noise(total.unsqueeze(0), request, [SeededSource(0)])
    return sums[0], event


def test_the_scale_is_drawn_independently_for_every_coordinate():
    sizes = np.log(np.abs(noised(torch.zeros(20_000), EXAMPLE)[0].numpy()) + 1e-9)
    assert stats.pearsonr(sizes[:-1], sizes[1:]).pvalue > FALSE_ALARM
    shared = np.log(np.abs(_lmo_noise(LAPLACE, 20_000, SeededSource(1))))
    shared += np.repeat(np.log(_inverse_scales(EXAMPLE, 10_000, SeededSource(2))), 2)
    assert stats.pearsonr(shared[:-1:2], shared[1::2]).pvalue < FALSE_ALARM, "the test must detect a shared scale"


def test_the_event_states_noise_dimension_sampling_sensitivity_and_a_known_accounting():
    total, stated = torch.zeros(300), {"sensitivity": math.sqrt(2), "dimension": 300, "sampling_probability": 0.25}
    assert noised(total, sensitivity_factor=math.sqrt(2))[1] == SubsampledLmo(parameters=MIXTURE, **stated)
    assert noised(total, accounting="published")[1].accounting == "published"
    with pytest.raises(ValueError, match="accounting = 'hopeful'"):
        noised(total, accounting="hopeful")


def test_neither_sensitivity_nor_accounting_changes_the_noise():
    total = torch.arange(500.0)
    plain = noised(total)[0]
    assert torch.equal(plain, noised(total, sensitivity_factor=2.0)[0])
    assert torch.equal(plain, noised(total, accounting="published")[0])
    assert torch.equal(total, torch.arange(500.0)), "the input is unchanged"


@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e-7])
def test_every_noised_sum_lies_on_the_same_grid(value):
    step = 2.0 ** (math.floor(math.log2(4.0 * float(Columns.of(MIXTURE).quantile(0.75)))) - 18)
    points = noised(torch.full((20_000,), value, dtype=torch.float64))[0] / step
    assert torch.equal(points, points.round()), "no digits below the grid reveal the sum"


def test_noise_without_a_mean_stays_finite():
    heavy_tailed = parameters(gamma={"weight": 1, "shape": 0.1, "scale": 1.0})
    values = noised(torch.zeros(50_000), heavy_tailed)[0]
    assert torch.isfinite(values).all()
    assert values.abs().max() > 1e30

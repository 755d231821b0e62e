"""The discrete Gaussian mechanism: integers on a grid, exact noise, and an event never below its exact cost."""

import dataclasses
import math
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import brentq

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms import discrete_gaussian
from fedpriv.privacy.mechanisms.discrete_gaussian import (
    _ROUNDING_VARIANCE,
    CHARGED_SHARE,
    MECHANISM,
    MIN_STDDEV,
    integers,
)
from fedpriv.privacy.mechanisms.registry import NoiseRequest
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.events import gaussian

FALSE_ALARM = 1e-6


def charged_stddev(sigma: float) -> float:
    """sqrt(sigma^2 - 9): that of the continuous Gaussian of which N_Z(0, sigma^2) on integers is a random rounding."""
    return math.sqrt(sigma**2 - 9)


GRIDS = [2.0**12, 3333.3, 1e-3 * 2.0**40]
# sigma, shift, sampling probability, steps, delta; and what a charge of would be too cheap.
CASES = [
    ((3.5, 8, 0.05, 2, 0.05), "all of the variance"),
    ((4.0, 2, 0.3, 1, 0.05), "all of the variance"),
    ((3.5, 2, 0.05, 1, 1e-6), "all of the variance"),
    ((3.5, 5, 1.0, 1, 1e-3), ""),
    ((4.0, 1, 1.0, 2, 1e-6), ""),
    ((6.0, 8, 0.3, 2, 1e-3), ""),
    ((10.0, 5, 0.05, 1, 1e-6), "a smaller sensitivity"),
    ((20.0, 8, 1.0, 1, 1e-6), "a smaller sensitivity"),
    ((20.0, 3, 0.3, 1, 0.05), ""),
]


def request(dimension, *, clients=1, **changes):
    fields = {"noise_multiplier": 1.5, "clip_norm": 0.8, "sampling_probabilities": (0.25,) * clients} | changes
    return NoiseRequest(dimension=dimension, **fields)


def noised(total, seed=0, **changes):
    """The mechanism applied to one client."""
    asked = request(len(total), **changes)
    result, (event,) = MECHANISM.add_noise(total.unsqueeze(0), asked, [SeededSource(seed)])
    return result[0], event


def without_noise(monkeypatch):
    monkeypatch.setattr(discrete_gaussian, "discrete_gaussian", lambda _, num, source: np.zeros(num, dtype=np.int64))


def fits_no_other_scale(values):
    """Whether values are standard normal, and those of 2/3 and of 3/2 of their scale are not."""
    return [s for s in (2 / 3, 1, 3 / 2) if stats.kstest(values.numpy() * s, "norm").pvalue > FALSE_ALARM] == [1]


@pytest.mark.parametrize("grid", GRIDS)
def test_integers_are_recovered_exactly_and_have_the_stated_spread(grid):
    total = torch.linspace(-3, 3, 6000, dtype=torch.float64)
    result, _ = noised(total, grids=(grid,))
    assert result.dtype == torch.float64
    steps = integers(result, grid)
    assert torch.equal(steps.double() / grid, result)
    assert fits_no_other_scale((steps - (total * grid).round()).double() / (grid * 1.5 * 0.8))


@pytest.mark.parametrize("grid", [1.0, 3.0, 0.1, 1e9 / 7])
def test_integers_up_to_2_to_the_52_survive_the_division_by_any_grid(grid):
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-(2**52) + 1, 2**52, (20_000,), generator=generator)
    steps = torch.cat([steps, steps >> 20, torch.tensor([0, 1, -1, 2**52 - 1, 1 - 2**52])])
    assert torch.equal(integers(steps.double() / grid, grid), steps)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([2.0**52]).double(), "2\\^52 steps"),
        (torch.tensor([math.nan]).double(), "not finite"),
        (torch.tensor([0.5]).double(), "no multiple of 1 / grid"),
        (torch.tensor([1.0]), "only float64"),
    ],
)
def test_what_is_no_integer_of_the_grid_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        integers(values, 1.0)


def test_values_are_clamped_scaled_and_rounded_half_to_even(monkeypatch):
    without_noise(monkeypatch)
    total = torch.tensor([0.5, 1.5, -2.5, 100.0, -1e300, 7.25]).double() / 2**11
    result, _ = noised(total, grids=(2.0**11,), bounds=(20.0 / 2**11,))
    assert integers(result, 2.0**11).tolist() == [0, 2, -2, 20, -20, 7]
    unbounded, _ = noised(total[:4], grids=(2.0**11,))
    assert integers(unbounded, 2.0**11).tolist() == [0, 2, -2, 100]


def test_every_client_has_its_own_grid_and_bound(monkeypatch):
    without_noise(monkeypatch)
    asked = request(2, clients=2, grids=(2.0**11, 2.0**13), bounds=(1.0, 2.0))
    result, events = MECHANISM.add_noise(torch.full((2, 2), 9.0).double(), asked, [SeededSource(0), SeededSource(1)])
    assert result.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert events[0].noise_multiplier < events[1].noise_multiplier, "a coarser grid's rounding costs more"


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("factor", "dimension"), [(1.0, 1), (math.sqrt(3), 300), (2.0, 100_000)])
def test_the_event_charges_noise_less_9_over_the_sensitivity_with_rounding(grid, factor, dimension):
    (event,) = MECHANISM.planned_events(request(dimension, sensitivity_factor=factor, grids=(grid,), count=3))
    sigma = grid * 1.5 * 0.8
    exact = charged_stddev(sigma) / (grid * factor * 0.8 + math.sqrt(dimension))
    assert isinstance(event, SubsampledGaussian)
    assert (event.count, event.sampling_probability) == (3, 0.25)
    assert 0.99 * exact < event.noise_multiplier <= exact
    if math.frexp(grid)[0] == 0.5:
        assert event.noise_multiplier == pytest.approx(exact, rel=2 * (1 - CHARGED_SHARE))


# Every value of the neighbour differs by C / sqrt(d), and remainders sweep over what rounding makes of them.
@pytest.mark.parametrize("grid", [2.0**11, 3333.3])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_neighbouring_sums_differ_by_the_stated_sensitivity_at_most(monkeypatch, grid, offset):
    without_noise(monkeypatch)
    dimension, clip_norm = 400, 0.8
    step = clip_norm / math.sqrt(dimension)
    remainder = (offset + 0.499) / grid
    below = torch.full((dimension,), remainder, dtype=torch.float64)
    largest = 0.0
    for shift in torch.linspace(-1, 1, 41).tolist():
        pair = below + shift / grid, below + shift / grid + step
        one, other = (integers(noised(total, grids=(grid,), clip_norm=clip_norm)[0], grid) for total in pair)
        largest = max(largest, math.sqrt(float((other - one).double().square().sum())))
    (event,) = MECHANISM.planned_events(request(dimension, clip_norm=clip_norm, grids=(grid,)))
    stated = grid * 1.5 * clip_norm * CHARGED_SHARE / event.noise_multiplier
    assert grid * clip_norm < largest <= stated, "rounding makes the distance larger, and is paid for"


def test_the_mechanisms_own_grid_is_a_power_of_two_far_finer_than_the_noise():
    for scale in (1e-150, 0.3, 1.0, 1.5, 2.0, 1e150):
        (event,) = MECHANISM.planned_events(request(28_000, noise_multiplier=1.0, clip_norm=scale))
        grid = discrete_gaussian._grid(request(1, noise_multiplier=1.0, clip_norm=scale), 0)
        assert math.frexp(grid)[0] == 0.5
        assert 2**28 <= Fraction(grid) * Fraction(scale) < 2**29
        assert 1 - 6e-6 < event.noise_multiplier < 1


COARSE_OR_FINE = r"grid = .*: give noise of .* steps of the grid; must be 2\^10 to 2\^40"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"grids": (grid,)}, COARSE_OR_FINE) for grid in (800.0, 2.0**40)),
        *(({"noise_multiplier": z}, "noise_multiplier = ") for z in (-1.0, math.nan, math.inf, 1e-300)),
        ({"clients": 2, "grids": (1.0,)}, "grids: 1 for 2 clients"),
        ({"clients": 2, "bounds": (1.0, 2.0, 3.0)}, "bounds: 3 for 2 clients"),
        ({"clients": 2, "grids": (1.0, 0.0)}, "grids = 0.0"),
        ({"clients": 2, "bounds": (math.inf, 1.0)}, "bounds = inf"),
        ({"clients": 2, "grids": (math.nan, 1.0)}, "grids = nan"),
    ],
)
def test_grids_bounds_and_noise_multipliers_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        MECHANISM.planned_events(request(10, **changes))


@pytest.mark.parametrize("grids", [(), (800.0,), (2.0**40,)])
def test_without_noise_the_sum_is_returned_unchanged_and_the_event_states_no_noise(grids):
    result, event = noised(torch.full((5,), 0.1, dtype=torch.float64), noise_multiplier=0.0, grids=grids)
    assert result.tolist() == [0.1] * 5
    assert event.noise_multiplier == 0


def test_noise_adds_up_over_clients():
    asked = request(3000, clients=6, grids=(2.0**12,) * 6)
    result, events = MECHANISM.add_noise(torch.zeros(6, 3000).double(), asked, [SeededSource(k) for k in range(6)])
    assert fits_no_other_scale(result.sum(dim=0) / (1.5 * 0.8 * math.sqrt(6)))
    sigma, sensitivity = 2.0**12 * 1.5 * 0.8, 2.0**12 * 0.8 + math.sqrt(3000)
    together = events[0].with_noise(math.sqrt(6)).noise_multiplier
    assert together == pytest.approx(math.sqrt(6) * events[0].noise_multiplier)
    assert together <= math.sqrt(6 * (sigma**2 - 9)) / sensitivity


def test_the_default_recipe_takes_it_and_no_noise_of_another_kind():
    config = parse({"mechanism": "discrete-gaussian"})
    assert (config.recipe, config.head_start, config.learning_rate) == ("fedpriv", True, "auto")
    assert config == dataclasses.replace(parse({}), mechanism="discrete-gaussian")
    lmo = {"mechanism": "lmo", "mechanism_parameters": "noise.json", "noise_multiplier": 1.0}
    assert parse(lmo).recipe == "per-sample"
    with pytest.raises(InputError, match="needs mechanism = gaussian, not lmo"):
        parse({**lmo, "recipe": "fedpriv"})


def law(sigma, reach):
    """Probabilities of N_Z(0, sigma^2) on [-reach, reach], normalised over all integers that count."""
    some, all_ = (np.arange(-last, last + 1.0) for last in (reach, math.ceil(40 * sigma)))
    return np.exp(-(some**2) / (2 * sigma**2)) / np.exp(-(all_**2) / (2 * sigma**2)).sum()


def neighbours(sigmas, shift, probability, num_steps):
    """The laws of all steps' outputs with a record, which is included with the probability, and without; and reversed.

    The noise of a step is the sum of one draw for each sigma; several steps are all their outcomes together.
    """
    reach = math.ceil(10 * max(sigmas))
    noise = np.concatenate([reduce(np.convolve, [law(sigma, reach) for sigma in sigmas]), np.zeros(shift)])
    pair = (1 - probability) * noise + probability * np.roll(noise, shift), noise
    with_record, without = (reduce(lambda one, other: np.outer(one, other).ravel(), [p] * num_steps) for p in pair)
    return (with_record, without), (without, with_record)


def exact_epsilon(sigmas, shift, probability, num_steps, delta):
    """The smallest epsilon whose hockey-stick divergence is at most delta, in both directions."""

    def excess(epsilon, one, other):
        return float(np.maximum(one - math.exp(epsilon) * other, 0).sum()) - delta

    return max(
        brentq(excess, 0, 60, args=pair, xtol=1e-9) if excess(0, *pair) > 0 else 0.0
        for pair in neighbours(sigmas, shift, probability, num_steps)
    )


def charged(stddev, shift, probability, num_steps, delta, accountant="pld"):
    return epsilon_of([gaussian(stddev / shift, probability, num_steps)], delta, accountant).epsilon


@pytest.mark.parametrize(("case", "too_cheap"), CASES, ids=str)
def test_the_charge_is_never_below_the_exact_cost_and_one_that_is_too_cheap_would_be_caught(case, too_cheap):
    sigma, shift, *rest = case
    exact = exact_epsilon([sigma], shift, *rest)
    for accountant in ("pld", "rdp"):
        assert exact <= charged(charged_stddev(sigma), shift, *rest, accountant)
    if too_cheap == "all of the variance":
        assert charged(sigma, shift, *rest) < exact
    elif too_cheap == "a smaller sensitivity":
        assert charged(charged_stddev(sigma), shift - 2, *rest) < exact


@pytest.mark.parametrize(
    "sigmas", [(3.5, 3.5), (3.2, 5.0), (4.0,) * 3, (3.5, 4.0, 6.0, 3.1), (3.3,) * 5], ids=lambda s: f"{len(s)}:{s[0]}"
)
@pytest.mark.parametrize("rest", [(3, 1.0, 1, 1e-5), (6, 0.2, 1, 1e-3)], ids=str)
def test_the_charge_for_a_sum_is_never_below_the_exact_cost_of_the_convolution(sigmas, rest):
    stddev = math.sqrt(sum(sigma**2 - 9 for sigma in sigmas))
    exact = exact_epsilon(sigmas, *rest)
    assert exact <= charged(stddev, *rest)
    too_much = math.sqrt(sum(sigma**2 for sigma in sigmas)) * 1.05
    assert charged(too_much, *rest) < exact


def test_the_lemmas_bound_is_less_than_3e_77_a_coordinate_and_the_common_share_charges_no_more_than_it_allows():
    # 18 pi^2 = 177.65288 and 177.65288 / ln 10 = 77.15366, so 4 * 10^-77.15366 = 2.8079e-77.
    assert 4 * math.exp(-2 * math.pi**2 * _ROUNDING_VARIANCE) == pytest.approx(2.808e-77, rel=1e-3)
    for sigma in [MIN_STDDEV, MIN_STDDEV * 1.001, 2.0**14, 2.0**28]:
        assert CHARGED_SHARE * sigma <= charged_stddev(sigma) * (1 + 1e-15)
    small = 0.99 * MIN_STDDEV
    assert charged_stddev(small) < CHARGED_SHARE * small, "below the smallest deviation the share is too large"


# Kairouz, Liu and Steinke 2021, Theorem 1, Eq. 3.
@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("sigma", [0.5, 0.7, 0.9])
def test_a_sum_is_no_further_from_a_discrete_gaussian_than_the_theorem_says(sigma, num):
    bound = 10 * math.fsum(math.exp(-2 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, num))
    total, reach = reduce(np.convolve, [law(sigma, 40)] * num), 8 * num
    middle = total[len(total) // 2 - reach : len(total) // 2 + reach + 1]
    divergence = np.abs(np.log(middle / law(math.sqrt(num) * sigma, reach))).max()
    assert divergence <= bound
    assert divergence > bound / 6 or num > 2

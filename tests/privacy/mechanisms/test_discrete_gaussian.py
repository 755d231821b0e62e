"""The discrete Gaussian mechanism: integers on a grid, exact noise, and an event that pays for the rounding too."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from scipy import stats

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms import discrete_gaussian
from fedpriv.privacy.mechanisms.discrete_gaussian import CHARGED_SHARE, MECHANISM, charged_stddev, integers
from fedpriv.privacy.mechanisms.registry import NoiseRequest
from fedpriv.privacy.mechanisms.sources import SeededSource

FALSE_ALARM = 1e-6
GRIDS = [2.0**12, 3333.3, 1e-3 * 2.0**40]


def request(dimension, *, clients=1, **changes):
    fields = {"noise_multiplier": 1.5, "clip_norm": 0.8, "sampling_probabilities": (0.25,) * clients} | changes
    return NoiseRequest(dimension=dimension, **fields)


def noised(total, seed=0, **changes):
    """The mechanism applied to one client."""
    asked = request(len(total), **changes)
    result, (event,) = MECHANISM.add_noise(total.unsqueeze(0), asked, [SeededSource(seed)])
    return result[0], event


def without_noise(monkeypatch):
    monkeypatch.setattr(
        discrete_gaussian, "discrete_gaussian", lambda sigma, num, source: torch.zeros(num, dtype=torch.int64).numpy()
    )


@pytest.mark.parametrize("grid", GRIDS)
def test_integers_are_recovered_exactly_and_have_the_stated_spread(grid):
    total = torch.linspace(-3, 3, 6000, dtype=torch.float64)
    result, _ = noised(total, grids=(grid,))
    assert result.dtype == torch.float64
    steps = integers(result, grid)
    assert torch.equal(steps.double() / grid, result)
    deviations = (steps - (total * grid).round()).double() / (grid * 1.5 * 0.8)
    p_values = {scale: stats.kstest(deviations.numpy() * scale, "norm").pvalue for scale in (2 / 3, 1, 3 / 2)}
    assert [scale for scale, p in p_values.items() if p > FALSE_ALARM] == [1]


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


@pytest.mark.parametrize("grid", [800.0, 2.0**40])
def test_a_grid_too_coarse_or_too_fine_for_the_noise_is_refused_by_name(grid):
    with pytest.raises(ValueError, match=r"grid = .*: give noise of .* steps of the grid; must be 2\^10 to 2\^40"):
        MECHANISM.planned_events(request(10, grids=(grid,)))
    (event,) = MECHANISM.planned_events(request(10, grids=(grid,), noise_multiplier=0.0))
    assert event.noise_multiplier == 0


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf, 1e-300])
def test_a_noise_multiplier_out_of_range_is_refused_by_name(multiplier):
    with pytest.raises(ValueError, match="noise_multiplier = "):
        MECHANISM.planned_events(request(10, noise_multiplier=multiplier))


def test_without_noise_the_sum_is_returned_unchanged_and_the_event_states_no_noise():
    result, event = noised(torch.full((5,), 0.1, dtype=torch.float64), noise_multiplier=0.0)
    assert result.tolist() == [0.1] * 5
    assert event.noise_multiplier == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grids": (1.0,)}, "grids: 1 for 2 clients"),
        ({"bounds": (1.0, 2.0, 3.0)}, "bounds: 3 for 2 clients"),
        ({"grids": (1.0, 0.0)}, "grids = 0.0"),
        ({"bounds": (math.inf, 1.0)}, "bounds = inf"),
        ({"grids": (math.nan, 1.0)}, "grids = nan"),
    ],
)
def test_grids_and_bounds_that_do_not_fit_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        request(10, clients=2, **change)


def test_noise_adds_up_over_clients():
    asked = request(3000, clients=6, grids=(2.0**12,) * 6)
    result, events = MECHANISM.add_noise(torch.zeros(6, 3000).double(), asked, [SeededSource(k) for k in range(6)])
    total = result.sum(dim=0).numpy() / (1.5 * 0.8 * math.sqrt(6))
    p_values = {scale: stats.kstest(total * scale, "norm").pvalue for scale in (2 / 3, 1, 3 / 2)}
    assert [scale for scale, p in p_values.items() if p > FALSE_ALARM] == [1]
    one = events[0].noise_multiplier
    sigmas, sensitivity = [2.0**12 * 1.5 * 0.8] * 6, 2.0**12 * 0.8 + math.sqrt(3000)
    assert dataclasses.asdict(events[0].with_noise(math.sqrt(6)))["noise_multiplier"] == pytest.approx(
        math.sqrt(6) * one
    )
    assert math.sqrt(6) * one <= math.sqrt(sum(s**2 - 9 for s in sigmas)) / sensitivity


def test_the_default_recipe_takes_it_and_no_noise_of_another_kind():
    config = parse({"mechanism": "discrete-gaussian"})
    assert (config.recipe, config.head_start, config.learning_rate) == ("fedpriv", True, "auto")
    assert config == dataclasses.replace(parse({}), mechanism="discrete-gaussian")
    lmo = {"mechanism": "lmo", "mechanism_parameters": "noise.json", "noise_multiplier": 1.0}
    assert parse(lmo).recipe == "dp-lora-paper"
    with pytest.raises(InputError, match="needs mechanism = gaussian, not lmo"):
        parse({**lmo, "recipe": "fedpriv"})

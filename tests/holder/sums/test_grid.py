"""The grid of a sum: as fine as the modulus allows, never so coarse that the noise has few steps."""

import math
from itertools import product

import pytest

from fedpriv.privacy.mechanisms.discrete_gaussian import MIN_STDDEV, largest_number_included, sum_grid


def largest_sum(grid, *, clip_norm, z, num):
    noise = 10 * math.hypot(*(grid.gamma * scale * z * clip_norm for scale in grid.scales.values()))
    return grid.gamma * clip_norm * sum(grid.scales[k] * num[k] for k in num) + noise


@pytest.mark.parametrize("num", [{0: 40.0}, {0: 1200.0, 1: 400.0, 2: 7.0}, dict.fromkeys(range(100), 600.0)])
def test_gamma_is_the_largest_power_of_two_whose_sums_fit_31_bits(num):
    for z, clip_norm in product((0.05, 1.0, 40.0), (0.013, 1.0, 55.0)):
        grid = sum_grid(clip_norm=clip_norm, noise_multiplier=z, weights=dict.fromkeys(num, 0.3), num_included=num)
        assert (grid.modulus_bits, grid.scales) == (32, dict.fromkeys(num, 1.0))
        assert 2.0**30 <= largest_sum(grid, clip_norm=clip_norm, z=z, num=num) < 2.0**31
        assert grid.bounds == {client: clip_norm * count for client, count in num.items()}


def test_where_32_bits_leave_too_little_noise_there_are_64():
    millions = {0: 4e6, 1: 4e6}
    grid = sum_grid(clip_norm=1.0, noise_multiplier=1.0, weights={0: 1.0, 1: 1.0}, num_included=millions)
    assert (grid.modulus_bits, grid.gamma >= MIN_STDDEV) == (64, True)
    assert largest_sum(grid, clip_norm=1.0, z=1.0, num=millions) < 2.0**52


def test_scales_are_the_weights_over_the_largest_and_the_smallest_noise_decides():
    weights = {0: 3.0, 1: 1.5, 2: 3e-4}
    grid = sum_grid(clip_norm=1.0, noise_multiplier=0.01, weights=weights, num_included=dict.fromkeys(weights, 1e4))
    assert grid.scales == pytest.approx({0: 1.0, 1: 0.5, 2: 1e-4})
    assert grid.modulus_bits == 64
    assert grid.gamma * grid.scales[2] * 0.01 >= MIN_STDDEV
    assert grid.of(1).points == grid.gamma * 0.5


@pytest.mark.parametrize(("num", "q", "most"), [(1000, 1.0, 1000), (1000, 0.1, 200), (9, 0.5, 9), (10**6, 1e-6, 11)])
def test_a_sample_hardly_ever_holds_more_records_than_are_counted_on(num, q, most):
    assert largest_number_included(num, q) == pytest.approx(most)

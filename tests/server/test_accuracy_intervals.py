"""The interval around an accuracy from noised counts: coverage, power, and a search over all accuracies as oracle."""

import math
from itertools import pairwise

import numpy as np
import pytest

from server.evaluation import accuracy_from_counts

# Of 1,000 intervals that cover with probability 0.95 fewer than 930 do so once in 430 times, and more than
# 974 once in 20,000 (binomial); of those with 2/3 of the width, 930 or more practically never.
NUM, NEEDED = 1000, 930
SETTINGS = [(a, z) for a in (0.5, 0.8, 0.97) for z in (1.0, 5.0, 20.0)]
RECORDS, HOLDERS = 400, 5


def covered(accuracy: float, z: float, shrink: float = 1.0) -> int:
    """How many of 1,000 seeded evaluations cover the true accuracy with an interval of `shrink` times the width."""
    rng = np.random.default_rng([int(1000 * accuracy), int(z)])
    stddev = z * math.sqrt(HOLDERS)
    counts = np.array([RECORDS * accuracy, RECORDS * (1 - accuracy)])
    found = 0
    for hits, misses in counts + stddev * rng.standard_normal((NUM, 2)):
        estimate = accuracy_from_counts(hits, misses, shrink * stddev)
        found += estimate.low <= accuracy <= estimate.high
    return found


@pytest.mark.parametrize(("accuracy", "z"), SETTINGS)
def test_the_interval_covers_the_true_accuracy_and_one_of_two_thirds_of_its_width_not_often_enough(accuracy, z):
    found = covered(accuracy, z)
    assert found >= NEEDED
    if accuracy < 0.9 and z < 20:
        assert found < 975, "nor is it wider than it needs to be"
        assert covered(accuracy, z, shrink=2 / 3) < NEEDED


def test_the_interval_is_the_hull_of_the_accuracies_that_the_counts_do_not_contradict():
    rng = np.random.default_rng(7)
    grid = np.linspace(0, 1, 200_001)
    for _ in range(200):
        hits, misses = rng.uniform(-30, 200, size=2)
        stddev = rng.uniform(0.1, 60)
        bound = 1.959964 * stddev * np.sqrt((1 - grid) ** 2 + grid**2)
        estimate = accuracy_from_counts(hits, misses, stddev)
        possible = grid[np.abs((1 - grid) * hits - grid * misses) <= bound]
        if min(hits, misses) >= 0:
            assert (estimate.low, estimate.high) == pytest.approx((possible.min(), possible.max()), abs=1e-5)
        elif possible.size:  # a negative count only ever widens
            assert estimate.low <= possible.min() + 1e-5
            assert estimate.high >= possible.max() - 1e-5


@pytest.mark.parametrize(
    ("hits", "misses", "stddev", "expected"),
    [
        (80.0, 20.0, 0.0, (0.8, 0.8, 0.8)),
        (80.0, -3.0, 0.0, (1.0, 1.0, 1.0)),
        (5.0, 5.0, 10.0, (0.5, 0.0, 1.0)),
        (-5.0, -1.0, 10.0, (None, 0.0, 1.0)),
        (0.0, 0.0, 0.0, (None, 0.0, 1.0)),
    ],
)
def test_what_the_noise_drowns_is_said_to_be_unknown(hits, misses, stddev, expected):
    estimate = accuracy_from_counts(hits, misses, stddev)
    assert (estimate.accuracy, estimate.low, estimate.high) == expected


def test_more_noise_never_narrows_the_interval_and_hits_and_misses_are_symmetric():
    ends = [accuracy_from_counts(60.0, 25.0, stddev) for stddev in np.linspace(0, 80, 200)]
    assert all(wider.low <= e.low and wider.high >= e.high for e, wider in pairwise(ends))
    for stddev in (1.0, 10.0, 40.0):
        one, other = accuracy_from_counts(60.0, 25.0, stddev), accuracy_from_counts(25.0, 60.0, stddev)
        assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low), abs=1e-15)


@pytest.mark.parametrize("values", [(math.nan, 1.0, 1.0), (1.0, math.inf, 1.0), (1.0, 1.0, -1.0)])
def test_counts_that_are_no_numbers_are_refused(values):
    with pytest.raises(ValueError, match="must be finite"):
        accuracy_from_counts(*values)

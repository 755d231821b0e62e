"""A person at two holders that each round to their own grid is never charged less than the sum of integers reveals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant

from fedpriv.privacy.accounting.accountants import delta_of, epsilon_of
from fedpriv.privacy.accounting.gaussian import worst_other_holders
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.mechanisms import discrete_gaussian
from fedpriv.privacy.mechanisms.discrete_gaussian import MECHANISM, integers, sensitivity
from fedpriv.privacy.mechanisms.registry import NoiseRequest
from fedpriv.privacy.mechanisms.sources import SeededSource

# Each of 256 values moves by C / 16: three steps of the first holder's grid, one of the second's. The least noise that
# is allowed on the second is 2^10 steps.
DIMENSION, GRIDS, NOISE = 256, (48.0, 16.0), 64.0


def asked(grids: Sequence[float] = GRIDS, coins: Sequence[float] = (1.0, 1.0)) -> NoiseRequest:
    return NoiseRequest(
        noise_multiplier=NOISE,
        clip_norm=1.0,
        dimension=DIMENSION,
        sampling_probabilities=tuple(coins),
        unit="person",
        grids=tuple(grids),
        bounds=(9.0,) * len(grids),
    )


def steps_moved(monkeypatch) -> list[int]:
    """The steps by which a person moves each value of either holder's integers: from half a step on, where it moves
    most."""
    monkeypatch.setattr(
        discrete_gaussian, "discrete_gaussian", lambda sigma, num, source: torch.zeros(num, dtype=torch.int64).numpy()
    )
    without = torch.tensor([[0.5 / grid] * DIMENSION for grid in GRIDS], dtype=torch.float64)
    sums = [without, without + 1 / math.sqrt(DIMENSION)]
    rounded = [MECHANISM.add_noise(each, asked(), [SeededSource(0)] * 2)[0] for each in sums]
    moved = [integers(rounded[1][k], grid) - integers(rounded[0][k], grid) for k, grid in enumerate(GRIDS)]
    assert all(each.unique().numel() == 1 for each in moved)
    return [int(each[0]) for each in moved]


def shares(moves: Sequence[float], coins: Sequence[float]) -> Mapping[float, float]:
    """{what the person moves the sum by: its probability}."""
    found: dict[float, float] = {}
    for drawn in itertools.product((0, 1), repeat=len(moves)):
        chance = math.prod(q if is_in else 1 - q for q, is_in in zip(coins, drawn, strict=True))
        moved = sum(move for move, is_in in zip(moves, drawn, strict=True) if is_in)
        found[moved] = found.get(moved, 0.0) + chance
    return found


def exact_delta(moves: Sequence[int], coins: Sequence[float], epsilon: float) -> float:
    """The larger hockey-stick divergence of both holders' noised integers, added up, from those without the person.

    The ratio of their probabilities depends on the total of all values alone, whose noise is a discrete Gaussian too.
    """
    variance = DIMENSION * sum((grid * NOISE) ** 2 for grid in GRIDS)
    reach = int(12 * math.sqrt(variance))
    at = np.arange(-reach, reach + DIMENSION * sum(moves))

    def law(moved: float) -> np.ndarray:
        weights = np.exp(-((at - DIMENSION * moved) ** 2) / (2 * variance))
        return weights / weights.sum()

    without = law(0)
    with_person = sum(chance * law(moved) for moved, chance in shares(moves, coins).items())
    pairs = (with_person, without), (without, with_person)
    return max(float(np.maximum(0.0, p - math.exp(epsilon) * q).sum()) for p, q in pairs)


def charged(client: int, coins: Sequence[float], moves: Mapping[int, float]) -> Release:
    """One release of a client in the sum of both, where a person moves their parts by so much at most."""
    noises = [grid * NOISE for grid in GRIDS]
    return Release(
        event=MECHANISM.planned_events(asked(coins=coins))[client],
        rho_bar=1.0,
        aggregate_scale=math.hypot(*noises) / noises[client],
        other_holders=worst_other_holders(moves, dict(enumerate(coins)), client, 2),
    )


@pytest.mark.parametrize("coins", [(1.0, 1.0), (0.3, 0.2), (0.05, 0.9)])
def test_no_sum_of_two_holders_integers_costs_more_than_is_charged(coins, monkeypatch):
    """With the ratio of grids, without each holder's own rounding, delta was up to a tenth too small."""
    moves = steps_moved(monkeypatch)
    assert moves == [4, 2], "one step more than without rounding"
    bounds = {client: sensitivity(asked(coins=coins), client) for client in (0, 1)}
    for client, bound in bounds.items():
        assert moves[client] * math.sqrt(DIMENSION) == pytest.approx(bound, rel=1e-9), "which the worst case attains"
    for epsilon in (0.0, 0.01):
        exact = exact_delta(moves, coins, epsilon)
        for client in (0, 1):
            delta = delta_of([charged(client, coins, bounds).seen_by("aggregate")], epsilon)
            assert exact <= delta <= 1.001 * exact + 1e-7
    by_grid = charged(0, coins, dict(enumerate(GRIDS))).seen_by("aggregate")
    assert delta_of([by_grid], 0.0) < 0.99 * exact_delta(moves, coins, 0.0)


def test_dp_accounting_says_the_same_of_many_sums():
    coins, count = (0.3, 0.2), 50_000
    bounds = {client: sensitivity(asked(coins=coins), client) for client in (0, 1)}
    found = shares(list(bounds.values()), coins)
    noise = math.hypot(*(grid * NOISE for grid in GRIDS))
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(MixtureOfGaussiansDpEvent(noise, list(found), list(found.values())), count)
    true = accountant.get_epsilon(1e-5)
    event = charged(0, coins, bounds).seen_by("aggregate")
    assert true <= epsilon_of([event.with_count(count)], 1e-5).epsilon <= 1.001 * true + 1e-4
    by_grid = charged(0, coins, dict(enumerate(GRIDS))).seen_by("aggregate")
    assert epsilon_of([by_grid.with_count(count)], 1e-5).epsilon < 0.97 * true

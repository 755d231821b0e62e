"""A participant reads the sum, as the next model, and knows its own part: its view costs what is charged.

The oracle shares nothing with the accountants: the law of the other survivors' discrete Gaussians by convolution, and
the hockey-stick divergence between it and itself with the record, summed over the integers.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.signal import fftconvolve

from fedpriv.holder.sums import smallest_threshold
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release, smallest_aggregate_scales
from fedpriv.privacy.mechanisms.discrete_gaussian import charged_stddev

DELTA = 1e-5
SIGMA = 1500.0  # of the client with scale 1, in steps of the grid
NOISE_MULTIPLIER = 1.2

SCALES = {
    3: [(1.0, 1.0, 1.0), (1.0, 0.8, 0.7), (0.75, 1.0, 0.75)],
    5: [(1.0,) * 5, (1.0, 0.9, 0.8, 0.75, 0.7), (0.7, 0.7, 1.0, 1.0, 1.0)],
}
SUMS = [(3, 3, 0), (5, 3, 0), (5, 5, 0), (5, 5, 1), (5, 5, 2)]


def cases() -> list[object]:
    """Every day each sum of the second scales, which all differ, and with some of the records."""
    return [
        pytest.param(threshold, colluding, scales, q, marks=[] if (number, q) == (1, 0.3) else pytest.mark.slow)
        for (num_clients, threshold, colluding), q in itertools.product(SUMS, (1.0, 0.3))
        for number, scales in enumerate(SCALES[num_clients])
    ]


def law(sigma: float) -> np.ndarray:
    """P[N_Z(0, sigma^2) = x] for |x| <= 12 sigma."""
    steps = np.arange(-math.ceil(12 * sigma), math.ceil(12 * sigma) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    return weights / weights.sum()


def divergence(noise: np.ndarray, shift: int, probability: float, epsilon: float) -> float:
    """The larger hockey-stick divergence between the noise, and the noise with a record that moves it by `shift`."""
    without = np.concatenate([noise, np.zeros(shift)])
    included = np.concatenate([np.zeros(shift), noise])
    with_record = (1 - probability) * without + probability * included
    pairs = ((without, with_record), (with_record, without))
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in pairs)


def true_epsilon(noise: np.ndarray, shift: int, probability: float) -> float:
    """The smallest epsilon at DELTA, by bisection."""
    return float(brentq(lambda epsilon: divergence(noise, shift, probability, epsilon) - DELTA, 1e-6, 60))


def view_of(reader: set[int], survivors: tuple[int, ...], scales: tuple[float, ...]) -> np.ndarray:
    """What is left of the sum once those who read it have subtracted their own vectors: the others' noise."""
    noise = np.ones(1)
    for client in set(survivors) - reader:
        noise = fftconvolve(noise, law(SIGMA * scales[client]))
    return np.clip(noise, 0, None)


def charged(client: int, scales: tuple[float, ...], threshold: int, colluding: int, probability: float) -> float:
    """The epsilon that the ledger has for one round."""
    sigma = SIGMA * scales[client]
    event = SubsampledGaussian(
        noise_multiplier=charged_stddev(sigma) / round(sigma / NOISE_MULTIPLIER), sampling_probability=probability
    )
    weights = dict(enumerate(scales))
    scale = smallest_aggregate_scales(weights, threshold=threshold, colluding=colluding)[client]
    return epsilon_of([Release(event=event, rho_bar=1.0, aggregate_scale=scale).seen_by("aggregate")], DELTA).epsilon


@pytest.mark.parametrize(("threshold", "colluding", "scales", "probability"), cases())
def test_the_view_of_every_reader_costs_at_most_what_is_charged_and_that_of_the_worst_as_much(
    threshold, colluding, scales, probability
):
    """Readers are all but the client itself: also the one with the most noise, and c of them together."""
    num_clients, readers = len(scales), max(colluding, 1)
    assert threshold >= smallest_threshold(num_clients, colluding)
    for client in {scales.index(each) for each in scales}:
        epsilon = charged(client, scales, threshold, colluding, probability)
        shift = round(SIGMA * scales[client] / NOISE_MULTIPLIER)
        others = [k for k in range(num_clients) if k != client]
        # Equal multisets of noise give equal views.
        views = {
            tuple(sorted(scales[k] for k in rest if k not in together)): view_of(set(together), (client, *rest), scales)
            for rest in itertools.combinations(others, threshold - 1)
            for together in itertools.combinations(rest, readers)
        }
        costs = [true_epsilon(noise, shift, probability) for noise in views.values()]
        assert 0.99 * epsilon <= max(costs) <= epsilon

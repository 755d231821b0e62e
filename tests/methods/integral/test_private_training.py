"""DP-SGD on small networks: its steps, its noise, its events, and the intruder's copy of it."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedpriv.methods.integral._networks import (
    PrivateSchedule,
    from_vectors,
    perceptron,
    to_vector,
    train_clipped_stacked,
    train_privately,
)
from fedpriv.methods.integral.attack import noise_multiplier
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.privacy.mechanisms.sources import SeededSource

GENERATOR = torch.Generator().manual_seed(0)
FEATURES = torch.randn(40, 5, generator=GENERATOR)
LABELS = (FEATURES[:, 0] > 0).long()
NETWORK = perceptron("dnn-1", 5, 2, seed=0)


def by_loop(rows, schedule):
    """Full-batch gradient descent with each record's gradient clipped, record by record."""
    vector = to_vector(NETWORK)
    for _ in range(schedule.steps):
        total = torch.zeros_like(vector)
        for row in rows:
            leaf = vector.clone().requires_grad_()
            logits = functional_call(NETWORK, from_vectors(NETWORK, leaf), (FEATURES[row : row + 1],))
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, LABELS[row : row + 1]), leaf)
            total += gradient * min(1.0, schedule.clip_norm / float(gradient.norm()))
        vector = vector - schedule.learning_rate * total / len(rows)
    return vector


@pytest.mark.parametrize("clip_norm", [0.05, 1.0])
def test_without_noise_and_sampling_it_is_clipped_gradient_descent(clip_norm):
    schedule = PrivateSchedule(steps=4, expected_batch_size=10, learning_rate=1.0, clip_norm=clip_norm)
    rows = np.arange(40).reshape(4, 10)
    together = train_clipped_stacked(NETWORK, FEATURES, LABELS, rows, schedule)
    for own, found in zip(rows, together, strict=True):
        torch.testing.assert_close(found, by_loop(own.tolist(), schedule), atol=1e-5, rtol=1e-4)
        alone, _ = train_privately(
            NETWORK, FEATURES[own], LABELS[own], schedule, noise_multiplier=0.0, source=SeededSource("t")
        )
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)


def test_events_say_what_was_done_and_cost_what_was_asked():
    schedule = PrivateSchedule(steps=15, expected_batch_size=10)
    noise = noise_multiplier(2.0, schedule, 40)
    _, events = train_privately(
        NETWORK, FEATURES, LABELS, schedule, noise_multiplier=noise, source=SeededSource("events")
    )
    assert events == 15 * [SubsampledGaussian(noise_multiplier=noise, sampling_probability=0.25)]
    assert 1.99 < epsilon_of(events, default_delta(40)).epsilon <= 2


def test_one_steps_noise_has_the_stated_scale():
    """Power both ways: Kolmogorov-Smirnov at 1 in 1,000 accepts it and rejects 2/3 and 3/2 of it."""
    network = nn.Linear(60, 40)
    schedule = PrivateSchedule(steps=1, expected_batch_size=10, learning_rate=2.0, clip_norm=0.5)
    features, labels = torch.randn(10, 60, generator=GENERATOR), torch.zeros(10, dtype=torch.int64)
    given = (network, features, labels, schedule)
    bare, _ = train_privately(*given, noise_multiplier=0.0, source=SeededSource("a"))
    noised, _ = train_privately(*given, noise_multiplier=3.0, source=SeededSource("b"))
    noise = (noised - bare).numpy()
    stddev = 2.0 * 3.0 * 0.5 / 10
    assert stats.kstest(noise, "norm", args=(0, stddev)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise, "norm", args=(0, wrong * stddev)).pvalue < 1e-3


def test_sampling_is_poisson_on_the_records():
    """With q = 1 / 4 and no noise, a step moves by the sum of those drawn over the *expected* batch size."""
    network = nn.Linear(1, 2, bias=False)
    schedule = PrivateSchedule(steps=1, expected_batch_size=100, learning_rate=1.0, clip_norm=1e-3)
    features, labels = torch.ones(400, 1), torch.zeros(400, dtype=torch.int64)
    moves = []
    for seed in range(60):
        vector, _ = train_privately(
            network, features, labels, schedule, noise_multiplier=0.0, source=SeededSource(seed)
        )
        moves.append(float((vector - to_vector(network)).norm()) * 100 / 1e-3)
    counts = np.rint(moves)
    assert np.abs(counts - moves).max() < 0.05
    assert abs(counts.mean() - 100) < 4 * np.sqrt(75 / 60)
    assert stats.chi2.ppf(1e-4, 59) < 59 * counts.var(ddof=1) / 75 < stats.chi2.ppf(1 - 1e-4, 59)

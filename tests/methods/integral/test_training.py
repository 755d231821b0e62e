"""Small networks trained together are those trained one by one; DP-SGD has the steps, noise and events it says."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.methods.integral._networks import (
    HIDDEN,
    PrivateSchedule,
    TrainingSchedule,
    batch_order,
    from_vectors,
    is_perceptron,
    num_parameters,
    perceptron,
    to_vector,
    train_clipped_stacked,
    train_privately,
    train_stacked,
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


@pytest.fixture(scope="module")
def records():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    return features, (features[:, 0] + features[:, 1] > 0).long() + (features[:, 2] > 1).long()


def loop(network, features, labels, rows, schedule, seed):
    """One network in plain PyTorch, and its weights after every epoch."""
    model, found = copy.deepcopy(network).to(features.dtype), []
    kind = torch.optim.SGD if schedule.optimizer == "sgd" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=schedule.learning_rate)
    for batches in batch_order(len(rows), schedule, seed):
        for places in batches:
            chosen = torch.from_numpy(rows)[places]
            optimizer.zero_grad()
            F.cross_entropy(model(features[chosen]), labels[chosen]).backward()
            optimizer.step()
        found.append(to_vector(model))
    return found


class Odd(nn.Module):
    """A module of the user's own, with a parameter outside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x * self.scale))) + x[:, :3]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", [*HIDDEN, "odd", "no bias"])
def test_together_is_one_by_one(records, name, optimizer):
    features, labels = records
    others = {"odd": Odd(), "no bias": nn.Sequential(nn.Linear(6, 4, bias=False), nn.GELU(), nn.Linear(4, 3))}
    network = others[name] if name in others else perceptron(name, 6, 3, seed=1)
    # 33 records in batches of 8: the last batch of an epoch holds one.
    schedule = TrainingSchedule(
        epochs=3, batch_size=8, learning_rate=0.05 if optimizer == "sgd" else 1e-3, optimizer=optimizer
    )
    rows = np.random.default_rng(0).permutation(198).reshape(6, 33)
    found = train_stacked(network, features, labels, rows, schedule, seed=5, keep=(1, 2))
    assert sorted(found) == [1, 2, 3]
    for place in range(6):
        alone = loop(network, features, labels, rows[place], schedule, seed=5)
        for epoch, weights in enumerate(alone, start=1):
            torch.testing.assert_close(found[epoch][place], weights, rtol=1e-9, atol=1e-11)
    assert (found[3] - to_vector(network)).abs().max() > 1e-3, "the check would be blind"


def test_networks_differ_by_their_records_alone_and_the_start_is_left_as_it_was(records):
    network, rows = perceptron("dnn-1", 6, 3, seed=0), np.arange(200).reshape(4, 50)
    before = to_vector(network)
    found = train_stacked(network, *records, rows[[0, 1, 0]], TrainingSchedule(epochs=2), seed=0)[2]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert torch.equal(to_vector(network), before)


def test_every_record_is_seen_once_in_an_epoch():
    for batches in batch_order(33, TrainingSchedule(epochs=2, batch_size=8), 0):
        assert [len(places) for places in batches] == [8, 8, 8, 8, 1]
        assert sorted(torch.cat(batches).tolist()) == list(range(33))


def test_what_is_a_perceptron():
    layer = nn.Linear(3, 3)
    assert is_perceptron(perceptron("dnn-4", 6, 3, seed=0))
    assert not is_perceptron(Odd())
    assert not is_perceptron(nn.Sequential(layer, nn.ReLU(), layer)), "its weights are one layer's, used twice"
    assert not is_perceptron(nn.Sequential(layer, nn.Softmax(dim=1))), "mixes neurons"
    assert not is_perceptron(nn.Sequential(layer, nn.Dropout())), "draws at random"
    assert not is_perceptron(nn.Sequential(nn.ReLU()))


def test_networks_have_the_papers_number_of_weights():
    # Section 4.1: "the number of weights are 172 and 197" for ai4i and churn modelling; 8 and 13 features, two outputs.
    assert num_parameters(perceptron("dnn-1", 8, 2, seed=0)) == 172
    assert num_parameters(perceptron("dnn-1", 13, 2, seed=0)) == 197


def test_a_vector_is_the_networks_weights():
    network = Odd()
    named = from_vectors(network, torch.stack([to_vector(network), torch.zeros(num_parameters(network))]))
    for name, value in network.named_parameters():
        assert torch.equal(named[name][0], value)
        assert not named[name][1].any()


@pytest.mark.parametrize(
    "changes", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": float("nan")}, {"optimizer": "lion"}]
)
def test_a_schedule_that_cannot_be_is_refused(changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        TrainingSchedule(**changes)


def test_a_network_with_buffers_and_an_unknown_architecture_are_refused(records):
    network = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(InputError, match="buffers"):
        train_stacked(network, *records, np.arange(20).reshape(2, 10), TrainingSchedule(epochs=1), seed=0)
    with pytest.raises(InputError, match="dnn-1, dnn-2, dnn-3, dnn-4"):
        perceptron("dnn-5", 6, 3, seed=0)


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

"""Networks trained together are those trained one after another."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.methods.integral._networks import (
    HIDDEN,
    TrainingSchedule,
    batch_order,
    from_vectors,
    is_perceptron,
    num_parameters,
    perceptron,
    to_vector,
    train_stacked,
)


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


def test_networks_differ_by_their_records_alone(records):
    features, labels = records
    network, rows = perceptron("dnn-1", 6, 3, seed=0), np.arange(200).reshape(4, 50)
    same = np.stack([rows[0], rows[1], rows[0]])
    found = train_stacked(network, features, labels, same, TrainingSchedule(epochs=2), seed=0)[2]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_the_start_is_left_as_it_was(records):
    network = perceptron("dnn-1", 6, 3, seed=0)
    before = to_vector(network)
    train_stacked(network, *records, np.arange(20).reshape(2, 10), TrainingSchedule(epochs=1), seed=0)
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


def test_a_network_with_buffers_is_refused(records):
    network = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(InputError, match="buffers"):
        train_stacked(network, *records, np.arange(20).reshape(2, 10), TrainingSchedule(epochs=1), seed=0)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(InputError, match="dnn-1, dnn-2, dnn-3, dnn-4"):
        perceptron("dnn-5", 6, 3, seed=0)

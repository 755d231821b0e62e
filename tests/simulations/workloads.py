"""Workloads for the benchmark of loading, in a module of their own, which the measured processes import."""

from pathlib import Path

import torch
from torch import nn

LARGE = 200 * 2**20


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)).eval()


class Workload:
    """One record through the model."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or network(1)

    def infer(self) -> None:
        self.model(torch.ones(1, 64))


class Greedy(Workload):
    """Takes more memory than it may once the limit holds: the first run, which comes before, takes little."""

    runs = 0

    def infer(self) -> None:
        self.runs += 1
        if self.runs > 1:
            bytearray(b"1") * LARGE


class Reading(Workload):
    """Reads a file that is larger than the memory."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def infer(self) -> None:
        with self.path.open("rb") as file:
            while file.read(2**20):
                pass

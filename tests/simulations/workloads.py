"""What the benchmark of loading stores, and its workloads, in a module of their own, which its processes import."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.store import Store

LARGE = 200 * 2**20


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)).eval()


def add(store: Store, name: str, tensors: dict[str, np.ndarray], size: int = 64) -> None:
    """Store a model in blocks of so many values."""
    layout = layout_of(tensors, size)
    store.add(name, layout, *layout.to_blocks(tensors))


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

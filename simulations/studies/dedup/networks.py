"""The networks of the study: plain modules that never mix records, so that the gradients of single records are exact.

Perceptron, small vision transformer and ResNet have 135,000 to 146,000 weights, which are 260 to 290 blocks of 512.
Of MiniLM the last two layers and the head are trained: they alone run, on kept states of the layers before. Texts come
in passes of one length, so that no token is padding and attention needs no mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedpriv.learning.adapters import BUNDLED_ENCODER, BaseModel, load_base, pooling

Architecture = Literal["perceptron", "vit", "resnet", "vit-large", "minilm"]

EMBEDDING = 384
FROZEN_LAYERS = 4  # of six
NUM_OUTPUTS = 15  # of the models on texts: enough for every task, so that all have one shape
SIDE = 28  # pixels
NUM_DIGITS = 10


class Perceptron(nn.Module):
    """Two hidden layers on a text's embedding."""

    def __init__(self, width: int = 224) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(EMBEDDING, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, NUM_OUTPUTS)
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        """Logits, [records, 15], of embeddings [records, 384]."""
        logits: Tensor = self.layers(embeddings)
        return logits


class AddedPlaces(nn.Module):
    """Adds a vector of its own to each place."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.values = nn.Parameter(0.1 * torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        """[records, *shape], as the input."""
        return x + self.values


class VisionTransformer(nn.Module):
    """Pre-norm encoder layers on patches of 7x7 pixels, and a head on their mean (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, patch: int = 7, inner: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.embedding = nn.Linear(patch * patch, width)
        self.places = AddedPlaces((SIDE // patch) ** 2, width)
        self.layers = nn.ModuleList(EncoderBlock(width, heads, inner * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [records, 10], of images [records, 28, 28]."""
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.places(self.embedding(patches.flatten(3).flatten(1, 2)))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


class EncoderBlock(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.back = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[records, patches, width], as the input."""
        shape = *x.shape[:2], 3, self.heads, -1
        q, k, v = self.qkv(self.before_attention(x)).reshape(shape).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.back(F.gelu(self.hidden(self.before_hidden(x))))
        return result


class Convolution(nn.Module):
    """A convolution with zeros around the image, as one linear layer on its windows."""

    def __init__(self, inputs: int, outputs: int, *, window: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.window, self.stride = window, stride
        self.linear = nn.Linear(inputs * window * window, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[records, outputs, height / stride, width / stride] of [records, inputs, height, width]."""
        side = (x.shape[2] - 1) // self.stride + 1
        windows = F.unfold(x, self.window, padding=self.window // 2, stride=self.stride)
        result: Tensor = self.linear(windows.transpose(1, 2)).transpose(1, 2)
        return result.reshape(len(x), -1, side, side)


class Residual(nn.Module):
    """Two convolutions with group norms, and a connection past them (He et al. 2016; Wu and He 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Convolution(inputs, outputs, stride=stride), Convolution(outputs, outputs)
        self.first_norm, self.second_norm = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        same = inputs == outputs and stride == 1
        self.past = nn.Identity() if same else Convolution(inputs, outputs, window=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """[records, outputs, height / stride, width / stride] of [records, inputs, height, width]."""
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.past(x) + self.second_norm(self.second(hidden)))


class ResNet(nn.Module):
    """A stem, three residual blocks and a head on the mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = Convolution(1, 16, stride=2), nn.GroupNorm(8, 16)
        self.blocks = nn.Sequential(Residual(16, 32, 2), Residual(32, 64, 2), Residual(64, 64, 1))
        self.head = nn.Linear(64, NUM_DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [records, 10], of images [records, 28, 28]."""
        x = self.blocks(F.relu(self.norm(self.stem(images.unsqueeze(1)))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class Tail(nn.Module):
    """MiniLM's last layers, the mean over tokens at a fixed length, and a linear head; in bfloat16 but for the head.

    The weights are float32. The modules' names are those of the whole model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        layers = model.bert.encoder.layer
        trained = {str(index): layers[index] for index in range(FROZEN_LAYERS, len(layers))}
        self.bert = nn.ModuleDict({"encoder": nn.ModuleDict({"layer": nn.ModuleDict(trained)})})
        self._trained = tuple(trained.values())
        self.classifier = model.classifier

    def forward(self, states: Tensor) -> Tensor:
        """Logits, float32 [texts, 15], of the states after the frozen layers, [texts, tokens, 384]."""
        hidden = states
        # On texts this short the plain products are faster than fused attention.
        with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            for layer in self._trained:
                hidden = layer(hidden)
        logits: Tensor = self.classifier(pooling.unit_states(hidden.float().mean(dim=1)))
        return logits


def encoder(dtype: torch.dtype = torch.float32) -> BaseModel:
    """The whole model, with a head of zeros."""
    return load_base(BUNDLED_ENCODER, task="SEQ_CLS", num_labels=NUM_OUTPUTS, normalize=True, dtype=dtype)


def tail() -> Tail:
    """The trained part of the whole model, with a head of zeros."""
    model = Tail(encoder().model)
    return model.requires_grad_(True)


def whole(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """The state dict of the whole model, for `encoder().model`, with a variant's tensors in place of its own.

    Args:
        tensors: of a variant: the last two layers and the head.
    """
    given = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return {**encoder().model.state_dict(), **given}


_NETWORKS: Mapping[Architecture, Any] = {
    "perceptron": Perceptron,
    "vit": VisionTransformer,
    "resnet": ResNet,
    "vit-large": lambda: VisionTransformer(width=256, heads=8),
    "minilm": tail,
}


def network(architecture: Architecture, seed: int = 0) -> nn.Module:
    """A network with seeded initial weights; MiniLM's are those that it was published with, and its head is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = _NETWORKS[architecture]()
    return model


def to_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """{name: float32 array} of its weights, a copy."""
    return {name: value.detach().float().numpy().copy() for name, value in model.state_dict().items()}


def load(model: nn.Module, tensors: Mapping[str, NDArray[Any]]) -> nn.Module:
    """The model with these weights, in the types that it has."""
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    return model

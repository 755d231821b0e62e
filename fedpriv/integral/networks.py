"""The paper's four architectures, and conversion between a network's weights and one vector."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from fedpriv.errors import InputError

HIDDEN: dict[str, tuple[int, ...]] = {
    "dnn-1": (5, 10, 5),
    "dnn-2": (1024,),
    "dnn-3": (10, 20, 10),
    "dnn-4": (5, 10, 20, 10, 5),
}
"""Widths of the hidden layers. Source: Varshney and Torra 2023, section 4."""

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Identity)


def is_perceptron(network: nn.Module) -> bool:
    """Whether the network is a Sequential of elementwise activations and distinct linear layers."""
    modules = list(network) if isinstance(network, nn.Sequential) else []
    linear = [module for module in modules if type(module) is nn.Linear]
    return (
        len(linear) > 0
        and len({id(layer) for layer in linear}) == len(linear)
        and all(type(module) in (nn.Linear, *_ELEMENTWISE) for module in modules)
    )


def perceptron(architecture: str, num_features: int, num_classes: int, *, seed: int) -> nn.Sequential:
    """A fully connected network with ReLU between its layers and one logit per class.

    Args:
        architecture: a key of `HIDDEN`.
        num_features: >= 1.
        num_classes: >= 2.
        seed: of the initial weights, which follow PyTorch's default for linear layers.

    Raises:
        InputError: the architecture is unknown.
    """
    if architecture not in HIDDEN:
        raise InputError(f"architecture = {architecture!r}: must be one of {', '.join(HIDDEN)}")
    widths = (num_features, *HIDDEN[architecture], num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def num_parameters(network: nn.Module) -> int:
    """The number of weights and biases."""
    return sum(value.numel() for value in network.parameters())


def to_vector(network: nn.Module) -> Tensor:
    """All weights, [values], a copy in the order of `named_parameters`."""
    return torch.cat([value.detach().flatten() for value in network.parameters()])


def from_vectors(network: nn.Module, vectors: Tensor) -> dict[str, Tensor]:
    """{name: [..., *shape]}, views into the weight vectors of one or many networks.

    Args:
        network: gives names and shapes.
        vectors: [..., values], in the order of `to_vector`.
    """
    named = dict(network.named_parameters())
    pieces = torch.split(vectors, [value.numel() for value in named.values()], dim=-1)
    return {
        name: piece.view(*piece.shape[:-1], *value.shape)
        for (name, value), piece in zip(named.items(), pieces, strict=True)
    }

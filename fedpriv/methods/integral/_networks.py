"""Small networks: the paper's four architectures, their weights as one vector, their figures, and their alignment.

Permuting a hidden layer's neurons together with the next layer's columns does not change what a network computes. So
two networks are compared only after one has been brought, layer by layer, into the order that best fits the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedpriv.errors import InputError

HIDDEN: dict[str, tuple[int, ...]] = {
    "dnn-1": (5, 10, 5),
    "dnn-2": (1024,),
    "dnn-3": (10, 20, 10),
    "dnn-4": (5, 10, 20, 10, 5),
}
"""Widths of the hidden layers. Source: Varshney and Torra 2023, section 4."""

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Identity)

# Passes over the layers; each lowers the distance, and a few were enough in every case seen.
_MAX_PASSES = 20

# How many costs of pairs of neurons are held in memory at once.
_VALUES_AT_ONCE = 2**24

_Permutations = list[Tensor]
_Layers = list[tuple[Tensor, Tensor]]


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
        vectors: [..., values], in the order of `to_vector`.
    """
    named = dict(network.named_parameters())
    pieces = torch.split(vectors, [value.numel() for value in named.values()], dim=-1)
    return {
        name: piece.view(*piece.shape[:-1], *value.shape)
        for (name, value), piece in zip(named.items(), pieces, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class NetworkMetrics:
    """Metrics of one network on one set of records.

    Attributes:
        loss: mean cross-entropy, nats.
        accuracy: in [0, 1]; equal to the micro-averaged F1 score.
        f1: macro-averaged F1 score, in [0, 1]; low for a model that predicts only one class.
    """

    loss: float
    accuracy: float
    f1: float


def metrics(network: nn.Module, vector: Tensor, features: Tensor, labels: Tensor) -> NetworkMetrics:
    """Loss, accuracy and F1 of the network with these weights.

    Args:
        vector: [values].
        features: [records, ...], at least one.
        labels: int64 [records].
    """
    with torch.no_grad():
        logits = functional_call(network, from_vectors(network, vector.to(features)), (features,))
    return _of_predictions(float(F.cross_entropy(logits, labels)), logits.argmax(dim=1), labels)


def majority_class(train_labels: Tensor, labels: Tensor) -> NetworkMetrics:
    """Metrics of the constant prediction of the training records' class distribution."""
    counts = torch.bincount(train_labels, minlength=int(labels.max()) + 1).double()
    logits = (counts / counts.sum()).log()
    guess = torch.full_like(labels, int(counts.argmax()))
    return _of_predictions(float(-logits[labels].mean()), guess, labels)


def _of_predictions(loss: float, predicted: Tensor, labels: Tensor) -> NetworkMetrics:
    from sklearn.metrics import f1_score  # deferred: networks are trained without it

    accuracy = float((predicted == labels).double().mean())
    f1 = f1_score(labels.numpy(), predicted.numpy(), average="macro", zero_division=0, labels=np.unique(labels.numpy()))
    return NetworkMetrics(loss=loss, accuracy=accuracy, f1=float(f1))


def aligned(network: nn.Module, vectors: Tensor, reference: Tensor) -> Tensor:
    """The networks, [networks, values], each with its hidden neurons in the order that best fits the reference.

    Guarantee: each network computes the same function as before. A permutation of the reference's own hidden neurons
    is undone exactly if no two neurons of a layer have equal incoming weights. For other networks the order is a
    local optimum of the squared distance: finding the global one is a quadratic assignment problem, which is NP-hard.

    The first pass starts at the input and compares incoming weights; later passes compare incoming and outgoing
    weights, until nothing changes.

    Args:
        network: `nn.Sequential` of linear layers and elementwise activations.
        vectors: [networks, values].
        reference: [values].

    Raises:
        InputError: the network is of another kind.

    Source: Varshney and Torra 2023, section 2.2; Ainsworth et al. 2022 (Git Re-Basin), section 3.2, for the passes.
    """
    names = _linear_names(network)
    target = _layers(network, names, reference.double().unsqueeze(0))
    widest = max(weight.shape[1] for weight, _ in target)
    result = []
    for chunk in torch.split(vectors, max(1, _VALUES_AT_ONCE // widest**2)):
        orders = _orders(_layers(network, names, chunk.double()), target)
        result.append(_permuted(network, names, chunk, orders))
    return torch.cat(result)


def _permuted(network: nn.Module, names: Sequence[str], vectors: Tensor, orders: _Permutations) -> Tensor:
    """Each network with its hidden neurons in its own order, [networks, width] for each hidden layer."""
    result = vectors.clone()
    named = from_vectors(network, result)
    for depth, (name, (weight, bias)) in enumerate(zip(names, _layers(network, names, vectors), strict=True)):
        columns = weight if depth == 0 else _columns(weight, orders[depth - 1])
        # These are views of the result, so writing to them writes to it.
        named[f"{name}.weight"].copy_(columns if depth == len(orders) else _rows(columns, orders[depth]))
        if f"{name}.bias" in named:
            named[f"{name}.bias"].copy_(bias if depth == len(orders) else bias.gather(1, orders[depth]))
    return result


def _orders(layers: _Layers, target: _Layers) -> _Permutations:
    """The order of each hidden layer, [networks, width], that brings each network closest to the target."""
    from scipy.optimize import linear_sum_assignment  # deferred: networks are trained without it

    num = len(layers[0][0])
    orders = [torch.arange(weight.shape[1]).repeat(num, 1) for weight, _ in layers[:-1]]
    for attempt in range(_MAX_PASSES):
        changed = False
        for depth, current in enumerate(orders):
            costs = _incoming(layers, target, orders, depth)
            if attempt:
                costs = costs + _outgoing(layers, target, orders, depth)
            optimal = torch.from_numpy(np.stack([linear_sum_assignment(cost)[1] for cost in costs.numpy()]))
            # The current order is kept unless another is strictly better, so that the passes terminate.
            better = _cost(costs, optimal) < _cost(costs, current)
            orders[depth] = torch.where(better.unsqueeze(1), optimal, current)
            changed = changed or bool(better.any())
        if attempt and not changed:
            break
    return orders


def _cost(costs: Tensor, order: Tensor) -> Tensor:
    """Cost of each network's order, [networks]; costs [networks, target's neurons, own neurons]."""
    return costs.gather(2, order.unsqueeze(2)).sum(dim=(1, 2))


def _incoming(layers: _Layers, target: _Layers, orders: _Permutations, depth: int) -> Tensor:
    """|difference|^2 of incoming weights and bias, [networks, target's neurons, own neurons]."""
    weight, bias = layers[depth]
    weight = weight if depth == 0 else _columns(weight, orders[depth - 1])
    own = torch.cat([weight, bias.unsqueeze(2)], dim=2)
    return _distances(torch.cat([target[depth][0], target[depth][1].unsqueeze(2)], dim=2), own).square()


def _outgoing(layers: _Layers, target: _Layers, orders: _Permutations, depth: int) -> Tensor:
    """|difference|^2 of outgoing weights, [networks, target's neurons, own neurons]."""
    weight = layers[depth + 1][0]
    rows = weight if depth + 1 == len(orders) else _rows(weight, orders[depth + 1])
    return _distances(target[depth + 1][0].mT, rows.mT).square()


def _rows(matrices: Tensor, order: Tensor) -> Tensor:
    """Each matrix's rows in its own order; [networks, rows, columns]."""
    return matrices.gather(1, order.unsqueeze(2).expand_as(matrices))


def _columns(matrices: Tensor, order: Tensor) -> Tensor:
    """Each matrix's columns in its own order; [networks, rows, columns]."""
    return matrices.gather(2, order.unsqueeze(1).expand_as(matrices))


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """Distances of all pairs of rows, from differences: computed from products, equal rows would not give 0."""
    rows = rows.expand(len(others), -1, -1)
    distances: Tensor = torch.cdist(rows.contiguous(), others.contiguous(), compute_mode="donot_use_mm_for_euclid_dist")
    return distances


def _linear_names(network: nn.Module) -> list[str]:
    """Names of the linear layers, from input to output."""
    if not is_perceptron(network):
        raise InputError("network: only a Sequential of linear layers and elementwise activations can be aligned")
    return [name for name, module in network.named_children() if isinstance(module, nn.Linear)]


def _layers(network: nn.Module, names: Sequence[str], vectors: Tensor) -> _Layers:
    """(weight [networks, out, in], bias [networks, out]) of each linear layer; zeros where it has no bias."""
    named = from_vectors(network, vectors)
    weights = [named[f"{name}.weight"] for name in names]
    return [
        (weight, named.get(f"{name}.bias", weight.new_zeros(weight.shape[:2])))
        for name, weight in zip(names, weights, strict=True)
    ]

"""Alignment of one network's hidden neurons with another's, to undo permutations before networks are compared.

Permuting a hidden layer's neurons together with the next layer's columns does not change what a network computes. So
two networks are compared only after one has been brought, layer by layer, into the order that best fits the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.integral.networks import from_vectors, is_perceptron

# Passes over the layers; each lowers the distance, and a few were enough in every case seen.
_MAX_PASSES = 20

# How many costs of pairs of neurons are held in memory at once.
_VALUES_AT_ONCE = 2**24

Permutations = list[Tensor]
Layers = list[tuple[Tensor, Tensor]]


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


def _permuted(network: nn.Module, names: Sequence[str], vectors: Tensor, orders: Permutations) -> Tensor:
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


def _orders(layers: Layers, target: Layers) -> Permutations:
    """The order of each hidden layer, [networks, width], that brings each network closest to the target."""
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


def _incoming(layers: Layers, target: Layers, orders: Permutations, depth: int) -> Tensor:
    """|difference|^2 of incoming weights and bias, [networks, target's neurons, own neurons]."""
    weight, bias = layers[depth]
    weight = weight if depth == 0 else _columns(weight, orders[depth - 1])
    own = torch.cat([weight, bias.unsqueeze(2)], dim=2)
    return _distances(torch.cat([target[depth][0], target[depth][1].unsqueeze(2)], dim=2), own).square()


def _outgoing(layers: Layers, target: Layers, orders: Permutations, depth: int) -> Tensor:
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


def _layers(network: nn.Module, names: Sequence[str], vectors: Tensor) -> Layers:
    """(weight [networks, out, in], bias [networks, out]) of each linear layer; zeros where it has no bias."""
    named = from_vectors(network, vectors)
    weights = [named[f"{name}.weight"] for name in names]
    return [
        (weight, named.get(f"{name}.bias", weight.new_zeros(weight.shape[:2])))
        for name, weight in zip(names, weights, strict=True)
    ]

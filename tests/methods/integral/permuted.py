"""A perceptron's weights with its hidden neurons in another order, by plain indexing."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedpriv.methods.integral._networks import from_vectors


def permuted(network: nn.Module, vector: Tensor, orders: Sequence[Tensor]) -> Tensor:
    """The weights, [values], with the neurons of each hidden layer in the given order, int64 [width]."""
    values = from_vectors(network, vector.clone())
    names = [name for name, module in network.named_children() if isinstance(module, nn.Linear)]
    for layer, following, order in zip(names, names[1:], orders, strict=False):
        for name in (f"{layer}.weight", f"{layer}.bias"):
            if name in values:
                values[name] = values[name][order]
        values[f"{following}.weight"] = values[f"{following}.weight"][:, order]
    return torch.cat([values[name].flatten() for name, _ in network.named_parameters()])

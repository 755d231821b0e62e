"""A permutation of hidden neurons changes no function, and alignment undoes it."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.errors import InputError
from fedpriv.methods.integral._networks import HIDDEN, aligned, from_vectors, num_parameters, perceptron, to_vector


def permuted(network: nn.Module, vector: Tensor, orders: Sequence[Tensor]) -> Tensor:
    """The weights, [values], with the neurons of each hidden layer in the given order, int64 [width], by indexing."""
    values = from_vectors(network, vector.clone())
    names = [name for name, module in network.named_children() if isinstance(module, nn.Linear)]
    for layer, following, order in zip(names, names[1:], orders, strict=False):
        for name in (f"{layer}.weight", f"{layer}.bias"):
            if name in values:
                values[name] = values[name][order]
        values[f"{following}.weight"] = values[f"{following}.weight"][:, order]
    return torch.cat([values[name].flatten() for name, _ in network.named_parameters()])


def random_orders(network, generator):
    widths = [module.out_features for module in network if isinstance(module, nn.Linear)][:-1]
    return [torch.randperm(width, generator=generator) for width in widths]


def outputs(network, vector, x):
    return functional_call(network, from_vectors(network, vector), (x,))


PLAIN = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2))


@pytest.mark.parametrize(
    "network", [*(perceptron(name, 7, 3, seed=0) for name in HIDDEN), PLAIN], ids=[*HIDDEN, "plain"]
)
def test_a_random_permutation_is_undone_exactly(network):
    generator = torch.Generator().manual_seed(0)
    vector = to_vector(network)
    mixed = torch.stack([permuted(network, vector, random_orders(network, generator)) for _ in range(3)])
    assert not any(torch.equal(each, vector) for each in mixed), "the check would be blind"
    assert torch.equal(aligned(network, mixed, vector), vector.repeat(3, 1))


def test_neurons_that_only_their_outgoing_weights_tell_apart():
    """Equal incoming weights: only the passes after the first see the difference."""
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        network[0].weight[1], network[0].bias[1] = network[0].weight[0], network[0].bias[0]
    vector = to_vector(network)
    for order in itertools.permutations(range(3)):
        mixed = permuted(network, vector, [torch.tensor(order)])
        assert torch.equal(aligned(network, mixed.unsqueeze(0), vector)[0], vector)


@pytest.mark.parametrize("name", ["dnn-1", "dnn-3"])
def test_alignment_keeps_the_function_and_brings_networks_nearer(name):
    network, x = perceptron(name, 7, 3, seed=0), torch.randn(20, 7, generator=torch.Generator().manual_seed(0))
    others = torch.stack([to_vector(perceptron(name, 7, 3, seed=seed)) for seed in range(1, 6)])
    reference = to_vector(network)
    found = aligned(network, others, reference)
    for before, after in zip(others, found, strict=True):
        torch.testing.assert_close(outputs(network, after, x), outputs(network, before, x), atol=1e-6, rtol=1e-5)
        assert (after - reference).norm() < (before - reference).norm()


def test_one_hidden_layer_is_aligned_best_of_all_orders():
    """Oracle: all 120 orders of five neurons. One layer is a linear assignment, which the second pass solves whole."""
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        vector, reference = torch.randn(2, num_parameters(network), generator=generator)
        best = min(
            float((permuted(network, vector, [torch.tensor(order)]) - reference).norm())
            for order in itertools.permutations(range(5))
        )
        found = aligned(network, vector.unsqueeze(0), reference)[0]
        assert float((found - reference).norm()) == pytest.approx(best, rel=1e-6)


def test_what_cannot_be_aligned_is_refused():
    network = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU())
    with pytest.raises(InputError, match="can be aligned"):
        aligned(network, to_vector(network).unsqueeze(0), to_vector(network))

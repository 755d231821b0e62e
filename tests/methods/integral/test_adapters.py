"""Clients' variants are compared by the maps that they are, and their mean is the mean of these."""

import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.learning.adapters._arithmetic import A_SUFFIX, B_SUFFIX
from fedpriv.methods.integral.procedure import _mean_adapter, recurring_adapters

GENERATOR = torch.Generator().manual_seed(0)
LAYERS = {"layer.0.query": (12, 10), "layer.1.value": (8, 10)}


def adapter(rank=3, scale=1.0):
    found = {"classifier.weight": scale * torch.randn(4, 12, generator=GENERATOR)}
    for name, (rows, columns) in LAYERS.items():
        found[name + A_SUFFIX] = torch.randn(rank, columns, generator=GENERATOR)
        found[name + B_SUFFIX] = scale * torch.randn(rows, rank, generator=GENERATOR)
    return found


def rewritten(of, noise=0.0):
    """The same map by other factors: B M and M^-1 A, and noise on the head."""
    found = {name: tensor + noise * torch.randn(tensor.shape, generator=GENERATOR) for name, tensor in of.items()}
    for name in LAYERS:
        basis = torch.linalg.qr(torch.randn(3, 3, generator=GENERATOR))[0] @ torch.diag(torch.tensor([0.5, 1.0, 3.0]))
        found[name + B_SUFFIX] = of[name + B_SUFFIX] @ basis
        found[name + A_SUFFIX] = torch.linalg.inv(basis) @ of[name + A_SUFFIX]
    return dict(reversed(found.items()))


def maps(of):
    products = {name: of[name + B_SUFFIX] @ of[name + A_SUFFIX] for name in LAYERS}
    return products | {"classifier.weight": of["classifier.weight"]}


@pytest.mark.parametrize("clustering", ["first-member", "complete"])
@pytest.mark.parametrize("measure", ["largest", "norm"])
def test_equal_maps_recur_whatever_their_factors(clustering, measure):
    first, other = adapter(), adapter()
    clients = {"a": first, "b": other, "c": rewritten(first), "d": rewritten(first), "e": rewritten(other)}
    found = recurring_adapters(clients, 1e-3, measure=measure, clustering=clustering)
    assert [cluster.clients for cluster in found] == [("a", "c", "d"), ("b", "e")]
    assert [cluster.k for cluster in found] == [3, 2]
    assert found[0].largest_difference < 1e-4
    for name, value in maps(found[0].mean).items():
        torch.testing.assert_close(value, maps(first)[name], atol=1e-4, rtol=1e-4)
    assert found[0].mean["layer.0.query" + A_SUFFIX].shape == (3, 10), "equal maps need no more rank than one of them"


def test_the_head_counts_too():
    first = adapter()
    other = first | {"classifier.weight": first["classifier.weight"] + 0.2}
    assert [c.recurrence for c in recurring_adapters({"a": first, "b": other}, 0.1)] == [1, 1]
    assert [c.recurrence for c in recurring_adapters({"a": first, "b": other}, 0.21)] == [2]


def test_lora_scale_is_part_of_the_map():
    first = adapter()
    other = {name: tensor.clone() for name, tensor in first.items()}
    other["layer.0.query" + B_SUFFIX] *= 1.1
    gap = float((maps(other)["layer.0.query"] - maps(first)["layer.0.query"]).abs().max())
    for scale, recurrence in ((1.0, 2), (4.0, 1)):
        found = recurring_adapters({"a": first, "b": other}, 2 * gap, scale=scale)
        assert found[0].recurrence == recurrence


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 2, 3), (4, 4, 4)])
def test_the_mean_is_exact_in_the_rank_that_it_takes(ranks):
    clients = {str(place): adapter(rank) for place, rank in enumerate(ranks)}
    mean = _mean_adapter(clients)
    for name in (*LAYERS, "classifier.weight"):
        expected = torch.stack([maps(each)[name] for each in clients.values()]).mean(dim=0)
        torch.testing.assert_close(maps(mean)[name], expected, atol=1e-5, rtol=1e-4)
    wanted = max(min(sum(ranks), *shape) for shape in LAYERS.values())
    assert mean["layer.0.query" + A_SUFFIX].shape[0] == mean["layer.1.value" + A_SUFFIX].shape[0] == wanted
    factors = torch.stack([each["layer.0.query" + B_SUFFIX][:, :1] for each in clients.values()]).mean(dim=0)
    assert not torch.allclose(mean["layer.0.query" + B_SUFFIX][:, :1], factors), "the mean of factors is another map"


def test_variants_that_never_trained():
    """B is zero at the start of a run: the mean of zero maps is a zero map of rank one."""
    start = adapter()
    for name in LAYERS:
        start[name + B_SUFFIX].zero_()
    (cluster,) = recurring_adapters({"a": start, "b": start}, 0.0)
    assert cluster.recurrence == cluster.k == 2
    assert not maps(cluster.mean)["layer.0.query"].any()


@pytest.mark.parametrize(
    ("clients", "options", "words"),
    [
        ({}, {}, "there are none"),
        ({"a": adapter(), "b": adapter() | {"more": torch.zeros(1)}}, {}, "adapter of 'b'"),
        ({"a": adapter()}, {"scale": 0.0}, "scale = 0.0"),
        ({"a": adapter()}, {"epsilon": -1.0}, "epsilon = -1.0"),
        ({"a": adapter()}, {"clustering": "single"}, "clustering = 'single'"),
    ],
)
def test_what_cannot_be_compared_is_refused(clients, options, words):
    with pytest.raises(InputError, match=words):
        recurring_adapters(clients, **({"epsilon": 0.1} | options))

"""Saliencies are what loops over single records say."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.models.dedup import saliency
from fedpriv.models.dedup.saliency import AGGREGATIONS, MEASURES, by_block
from fedpriv.models.variants.blocks import layout_of


class Tiny(nn.Module):
    """Embedding, norm, dropout and linear layers over [records, tokens]; one layer is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.dropout = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Dropout(0.5)
        self.hidden, self.head, self.unused = nn.Linear(6, 5), nn.Linear(5, 3, bias=False), nn.Linear(2, 2)

    def forward(self, tokens):
        x = self.dropout(self.norm(self.embedding(tokens)))
        return self.head(torch.tanh(self.hidden(x)).mean(dim=1))


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="none")


def batches(num_records=10, batch_size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (num_records, 7), generator=generator)
    labels = torch.randint(0, 3, (num_records,), generator=generator)
    pairs = zip(tokens.split(batch_size), labels.split(batch_size), strict=True)
    return [{"tokens": some, "labels": few} for some, few in pairs] if num_records else []


def gradients_of_records(model, data):
    """{name: [records, *shape]} by a loop with plain backward passes in evaluation mode."""
    model.eval()
    rows = {name: [] for name, _ in model.named_parameters()}
    for batch in data:
        for k in range(len(batch["labels"])):
            model.zero_grad()
            loss(model, {name: value[k : k + 1] for name, value in batch.items()}).sum().backward()
            for name, parameter in model.named_parameters():
                rows[name].append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
    model.zero_grad(set_to_none=True)
    return {name: torch.stack(values) for name, values in rows.items()}


def assert_close(found, expected):
    assert set(found) == set(expected)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name].numpy(), rtol=1e-4, atol=1e-7, err_msg=name)


def test_magnitude_gradient_and_fisher_are_the_formulas_over_single_records():
    model = Tiny()
    assert_close(saliency.magnitude(model), {name: p.detach().abs() for name, p in model.named_parameters()})
    rows = gradients_of_records(Tiny(), batches())
    assert_close(saliency.gradient(Tiny(), batches(), loss), {name: g.mean(dim=0).abs() for name, g in rows.items()})
    assert_close(saliency.fisher(Tiny(), batches(), loss), {name: (g**2).mean(dim=0) for name, g in rows.items()})


def test_wanda_is_weight_times_the_input_s_root_mean_square_on_used_linear_layers():
    model = Tiny().eval()
    squares = {"hidden": torch.zeros(6), "head": torch.zeros(5)}
    for batch in batches():
        for tokens in batch["tokens"]:
            x = model.norm(model.embedding(tokens)).detach()
            squares["hidden"] += x.square().sum(dim=0)
            squares["head"] += torch.tanh(model.hidden(x)).mean(dim=0).detach().square()
    expected = {name: p.detach().abs() for name, p in model.named_parameters()}
    expected["hidden.weight"] = expected["hidden.weight"] * (squares["hidden"] / 70).sqrt()
    expected["head.weight"] = expected["head.weight"] * (squares["head"] / 10).sqrt()
    assert_close(saliency.wanda(Tiny(), batches(), loss), expected)


def test_the_model_stays_as_it_was():
    model = Tiny().train()
    model.hidden.eval()
    model.head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for measure in MEASURES.values():
        measure(model, batches(), loss)
    assert model.training
    assert not model.hidden.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.hidden._forward_pre_hooks


@pytest.mark.parametrize("measure", [saliency.gradient, saliency.fisher])
def test_named_parameters_are_considered_alone_frozen_or_not(measure):
    model, every = Tiny().requires_grad_(False), measure(Tiny(), batches(), loss)
    found = measure(model, batches(), loss, names=["head.weight", "hidden.bias"])
    assert_close(found, {name: torch.from_numpy(every[name]) for name in ("hidden.bias", "head.weight")})
    with pytest.raises(InputError, match="'bogus'"):
        measure(model, batches(), loss, names=["bogus"])


@pytest.mark.parametrize("measure", ["gradient", "fisher", "wanda"])
def test_no_record_and_no_finite_value_are_refused(measure):
    with pytest.raises(InputError, match="no record"):
        MEASURES[measure](Tiny(), batches(0), loss)
    broken = Tiny()
    broken.embedding.weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match="not finite"):
        MEASURES[measure](broken, batches(), loss)


VALUES = {"w": np.array([1.0, -3.0, 2.0, 2.0, -4.0, 3.0], dtype=np.float32)}
EXPECTED = {"l1": [2.0, 3.5], "l2": [4.5**0.5, 12.5**0.5], "linf": [3.0, 4.0], "q75": [2.25, 3.75]}


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_blocks_are_aggregated_without_their_padding_and_are_those_of_their_tensors(aggregation):
    np.testing.assert_allclose(by_block(VALUES, layout_of(VALUES, 4), aggregation), EXPECTED[aggregation])
    tensors = {"a": np.arange(10, dtype=np.float32).reshape(2, 5), "b": np.ones(2, dtype=np.float32)}
    tensors["c"] = np.full((4, 1), 7, dtype=np.float32)
    found = by_block(tensors, layout_of(tensors, 4), aggregation)
    parts = [np.arange(4), np.arange(4, 8), np.arange(8, 10), np.full(4, 7)]
    np.testing.assert_allclose(found, [AGGREGATIONS[aggregation](part.astype(np.float64)) for part in parts])
    with pytest.raises(InputError, match="'c'"):
        by_block({"a": tensors["a"]}, layout_of(tensors, 4), aggregation)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="aggregation = 'bogus': known are l2, l1, linf, q75"):
        by_block(VALUES, layout_of(VALUES, 4), "bogus")
    with pytest.raises(InputError, match="saliency = 'bogus': must be one of gradient, magnitude, wanda, fisher"):
        MEASURES.named("bogus")

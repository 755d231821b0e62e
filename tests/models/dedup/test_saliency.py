"""Saliencies are what loops over single records say; on private data they are clipped, noised and paid for."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.models.dedup import saliency
from fedpriv.models.dedup.saliency import AGGREGATIONS, MEASURES, by_block, private_gradient
from fedpriv.models.variants.blocks import layout_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource

FALSE_ALARM = 1e-6


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


def test_magnitude_is_the_absolute_value():
    model = Tiny()
    assert_close(saliency.magnitude(model), {name: p.detach().abs() for name, p in model.named_parameters()})


def test_gradient_is_that_of_the_mean_loss():
    rows = gradients_of_records(Tiny(), batches())
    assert_close(saliency.gradient(Tiny(), batches(), loss), {name: g.mean(dim=0).abs() for name, g in rows.items()})


def test_fisher_is_the_mean_squared_gradient_of_single_records():
    rows = gradients_of_records(Tiny(), batches())
    assert_close(saliency.fisher(Tiny(), batches(), loss), {name: (g**2).mean(dim=0) for name, g in rows.items()})


@pytest.mark.parametrize("measure", ["gradient", "fisher", "wanda"])
def test_batches_do_not_matter(measure):
    one, other = (MEASURES[measure](Tiny(), batches(batch_size=size), loss) for size in (1, 10))
    assert_close(one, {name: torch.from_numpy(values) for name, values in other.items()})


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


def every_way(model, data):
    for measure in MEASURES.values():
        measure(model, data, loss)
    private_gradient(model, data, loss, clip_norm=1.0, noise_multiplier=1.0, source=SeededSource(0))


def test_the_model_stays_as_it_was():
    model = Tiny().train()
    model.hidden.eval()
    model.head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    every_way(model, batches())
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


def clipped_sum(model, data, clip_norm):
    rows = gradients_of_records(model, data)
    flat = torch.cat([values.flatten(1) for values in rows.values()], dim=1)
    scale = (clip_norm / flat.norm(dim=1)).clamp(max=1.0)
    return {name: torch.tensordot(scale, values, dims=1) for name, values in rows.items()}


@pytest.mark.parametrize("clip_norm", [0.1, 0.9, 100.0])
def test_private_gradients_are_clipped_jointly_and_summed(clip_norm):
    found, event = private_gradient(
        Tiny(), batches(), loss, clip_norm=clip_norm, noise_multiplier=0.0, source=SeededSource(0)
    )
    expected = clipped_sum(Tiny(), batches(), clip_norm)
    assert_close(found, {name: values.abs() for name, values in expected.items()})
    assert event == SubsampledGaussian(noise_multiplier=0.0, sampling_probability=1.0)


def test_the_event_is_one_gaussian_release_of_all_records():
    _, event = private_gradient(
        Tiny(), batches(), loss, clip_norm=0.5, noise_multiplier=1.7, source=SecureSource(), names=["head.weight"]
    )
    assert event == SubsampledGaussian(noise_multiplier=1.7, sampling_probability=1.0, count=1, unit="record")


def accepts(values, scale):
    """Whether absolute values fit N(0, scale^2): the sum of squares does not see signs."""
    statistic = float(np.square(values / scale).sum())
    return 2 * min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size)) > FALSE_ALARM


# Without records all values are noise. The smallest tensors hold 2 values, 800 in 400 releases: at this false alarm
# their variance is known to +-25 %, and scales of 2/3 and 3/2 change it by -56 % and +125 %.
def test_every_tensor_has_noise_of_scale_z_times_c():
    model = Tiny()
    releases = [
        private_gradient(model, [], loss, clip_norm=2.0, noise_multiplier=1.5, source=SeededSource(k))[0]
        for k in range(400)
    ]
    for name, _ in model.named_parameters():
        values = np.stack([release[name] for release in releases]).astype(np.float64)
        assert accepts(values, 3.0), name
        assert not accepts(values, 2.0), name
        assert not accepts(values, 4.5), name


def test_a_record_whose_gradient_is_not_finite_counts_as_zero():
    def broken(model, batch):
        return torch.where(batch["labels"] == 1, torch.nan, 1.0) * loss(model, batch)

    data = batches()
    assert any((batch["labels"] == 1).any() for batch in data)
    sound = [{name: value[batch["labels"] != 1] for name, value in batch.items()} for batch in data]
    found, _ = private_gradient(Tiny(), data, broken, clip_norm=0.3, noise_multiplier=0.0, source=SeededSource(0))
    assert_close(found, {name: values.abs() for name, values in clipped_sum(Tiny(), sound, 0.3).items()})


def test_adding_a_record_moves_the_result_by_at_most_the_clip_norm():
    data = batches(batch_size=1)
    for num_records in range(len(data)):
        one, other = (
            private_gradient(Tiny(), some, loss, clip_norm=0.05, noise_multiplier=0.0, source=SeededSource(0))[0]
            for some in (data[:num_records], data[: num_records + 1])
        )
        moved = sum(np.square(one[name].astype(np.float64) - other[name]).sum() for name in one) ** 0.5
        assert 0 < moved <= 0.05


VALUES = {"w": np.array([1.0, -3.0, 2.0, 2.0, -4.0, 3.0], dtype=np.float32)}
EXPECTED = {"l1": [2.0, 3.5], "l2": [4.5**0.5, 12.5**0.5], "linf": [3.0, 4.0], "q75": [2.25, 3.75]}


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_blocks_are_aggregated_without_their_padding(aggregation):
    np.testing.assert_allclose(by_block(VALUES, layout_of(VALUES, 4), aggregation), EXPECTED[aggregation])


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_blocks_of_a_layout_are_those_of_its_tensors(aggregation):
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
    with pytest.raises(InputError, match="saliency = 'bogus': known are gradient, magnitude, wanda, fisher"):
        saliency.measure("bogus")

"""The start of a head: class means from noised sums, whatever the noise did to a class's count."""

import math

import pytest
import torch

from fedpriv.learning.adapters.pooling import BIAS_SCALE, STATE_SCALE
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.learning.aggregation._head_start import head_of, recentred, started

WEIGHT, BIAS, B = "classifier.weight", "classifier.bias", "layer.lora_B.weight"


def model(classes=3, width=5, *, bias=True):
    adapter = {WEIGHT: torch.zeros(classes, width), B: torch.ones(2, 2)}
    adapter |= {BIAS: torch.zeros(classes)} if bias else {}
    return GlobalModel(initial=adapter, adapter=adapter)


def uploads(features, labels, classes, *, bias=True):
    """What the noiseless class sums of these records add to a head at zero."""
    one_hot = torch.nn.functional.one_hot(labels, classes).double()
    sums = {WEIGHT: (one_hot.T @ features.double() / len(labels)).float(), B: torch.ones(2, 2)}
    return sums | ({BIAS: (BIAS_SCALE**2 * one_hot.mean(dim=0)).float()} if bias else {})


def records(num=300, classes=3, width=5):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num) % classes
    labels[: num // 4] = 0
    features = torch.randn(num, width, generator=generator) + 2 * torch.nn.functional.one_hot(labels, width)
    return torch.nn.functional.normalize(features, dim=1) * STATE_SCALE, labels


def test_without_noise_the_head_is_the_class_means_less_their_mean_and_its_rows_mean_is_that_of_all_features():
    features, labels = records()
    head = started(model(), uploads(features, labels, 3), noise=0.0).adapter
    means = torch.stack([features[labels == c].mean(dim=0) for c in range(3)])
    assert torch.allclose(head[WEIGHT], 20 * (means - means.mean(dim=0)) + features.mean(dim=0), atol=1e-4)
    assert torch.equal(head[BIAS], torch.zeros(3))
    assert torch.equal(head[B], torch.ones(2, 2))


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.1])
def test_each_weight_starts_with_noise_of_a_quarter_at_most(noise):
    """Of even classes whose counts are known; a mean less the mean of all has less noise than a mean."""
    generator = torch.Generator().manual_seed(1)
    classes, width = 4, 4000
    aggregated = {
        WEIGHT: noise * torch.randn(classes, width, generator=generator),
        BIAS: torch.full((classes,), BIAS_SCALE**2 / classes),
        B: torch.ones(2, 2),
    }
    head = started(model(classes, width), aggregated, noise=noise).adapter[WEIGHT]
    largest = min(0.25, 20 * noise * classes)
    if noise < 0.03:  # beyond, the floor of the counts is above an even class's share
        assert head.std().item() == pytest.approx(largest * math.sqrt(1 - 1 / classes), rel=0.05)
    assert head.std().item() <= 1.05 * largest


def test_a_class_whose_count_noise_has_wiped_out_does_not_blow_up():
    for share in (-0.5, 0.0, 1e-9):
        aggregated = {WEIGHT: torch.full((3, 5), 0.1), BIAS: torch.full((3,), BIAS_SCALE**2 * 0.5), B: torch.ones(2, 2)}
        aggregated[BIAS][0] = share
        head = started(model(), aggregated, noise=0.01).adapter[WEIGHT]
        assert torch.isfinite(head).all()
        assert head.abs().max() < 20


def test_a_mean_that_noise_alone_makes_is_not_used_and_a_clear_one_is_kept():
    """20 classes of 400 values with noise 0.01 give a mean of length sqrt(8000) 0.01 = 0.9 by noise alone."""
    generator = torch.Generator().manual_seed(2)
    noise = 0.01 * torch.randn(20, 400, generator=generator)
    even = {BIAS: torch.full((20,), BIAS_SCALE**2 / 20), B: torch.ones(2, 2)}
    lengths = []
    for true in (0.0, 9.0):
        aggregated = {WEIGHT: noise + true / 20 / 400**0.5, **even}
        lengths.append(started(model(20, 400), aggregated, noise=0.01).adapter[WEIGHT].mean(dim=0).norm().item())
    assert lengths[0] < 0.2
    assert lengths[1] == pytest.approx(9.0, rel=0.05)


def test_a_round_s_noise_in_the_mean_of_the_rows_is_taken_out_and_no_prediction_changes():
    before, after = model(), model()
    before.adapter[WEIGHT] += torch.arange(5.0)
    after.adapter[WEIGHT] += torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
    moved = recentred(after, before).adapter
    assert torch.allclose(moved[WEIGHT].mean(dim=0), torch.arange(5.0), atol=1e-6)
    features, _ = records()
    one, two = (torch.log_softmax(features @ head[WEIGHT].T, dim=1) for head in (after.adapter, moved))
    assert torch.allclose(one, two, atol=1e-5)


def test_a_head_without_a_bias_has_even_classes():
    features, labels = records()
    without = started(model(bias=False), uploads(features, labels, 3, bias=False), noise=0.0).adapter
    sums = uploads(features, labels, 3)[WEIGHT]
    assert torch.allclose(without[WEIGHT], 20 * 3 * (sums - sums.mean(dim=0)), atol=1e-4)


def test_the_head_s_earlier_weights_do_not_matter():
    features, labels = records()
    before = model()
    moved = {**before.adapter, WEIGHT: torch.randn(3, 5), BIAS: torch.randn(3)}
    sums = uploads(features, labels, 3)
    aggregated = {**sums, WEIGHT: moved[WEIGHT] + sums[WEIGHT], BIAS: moved[BIAS] + sums[BIAS]}
    other = started(GlobalModel(initial=before.initial, adapter=moved), aggregated, noise=0.0)
    for name, tensor in started(before, sums, noise=0.0).adapter.items():
        assert torch.allclose(tensor, other.adapter[name], atol=1e-4)


def test_a_head_of_several_layers_is_refused_by_name():
    with pytest.raises(ValueError, match=r"dense\.weight"):
        head_of({"dense.weight": torch.zeros(2, 2), "out.weight": torch.zeros(2, 2)})

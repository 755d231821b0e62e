"""A head's steps with features less their mean: the same model, other coordinates, and noise on all of them."""

import dataclasses
from functools import partial

import pytest
import torch

from fedpriv.learning.adapters import pooling
from fedpriv.learning.adapters.lora import read
from fedpriv.learning.training._caches import Body
from fedpriv.learning.training._coordinates import _centre_of, shifted
from fedpriv.learning.training.local_update import planned_event
from fedpriv.learning.training.stacked import local_update, stacked_updates
from fedpriv.privacy.accounting.events import SubsampledGaussian
from tests.learning.training import test_trained_parts as parts
from tests.learning.training.test_trained_parts import has_variance, made

SPEC = dataclasses.replace(parts.SPEC, trains="head", bias_scale=pooling.BIAS_SCALE, centred=True)
CLIP_NORM, RATE = SPEC.clip_norm, SPEC.learning_rate
make_task = partial(parts.make_task, spec=SPEC)


@pytest.fixture
def model(tiny_bert):
    return made(tiny_bert, "lora")


@pytest.fixture
def names(model):
    """Of the head's weight and bias in the adapter."""
    return sorted(model.head_tensors, key=lambda name: name.endswith("bias"))


def with_mean(adapter, weight, mean):
    rows = adapter[weight]
    return {**adapter, weight: rows - rows.mean(dim=0) + mean}


def by_hand(model, names, task, mean):
    """Weight and bias after a step, spelled out: features from the model, softmax, clipping record by record."""
    weight, bias = (task.adapter[name].double() for name in names)
    total_of_weight, total_of_bias, num_clipped = torch.zeros_like(weight), torch.zeros_like(bias), 0
    scale, fixed = pooling.BIAS_SCALE, {n: t for n, t in task.adapter.items() if n not in model.head_tensors}
    body = Body(fixed, task.merged)
    for records, index in task.data.items():
        feature = model.features.features([(records, torch.tensor([index]))], body, keep=False)[0]
        error = torch.softmax(weight @ feature.double() + bias, dim=0)
        error[records.labels[index]] -= 1
        centred = feature.double() - mean.double()
        norm = float(error.norm() * torch.cat([centred, torch.tensor([scale])]).norm())
        num_clipped += norm > CLIP_NORM
        factor = min(1.0, CLIP_NORM / norm)
        total_of_weight += factor * torch.outer(error, centred)
        total_of_bias += factor * scale * error
    step = RATE / task.sampler.expected_batch_size
    moved = weight - step * total_of_weight
    # In centred coordinates the bias is b + W mu, before and after.
    return moved, bias + weight @ mean.double() - step * scale * total_of_bias - moved @ mean.double(), num_clipped


@pytest.mark.parametrize("length", [0.0, 0.3, 5.0])
def test_a_step_is_that_of_centred_features_record_by_record(model, names, make_records, length):
    mean = torch.linspace(-1, 1, model.layers[model.head].module.in_features)
    mean *= length / mean.norm()
    task = make_task(model, make_records(20), adapter=with_mean(read(model.peft_model), names[0], mean))
    weight, bias, num_clipped = by_hand(model, names, task, mean)
    assert num_clipped, "nothing was clipped, so the test would prove little"
    found = local_update(model, task).adapter
    for name, expected in zip(names, (weight, bias), strict=True):
        torch.testing.assert_close(found[name].double(), expected, atol=3e-6, rtol=0)
        assert not torch.equal(found[name], task.adapter[name])
    for name in task.adapter.keys() - set(names):
        assert torch.equal(found[name], task.adapter[name])


def test_each_stacked_client_has_a_centre_of_its_own(model, names, make_records):
    adapters = [with_mean(read(model.peft_model), names[0], mean) for mean in (0.0, 0.5, -2.0)]
    tasks = [make_task(model, make_records(20), adapter=adapter) for adapter in adapters]
    for task, update in zip(tasks, stacked_updates(model, tasks), strict=True):
        for name, tensor in local_update(model, task).adapter.items():
            torch.testing.assert_close(update.adapter[name], tensor, atol=1e-6, rtol=0)


NUM_UPDATES = 400  # as many as a wrong scale of 2/3 or 3/2 needs to be refused in every value


def test_noise_reaches_every_centred_value_at_its_scale(model, names, make_records):
    q, size, z = 0.5, 30, 1.7
    adapter = with_mean(read(model.peft_model), names[0], 0.3)
    mean, none = adapter[names[0]].double().mean(dim=0), make_records(0)
    changes = {"noise_multiplier": z, "sampling_probability": q}
    tasks = [
        make_task(model, none, adapter=adapter, num_registered=size, seed=s, **changes) for s in range(NUM_UPDATES)
    ]
    updates = stacked_updates(model, tasks)
    assert updates[0].event == SubsampledGaussian(noise_multiplier=z, sampling_probability=q)
    weight, bias = (torch.stack([u.adapter[n].double() - adapter[n].double() for u in updates]) for n in names)
    stddev = RATE * z * CLIP_NORM / (q * size)
    centred_bias = (bias + weight @ mean) / pooling.BIAS_SCALE
    for steps, expected in ((weight.flatten(1), stddev), (centred_bias, stddev)):
        assert has_variance(steps, expected**2).all()
        for wrong in (2 / 3, 3 / 2):
            assert not has_variance(wrong * steps, expected**2).any(), "the test could not see a wrong scale"


def test_a_record_moves_the_centred_head_by_no_more_than_the_clip_norm(model, names, make_records):
    adapter = with_mean(read(model.peft_model), names[0], torch.tensor(50.0))
    found = local_update(model, make_task(model, make_records(1), adapter=adapter)).adapter
    mean = adapter[names[0]].double().mean(dim=0)
    weight, bias = (found[name].double() - adapter[name].double() for name in names)
    steps = torch.cat([weight.flatten(), (bias + weight @ mean) / pooling.BIAS_SCALE])
    assert float(steps.norm()) == pytest.approx(RATE * CLIP_NORM, rel=2e-2)


def test_only_steps_of_a_head_that_is_read_alone_and_has_a_bias_are_centred(model, make_records):
    without_bias = {"score.weight": torch.ones(3, 4)}
    assert not _centre_of(without_bias).any()
    assert shifted(without_bias, torch.ones(4)) == without_bias
    for changes, shown in (({"trains": "all"}, "all"), ({"objective": "class-sums"}, "head and class-sums")):
        with pytest.raises(ValueError, match=f"centred = true: needs trains = head .* not {shown}"):
            planned_event(dataclasses.replace(SPEC, **changes), 1.0, read(model.peft_model))
    model.features = None
    with pytest.raises(ValueError, match="centred = true: needs a classifier whose head is one linear layer"):
        local_update(model, make_task(model, make_records(8)))

"""A local update is Algorithm 1: the event states how it sampled, every tensor is noised, batching changes nothing."""

import dataclasses

import pytest
import torch

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import read
from fedpriv.learning.training._passes import predictions
from fedpriv.learning.training.local_update import ClientUpdate, UpdateSpec, UpdateTask, planned_event
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.stacked import execute_one_by_one, local_update
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource

SPEC = UpdateSpec.of(RunConfig(local_steps=3, batch_size=8, learning_rate=0.5, clip_norm=0.7, noise_multiplier=0.0))


def make_task(model, records, *, num_registered=40, seed=0, adapter=None, **changes):
    inclusion, spec = SeededSource(seed, "inclusion"), dataclasses.replace(SPEC, **changes)
    return UpdateTask(
        adapter=adapter or read(model.peft_model),
        data=records,
        spec=spec,
        round=1,
        sampler=PoissonSampler(num_registered=num_registered, expected_batch_size=8, source=inclusion),
        noise=SeededSource(seed, "noise"),
    )


@pytest.fixture
def model(encoder):
    return TrainingModel(encoder(layers="last-1"), memory_limit=2**30)


def by_hand(peft_model, task, model):
    """Algorithm 1 with one plain backward pass per record, SGD, and no noise."""
    parameters = {model.adapter_names[n]: p for n, p in peft_model.named_parameters() if p.requires_grad}
    source = SeededSource(0, "inclusion")
    for _ in range(task.spec.local_steps):
        indices = source.bernoulli(len(task.data), 8 / 40).nonzero().squeeze(1).tolist()
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for index in indices:
            peft_model.zero_grad()
            logits, batch = model.logits(task.data.items([index]), cached=False)
            predictions(logits, batch).losses.sum().backward()
            length = torch.sqrt(sum(p.grad.square().sum() for p in parameters.values()))
            for name, parameter in parameters.items():
                total[name] += parameter.grad * min(1.0, task.spec.clip_norm / float(length))
        peft_model.zero_grad()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= task.spec.learning_rate * total[name] / task.spec.batch_size
    return read(peft_model)


def test_update_without_noise_equals_algorithm_1_by_hand(model, make_records):
    task = make_task(model, make_records(40))
    expected = by_hand(model.peft_model, task, model)
    update = local_update(model, task)
    assert not any(module.training for module in model.peft_model.modules())
    for name, tensor in expected.items():
        assert not torch.equal(tensor, task.adapter[name]), f"{name} did not move, so the test would prove nothing"
        torch.testing.assert_close(update.adapter[name], tensor, atol=2e-6, rtol=1e-4)


def test_the_event_states_the_probability_that_the_sampler_drew_with(model, make_records):
    task = make_task(model, make_records(40), num_registered=50, noise_multiplier=1.5)
    update = local_update(model, task)
    expected = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=8 / 50, count=3)
    assert update.event == planned_event(task.spec, 8 / 50, update.adapter) == expected
    assert update.num_records == 50


def test_noise_comes_from_the_given_source_alone(model, make_records):
    start, found = read(model.peft_model), []
    for seed, noise in ((1, SeededSource(0, "noise")), (2, SeededSource(0, "noise")), (2, SecureSource())):
        torch.manual_seed(seed)
        task = make_task(model, make_records(40), noise_multiplier=1.0, adapter=start)
        found.append(local_update(model, dataclasses.replace(task, noise=noise)).adapter)
    one, two, secure = found
    for name in one:
        assert torch.equal(one[name], two[name])
        assert not torch.equal(one[name], secure[name])


def test_adamw_keeps_no_state_from_earlier_rounds(model, make_records):
    changes = {"optimizer": "adamw", "learning_rate": 0.01, "adapter": read(model.peft_model)}
    first, second = (local_update(model, make_task(model, make_records(40), **changes)).adapter for _ in range(2))
    for name in first:
        assert not torch.equal(first[name], changes["adapter"][name])
        assert torch.equal(first[name], second[name])


def test_a_failing_task_yields_its_exception_and_the_others_go_on(model, make_records):
    good, bad = make_task(model, make_records(40)), make_task(model, make_records(40), optimizer="lion")
    results = execute_one_by_one(model, [bad, good])
    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], ClientUpdate)

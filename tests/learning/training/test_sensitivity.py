"""A local update is Algorithm 1: its event states how it sampled, every tensor is noised, batching changes nothing.

Each rule's sensitivity is measured in the real update: neighbouring batches reach the bound and never exceed it.
"""

import dataclasses
import math

import pytest
import torch

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import lora, read
from fedpriv.learning.training import stacked as module
from fedpriv.learning.training.local_update import ClientUpdate, UpdateSpec, UpdateTask, planned_event
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.stacked import execute_one_by_one, local_update
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.sensitivity import CLIPPING_RULES, UPLOAD_FACTOR, clipping_parts, sensitivity_factor
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource

SPEC = UpdateSpec.of(RunConfig(local_steps=3, batch_size=8, learning_rate=0.5, clip_norm=0.7, noise_multiplier=0.0))


def make_task(model, records, *, spec=SPEC, adapter=None, num_registered=40, seed=0, sampler=None, **changes):
    """Of the model's adapter or another; it samples as the specification says unless a sampler is given."""
    spec = dataclasses.replace(spec, **changes)
    return UpdateTask(
        adapter=adapter or read(model.peft_model),
        data=records,
        spec=spec,
        round=1,
        sampler=sampler or spec.sampler(num_registered or len(records), SeededSource(seed, "inclusion")),
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
            model.predictions(task.data.items([index]), cached=False).losses.sum().backward()
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


# ---------------------------------------------------------------- the sensitivity of each rule

CLIP_NORM, BATCH = SPEC.clip_norm, 4
ONE_STEP = dataclasses.replace(SPEC, num_rounds=1, local_steps=1, batch_size=BATCH, learning_rate=1.0)


class Everyone(PoissonSampler):
    """Draws every record."""

    def draw(self, num_records):
        return list(range(num_records))


def updated(model, records, spec, sampler=None):
    """The tensors before, and the update; of every record unless sampled, so that two runs differ in one of them."""
    start = read(model.peft_model)
    sampler = sampler or Everyone(num_registered=BATCH, expected_batch_size=BATCH, source=SeededSource(0))
    update = local_update(model, make_task(model, records, spec=spec, sampler=sampler))
    lora.write_parameters(model.parameters, start)
    return start, update


def poisson():
    return PoissonSampler(num_registered=40, expected_batch_size=BATCH, source=SeededSource(0))


def rows_of(clients, gradients):
    """The gradients in the layout of the update, all of the only client in the stack."""
    rows = clients.layout.flatten(gradients)
    return rows, torch.zeros(len(rows), dtype=torch.int64)


def released(model, records, rule, gradients, monkeypatch):
    """The sum that a step would add noise to, for records with the given per-sample gradients."""
    monkeypatch.setattr(module, "_gradient_rows", lambda clients, *_: iter([rows_of(clients, gradients)]))
    start, update = updated(model, records, dataclasses.replace(ONE_STEP, clipping=rule))
    step = 1 if rule == "batch" else BATCH
    return {name: (start[name].double() - update.adapter[name].double()) * step for name in start}


def distance(one, other):
    """L2 distance over all tensors."""
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def batch_of(model, rows):
    """Gradients of a batch, from one number per record, which all its coordinates take."""
    return {name: torch.stack([torch.full(p.shape, row) for row in rows]) for name, p in model.parameters.items()}


@pytest.mark.parametrize("rule", CLIPPING_RULES)
def test_neighbours_reach_the_bound_and_never_exceed_it(model, make_records, monkeypatch, rule):
    bound = sensitivity_factor(rule, len(clipping_parts(rule, model.parameters))) * CLIP_NORM
    # The removed record is huge: under `batch` it outweighs the small records of opposite sign.
    worst = batch_of(model, [1e4, -1.0, -1.0])
    for gradients in (worst, *(random_batch(model, seed) for seed in range(3))):
        num = len(next(iter(gradients.values())))
        rest = {name: rows[1:] for name, rows in gradients.items()}
        with_it = released(model, make_records(num), rule, gradients, monkeypatch)
        moved = distance(with_it, released(model, make_records(num - 1), rule, rest, monkeypatch))
        assert moved <= bound * (1 + 1e-6)
        assert gradients is not worst or moved >= 0.99 * bound


def random_batch(model, seed):
    """Gradients of a batch of any size."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** float(torch.randint(-3, 4, (1,), generator=generator))
    return {n: scale * torch.randn(4, *p.shape, generator=generator) for n, p in model.parameters.items()}


@pytest.mark.parametrize("rule", CLIPPING_RULES)
def test_the_event_states_the_effective_noise_multiplier(model, make_records, rule):
    spec = dataclasses.replace(ONE_STEP, clipping=rule, noise_multiplier=2.0, local_steps=2)
    _, update = updated(model, make_records(40), spec, poisson())
    factor = sensitivity_factor(rule, len(clipping_parts(rule, model.parameters)))
    assert update.event.noise_multiplier == pytest.approx(2.0 / factor)
    assert update.event == planned_event(spec, 0.1, update.adapter)


def test_the_batch_rule_does_not_divide_its_noise_by_the_batch_size(model, make_records):
    scales = {}
    for rule in ("joint", "batch"):
        spec = dataclasses.replace(ONE_STEP, clipping=rule, noise_multiplier=1.0)
        start, update = updated(model, make_records(0), spec, poisson())
        scales[rule] = torch.cat([(update.adapter[name] - start[name]).flatten() for name in start])
    # The rules order the parts, and so the same noise values, differently.
    batch, joint = scales["batch"].sort().values, scales["joint"].sort().values
    torch.testing.assert_close(batch, BATCH * joint, atol=1e-6, rtol=1e-4)


UPLOAD = dataclasses.replace(ONE_STEP, noise_on="upload", local_steps=2, learning_rate=50.0)


def uploaded(model, records, rows, monkeypatch, **changes):
    """A client's update with noise on the upload, for records with the given per-sample gradients, and its event."""
    gradients = batch_of(model, rows) if rows else None
    monkeypatch.setattr(
        module, "_gradient_rows", lambda clients, *_: iter([rows_of(clients, gradients)] if gradients else [])
    )
    start, update = updated(model, records, dataclasses.replace(UPLOAD, **changes))
    return {name: update.adapter[name].double() - start[name].double() for name in start}, update.event


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_replacing_a_record_moves_an_upload_by_twice_s_at_most(model, make_records, monkeypatch, optimizer):
    def moved(rows, others):
        one, other = (
            uploaded(model, make_records(len(each)), each, monkeypatch, optimizer=optimizer)[0]
            for each in (rows, others)
        )
        return distance(one, other)

    bound = UPLOAD_FACTOR * CLIP_NORM
    assert 0.99 * bound <= moved([1.0, -1.1], [1.0, 0.9]) <= bound * (1 + 1e-5)
    for seed in range(3):
        rows = 10.0 ** torch.empty(6).uniform_(-6, 6, generator=torch.Generator().manual_seed(seed))
        assert moved(rows[:3].tolist(), (-rows[3:]).tolist()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("rows", [[], [math.nan], [math.inf, 1.0], [3e38, 3e38]], ids=str)
def test_an_empty_or_non_finite_update_stays_bounded(model, make_records, monkeypatch, rows):
    update, _ = uploaded(model, make_records(len(rows)), rows, monkeypatch)
    length = math.sqrt(sum(float(tensor.square().sum()) for tensor in update.values()))
    assert length <= CLIP_NORM * (1 + 1e-5)


def test_noise_on_the_upload_has_the_stated_scale_and_event(model, make_records, monkeypatch):
    update, event = uploaded(model, make_records(0), [], monkeypatch, noise_multiplier=3.0)
    values = torch.cat([tensor.flatten() for tensor in update.values()])
    assert float(values.std()) == pytest.approx(3.0 * CLIP_NORM, rel=5 / math.sqrt(2 * len(values)))
    assert event == SubsampledGaussian(noise_multiplier=1.5, sampling_probability=1.0, unit="client")
    spec = dataclasses.replace(UPLOAD, noise_multiplier=3.0)
    assert event == planned_event(spec, 0.1, model.parameters)

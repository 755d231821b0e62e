"""Each rule's sensitivity, found through the real update: neighbouring batches reach the bound and never pass it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.accounting.sensitivity import CLIPPING_RULES, UPLOAD_FACTOR, clipping_parts, sensitivity_factor
from fedpriv.adapters import lora, read
from fedpriv.config import RunConfig
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training import stacked as module
from fedpriv.training.local_update import UpdateSpec, UpdateTask, planned_event
from fedpriv.training.model import TrainingModel
from fedpriv.training.sampling import PoissonSampler
from fedpriv.training.stacked import local_update

CLIP_NORM, BATCH = 0.8, 4
SPEC = UpdateSpec.of(
    RunConfig(rounds=1, local_steps=1, batch_size=BATCH, learning_rate=1.0, clip_norm=CLIP_NORM, noise_multiplier=0.0)
)


@pytest.fixture
def model(encoder):
    return TrainingModel(encoder(layers="last-1"), memory_limit=2**30)


class Everyone(PoissonSampler):
    """Draws every record, so that two runs differ in one record alone."""

    def draw(self, num_records):
        return list(range(num_records))


def rows_of(clients, gradients):
    """The gradients as the update has them, all of the stack's only client."""
    rows = clients.layout.flatten(gradients)
    return rows, torch.zeros(len(rows), dtype=torch.int64)


def released(model, records, rule, gradients, monkeypatch):
    """What a step would add noise to, for records whose per-sample gradients are as given."""
    monkeypatch.setattr(module, "_gradient_rows", lambda clients, *_: iter([rows_of(clients, gradients)]))
    spec = dataclasses.replace(SPEC, clipping=rule)
    sampler = Everyone(num_registered=BATCH, expected_batch_size=BATCH, source=SeededSource(0))
    start = read(model.peft_model)
    task = UpdateTask(adapter=start, data=records, spec=spec, round=1, sampler=sampler, noise=SeededSource(1))
    update = local_update(model, task)
    lora.write_parameters(model.parameters, start)
    step = 1 if rule == "batch" else BATCH
    return {name: (start[name].double() - update.adapter[name].double()) * step for name in start}


def gap(one, other):
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def batch_of(model, rows):
    """Gradients of a batch from one scale a record: all coordinates alike, with that sign and size."""
    return {name: torch.stack([torch.full(p.shape, row) for row in rows]) for name, p in model.parameters.items()}


@pytest.mark.parametrize("rule", CLIPPING_RULES)
def test_worst_case_neighbours_reach_the_bound_and_never_pass_it(model, make_records, monkeypatch, rule):
    parts = clipping_parts(rule, model.parameters)
    bound = sensitivity_factor(rule, len(parts)) * CLIP_NORM
    # The removed record is huge; under `batch` it outweighs small records of the other sign.
    rows = [1e4, -1.0, -1.0]
    with_it = released(model, make_records(3), rule, batch_of(model, rows), monkeypatch)
    without = released(model, make_records(2), rule, batch_of(model, rows[1:]), monkeypatch)
    assert 0.99 * bound <= gap(with_it, without) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("rule", CLIPPING_RULES)
@pytest.mark.parametrize("seed", range(4))
def test_random_neighbours_stay_within_the_bound(model, make_records, monkeypatch, rule, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** float(torch.randint(-3, 4, (1,), generator=generator))
    rows = {n: scale * torch.randn(4, *p.shape, generator=generator) for n, p in model.parameters.items()}
    bound = sensitivity_factor(rule, len(clipping_parts(rule, model.parameters))) * CLIP_NORM
    with_it = released(model, make_records(4), rule, rows, monkeypatch)
    without = released(model, make_records(3), rule, {n: g[:3] for n, g in rows.items()}, monkeypatch)
    assert gap(with_it, without) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("rule", CLIPPING_RULES)
def test_event_carries_the_effective_noise_multiplier(model, make_records, rule):
    spec = dataclasses.replace(SPEC, clipping=rule, noise_multiplier=2.0, local_steps=2)
    sampler = PoissonSampler(num_registered=40, expected_batch_size=BATCH, source=SeededSource(0))
    task = UpdateTask(
        adapter=read(model.peft_model),
        data=make_records(40),
        spec=spec,
        round=1,
        sampler=sampler,
        noise=SeededSource(1),
    )
    update = local_update(model, task)
    factor = sensitivity_factor(rule, len(clipping_parts(rule, model.parameters)))
    assert update.event.noise_multiplier == pytest.approx(2.0 / factor)
    assert update.event == planned_event(spec, 0.1, update.adapter)


def test_batch_rule_adds_noise_that_is_not_divided_by_the_batch_size(model, make_records):
    start = read(model.peft_model)
    scales = {}
    for rule in ("joint", "batch"):
        spec = dataclasses.replace(SPEC, clipping=rule, noise_multiplier=1.0)
        sampler = PoissonSampler(num_registered=40, expected_batch_size=BATCH, source=SeededSource(0))
        task = UpdateTask(
            adapter=start, data=make_records(0), spec=spec, round=1, sampler=sampler, noise=SeededSource(1)
        )
        adapter = local_update(model, task).adapter
        scales[rule] = torch.cat([(adapter[name] - start[name]).flatten() for name in start])
    # The rules' parts lie in another order, and so do the same noise values.
    batch, joint = scales["batch"].sort().values, scales["joint"].sort().values
    torch.testing.assert_close(batch, BATCH * joint, atol=1e-6, rtol=1e-4)


UPLOAD = dataclasses.replace(SPEC, noise_on="upload", local_steps=2, learning_rate=50.0)


def sent(model, records, rows, monkeypatch, **changes):
    """The update of a client with noise on the upload, for records whose per-sample gradients are as given."""
    gradients = batch_of(model, rows) if rows else None
    monkeypatch.setattr(
        module, "_gradient_rows", lambda clients, *_: iter([rows_of(clients, gradients)] if gradients else [])
    )
    sampler = Everyone(num_registered=BATCH, expected_batch_size=BATCH, source=SeededSource(0))
    start = read(model.peft_model)
    task = UpdateTask(
        adapter=start,
        data=records,
        spec=dataclasses.replace(UPLOAD, **changes),
        round=1,
        sampler=sampler,
        noise=SeededSource(1),
    )
    update = local_update(model, task)
    lora.write_parameters(model.parameters, start)
    return {name: update.adapter[name].double() - start[name].double() for name in start}, update.event


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_replacing_a_clients_data_or_one_record_reaches_twice_s_and_never_passes_it(
    model, make_records, monkeypatch, optimizer
):
    bound = UPLOAD_FACTOR * CLIP_NORM
    one, _ = sent(model, make_records(2), [1.0, -1.1], monkeypatch, optimizer=optimizer)
    other, _ = sent(model, make_records(2), [1.0, 0.9], monkeypatch, optimizer=optimizer)  # one record is replaced
    assert 0.99 * bound <= gap(one, other) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_no_pair_of_uploads_lies_further_apart(model, make_records, monkeypatch, seed):
    rows = (10.0 ** torch.empty(6).uniform_(-6, 6, generator=torch.Generator().manual_seed(seed))).tolist()
    one, _ = sent(model, make_records(3), rows[:3], monkeypatch)
    other, _ = sent(model, make_records(3), [-row for row in rows[3:]], monkeypatch)
    assert gap(one, other) <= UPLOAD_FACTOR * CLIP_NORM * (1 + 1e-5)


@pytest.mark.parametrize("rows", [[], [math.nan], [math.inf, 1.0], [3e38, 3e38]], ids=str)
def test_an_update_that_is_empty_or_not_finite_stays_bounded(model, make_records, monkeypatch, rows):
    update, _ = sent(model, make_records(len(rows)), rows, monkeypatch)
    length = math.sqrt(sum(float(tensor.square().sum()) for tensor in update.values()))
    assert length <= CLIP_NORM * (1 + 1e-5)


def test_noise_on_the_upload_has_the_claimed_scale_and_event(model, make_records, monkeypatch):
    update, event = sent(model, make_records(0), [], monkeypatch, noise_multiplier=3.0)
    values = torch.cat([tensor.flatten() for tensor in update.values()])
    assert float(values.std()) == pytest.approx(3.0 * CLIP_NORM, rel=5 / math.sqrt(2 * len(values)))
    assert event == SubsampledGaussian(noise_multiplier=1.5, sampling_probability=1.0, unit="client")
    spec = dataclasses.replace(UPLOAD, noise_multiplier=3.0)
    assert event == planned_event(spec, 0.1, model.parameters)

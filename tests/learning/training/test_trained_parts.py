"""An update of some of the tensors, of scaled ones, or of class sums, is what loops over single records make of it."""

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from scipy.stats import chi2

from fedpriv.learning.adapters import INNER_SUFFIX, LoraSettings, attach, leading_block, load_base, pooling, read, write
from fedpriv.learning.training import stacked
from fedpriv.learning.training._coordinates import _value_factors
from fedpriv.learning.training._passes import class_sum_losses
from fedpriv.learning.training.local_update import OBJECTIVES, TRAINED_PARTS, planned_event
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.stacked import local_update, stacked_updates
from fedpriv.privacy.accounting.events import SubsampledGaussian
from tests.learning.training import test_sensitivity as local
from tests.marks import slow
from tests.tiny import move

SPEC = dataclasses.replace(local.SPEC, local_steps=1, clip_norm=0.4, sampling_probability=1.0)
make_task = partial(local.make_task, spec=SPEC, num_registered=None)
SCALED = {"bias_scale": pooling.BIAS_SCALE}


def made(tiny_bert, trains):
    base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3, normalize=True)
    settings = LoraSettings(rank=4, layers="last-1", trains=trains)
    return TrainingModel(move(attach(base, settings)), memory_limit=2**30)


@pytest.fixture(scope="module")
def model(tiny_bert):
    """A tiny BERT with unit features, its head and LoRA away from their start."""
    return made(tiny_bert, "lora")


@pytest.fixture
def inner(tiny_bert):
    """The same with R between frozen factors."""
    return made(tiny_bert, "lora-r")


def is_trained(name, trains):
    """Spelled out, apart from the code under test."""
    kind = "A" if "lora_A" in name else "B" if "lora_B" in name else "head"
    return kind in {"all": "A B head", "head": "head", "lora-a": "A head", "lora-b": "B head"}[trains].split()


def scale_of(name, tensor, spec):
    return spec.bias_scale if "lora" not in name and tensor.dim() == 1 else 1.0


def scaled_gradient(model, item, spec):
    """One record's gradient by plain autograd, in the coordinates that are clipped."""
    parameters = {model.adapter_names[n]: p for n, p in model.peft_model.named_parameters() if p.requires_grad}
    model.peft_model.zero_grad()
    logits, batch = model.logits([item], cached=False)
    if spec.objective == "class-sums":
        (-logits[0, batch["labels"][0]]).backward()
    else:
        (logits.logsumexp(dim=1) - logits[0, batch["labels"][0]]).sum().backward()
    return {
        name: scale_of(name, p, spec) * (p.grad if p.grad is not None else torch.zeros_like(p)).double()
        for name, p in parameters.items()
        if is_trained(name, spec.trains)
    }


def length(tensors):
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def by_hand(model, task):
    """The adapter after one step on all records, clipped jointly, without noise."""
    spec, total, num_clipped = task.spec, {}, 0
    for item in task.data.items():
        gradient = scaled_gradient(model, item, spec)
        num_clipped += length(gradient) > spec.clip_norm
        for name, g in gradient.items():
            total[name] = total.get(name, 0.0) + g * min(1.0, spec.clip_norm / length(gradient))
    size = task.sampler.expected_batch_size
    steps = {n: scale_of(n, g, spec) * spec.learning_rate * g / size for n, g in total.items()}
    return {n: t - steps[n].float() if n in steps else t for n, t in task.adapter.items()}, num_clipped


CASES = [("inner", "all", "loss"), *(("model", *each) for each in itertools.product(TRAINED_PARTS, OBJECTIVES))]


@pytest.mark.parametrize("scales", [SCALED, *slow({})])
@pytest.mark.parametrize(("kind", "trains", "objective"), CASES)
def test_an_update_equals_a_loop_over_single_records(request, make_records, kind, trains, objective, scales):
    model, clip_norm = request.getfixturevalue(kind), 0.4 if objective == "loss" else 1.2
    task = make_task(model, make_records(20), trains=trains, objective=objective, clip_norm=clip_norm, **scales)
    expected, num_clipped = by_hand(model, task)
    assert num_clipped or objective == "class-sums"
    found = local_update(model, task).adapter
    assert list(found) == list(task.adapter)
    assert kind == "model" or {tensor.shape for name, tensor in found.items() if "lora" in name} == {(4, 4)}
    for name, tensor in expected.items():
        if is_trained(name, trains):
            assert not torch.equal(tensor, task.adapter[name]), f"{name} did not move, so the test would prove nothing"
            torch.testing.assert_close(found[name] - task.adapter[name], tensor - task.adapter[name], atol=2e-6, rtol=0)
        else:
            assert torch.equal(found[name], task.adapter[name])


@pytest.mark.parametrize("rank", [2, *slow(1, 3)])
def test_an_update_of_the_leading_block_of_r_is_that_of_a_model_whose_r_is_zero_elsewhere(inner, make_records, rank):
    task = make_task(inner, make_records(20), noise_multiplier=0.0, learning_rate=1000.0)
    task = dataclasses.replace(task, adapter=leading_block(task.adapter, rank))
    write(inner.peft_model, task.adapter)  # what the loop over single records differentiates
    of_all = scaled_gradient(inner, task.data.items()[0], task.spec)
    total, size = {}, task.sampler.expected_batch_size
    for item in task.data.items():
        gradient = leading_block(scaled_gradient(inner, item, task.spec), rank)
        for name, g in gradient.items():
            total[name] = total.get(name, 0.0) + g * min(1.0, task.spec.clip_norm / length(gradient))
    found = local_update(inner, task)
    sizes = {name: tensor.numel() for name, tensor in found.adapter.items() if "lora" in name}
    assert set(sizes.values()) == {rank**2}
    assert {of_all[name].shape for name in sizes} == {(4, 4)}
    for name, tensor in found.adapter.items():
        expected = -task.spec.learning_rate * total[name].float() / size
        most = float(expected.abs().max())
        assert most > 1e-4, f"{name} did not move, so the test would prove nothing"
        torch.testing.assert_close(tensor - task.adapter[name], expected, atol=2e-3 * most, rtol=0)


def test_noise_reaches_every_value_of_the_block_and_its_event_is_the_block_s(inner, make_records):
    task = make_task(inner, make_records(20), noise_multiplier=1.0, mechanism="discrete-gaussian")
    wide, narrow = (dataclasses.replace(task, adapter=leading_block(task.adapter, rank)) for rank in (4, 2))
    found = local_update(inner, narrow)
    moved = [found.adapter[name] != narrow.adapter[name] for name in narrow.adapter]
    assert all(bool(each.all()) for each in moved)
    for each in (wide, narrow):
        planned = planned_event(each.spec, each.sampler.sampling_probability, each.adapter)
        assert local_update(inner, each).event == planned


@pytest.mark.parametrize("shape", [(5, 5), (2, 3), (0, 0)])
def test_an_r_that_is_no_leading_block_is_refused(inner, make_records, shape):
    task = make_task(inner, make_records(4))
    adapter = {n: torch.zeros(shape) if n.endswith(INNER_SUFFIX) else t for n, t in task.adapter.items()}
    with pytest.raises(ValueError, match="has shape"):
        local_update(inner, dataclasses.replace(task, adapter=adapter))


def test_no_class_sum_is_longer_than_one_before_any_clipping(model, make_records):
    changes = {"trains": "head", "objective": "class-sums", "bias_scale": pooling.BIAS_SCALE}
    task = make_task(model, make_records(40), **changes)
    clients = stacked._Clients.of(model, [task])
    drawn = stacked._Drawn.of_records([list(range(len(task.data)))])
    batches = stacked._gradient_rows(clients, clients.broadcast, drawn)
    rows = [batch[: len(owners)] for batch, owners in batches]
    norms = torch.cat(rows).double().norm(dim=1)
    assert len(norms) == 40
    torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-6, rtol=0)


def test_a_step_of_class_sums_from_zero_is_each_classs_mean_state(model, make_records):
    changes = {"objective": "class-sums", "learning_rate": 1.0, "clip_norm": 1.0, "trains": "head"}
    task = make_task(model, make_records(20), bias_scale=pooling.BIAS_SCALE, **changes)
    at_zero = {n: t if "lora" in n else torch.zeros_like(t) for n, t in task.adapter.items()}
    task, states = dataclasses.replace(task, adapter=at_zero), []
    head = model.peft_model.base_model.model.classifier.modules_to_save["default"]
    handle = head.register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    for item in task.data.items():
        model.logits([item], cached=False)
    handle.remove()
    one_hot = torch.nn.functional.one_hot(task.data.labels, 3).float()
    found = {name: tensor for name, tensor in local_update(model, task).adapter.items() if "lora" not in name}
    weight, bias = (next(t for t in found.values() if t.dim() == dim) for dim in (2, 1))
    torch.testing.assert_close(weight, one_hot.T @ torch.stack(states) / 20, atol=1e-6, rtol=0)
    torch.testing.assert_close(bias, one_hot.mean(dim=0) * pooling.BIAS_SCALE**2, atol=1e-6, rtol=0)


# A false alarm in all values together at most once in a million runs.
NUM_UPDATES, FALSE_ALARM = 400, 1e-6


def has_variance(samples, variance):
    """Bool [values]: whether each value's variance over the updates may be this one."""
    statistic = samples.double().square().sum(dim=0) / variance
    num, probability = len(samples), FALSE_ALARM / samples.shape[1] / 2
    low, high = chi2.ppf(probability, num), chi2.isf(probability, num)
    return (low <= statistic) & (statistic <= high)


@pytest.mark.parametrize(("kind", "trains"), [("model", "head"), ("model", "all"), ("inner", "all")])
def test_noise_reaches_every_trained_value_at_its_scale_and_no_other_value(request, make_records, kind, trains):
    """Of losses; of class sums where the head alone is trained, whose losses test_centred.py has."""
    model, q, size, z = request.getfixturevalue(kind), 0.5, 30, 1.7
    objective = "class-sums" if trains == "head" else "loss"
    frozen = {n: p.clone() for n, p in model.peft_model.named_parameters() if not p.requires_grad}
    changes = {"trains": trains, "objective": objective, "learning_rate": 0.8, "noise_multiplier": z, **SCALED}
    changes["sampling_probability"] = q
    none = make_records(0)
    tasks = [make_task(model, none, num_registered=size, seed=s, **changes) for s in range(NUM_UPDATES)]
    updates = stacked_updates(model, tasks)
    assert updates[0].event == SubsampledGaussian(noise_multiplier=z, sampling_probability=q)
    for name, start in tasks[0].adapter.items():
        steps = torch.stack([(update.adapter[name] - start).flatten() for update in updates])
        if not is_trained(name, trains):
            assert not steps.any()
            continue
        stddev = 0.8 * z * SPEC.clip_norm / (q * size) * scale_of(name, start, tasks[0].spec)
        assert has_variance(steps, stddev**2).all(), name
        for wrong in (2 / 3, 3 / 2):
            assert not has_variance(wrong * steps, stddev**2).any(), "the test could not see a wrong scale"
    noised = sum(tensor.numel() for name, tensor in tasks[0].adapter.items() if is_trained(name, trains))
    assert noised == {("inner", "all"): 2 * 4 * 4 + 3 * 64 + 3}.get((kind, trains), noised)
    after = dict(model.peft_model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())


def test_noise_on_the_upload_is_in_scaled_coordinates_too(model, make_records):
    changes = {"noise_on": "upload", "trains": "head", "clip_norm": 50.0, **SCALED}
    plain = make_task(model, make_records(20), **changes)
    by_step, _ = by_hand(model, make_task(model, plain.data, **{**changes, "noise_on": "gradients"}))
    for name, tensor in local_update(model, plain).adapter.items():
        torch.testing.assert_close(tensor, by_step[name], atol=2e-6, rtol=0)
    # Clipped to S in those coordinates.
    short = make_task(model, plain.data, **{**changes, "clip_norm": 1e-3})
    found = local_update(model, short).adapter
    updates = {n: (t - short.adapter[n]).double() / scale_of(n, t, short.spec) for n, t in found.items()}
    assert length(updates) == pytest.approx(1e-3, rel=1e-3)


LMO = '{"combination": "mixture", "uniform": {"weight": 1.0, "low": 1.0, "high": 3.0}}'


@pytest.mark.parametrize("trains", TRAINED_PARTS)
def test_the_planned_event_is_that_of_the_trained_tensors(model, make_records, trains):
    adapter = read(model.peft_model)
    trained = {name: tensor for name, tensor in adapter.items() if is_trained(name, trains)}
    changes = {"clipping": "per-tensor", "noise_multiplier": 2.0, "trains": trains}
    event = local_update(model, make_task(model, make_records(8), **changes)).event
    assert event.noise_multiplier == pytest.approx(2.0 / math.sqrt(len(trained)))
    lmo = {"mechanism": "lmo", "mechanism_parameters": LMO, "noise_multiplier": 1.0, "trains": trains}
    spec = dataclasses.replace(SPEC, **lmo)
    assert planned_event(spec, 0.1, adapter) == planned_event(dataclasses.replace(spec, trains="all"), 0.1, trained)
    task = make_task(model, make_records(8), **lmo)
    assert local_update(model, task).event == planned_event(task.spec, 1.0, adapter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trains": "lora"}, "trains = 'lora': must be one of all, head, lora-a, lora-b"),
        ({"objective": "sums"}, "objective = 'sums': must be one of loss, class-sums"),
        ({"bias_scale": 0.0}, "bias_scale = 0.0: must be finite and > 0"),
        ({"bias_scale": math.inf}, "bias_scale = inf"),
        ({"bias_scale": math.nan}, "bias_scale = nan"),
        ({"trains": "head", "optimizer": "adamw"}, "trains = head: needs optimizer = sgd"),
        ({"trains": "lora-b", "quantization": "ternary"}, "trains = lora-b: needs .* not sgd and ternary"),
    ],
)
def test_what_is_not_defined_is_refused_by_name_uncharged_and_uncomputed(model, make_records, changes, message):
    task = make_task(model, make_records(8), **changes)
    with pytest.raises(ValueError, match=message):
        planned_event(task.spec, 0.1, task.adapter)
    with pytest.raises(ValueError, match=message):
        local_update(model, task)


def test_class_sums_need_labels_and_a_head_needs_one(causal, make_records):
    model = TrainingModel(causal("gpt2", layers="last-1"), memory_limit=2**30)
    records = make_records(8, classes=0)
    with pytest.raises(ValueError, match="trains = head: the adapter has no such tensor"):
        local_update(model, make_task(model, records, trains="head"))
    with pytest.raises(ValueError, match="needs a classifier's labels"):
        class_sum_losses(torch.zeros(1, 3), {})


def test_factors_follow_the_kind_of_tensor():
    names = ("x.lora_A.weight", "x.lora_B.weight", "classifier.weight", "classifier.bias")
    shapes = {name: torch.Size([2]) if name.endswith("bias") else torch.Size([1, 3]) for name in names}
    assert _value_factors(shapes) is None
    assert _value_factors(shapes, bias=0.5, lora=2.0).tolist() == [2.0] * 6 + [1.0] * 3 + [0.5] * 2

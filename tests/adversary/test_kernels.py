"""A kernel rounds a row by how many there are, and a coordinator amplifies the last bit: no sum moves by more than C.

The kernels are stand-ins, so the attacks need no special processor: they flip the last bit of one value of each row
where a pass has several records, by their number. No trial of kernels need find that: real ones do it for few values.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import LoraSettings, attach, read
from fedpriv.learning.adapters._arithmetic import Adapter, Merged, Product
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import private_evaluation, stacked
from fedpriv.learning.training._caches import input_of
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.adversary.stand_ins import KERNELS, coupled_by
from tests.architectures import random_base

# A broadcast may hold no larger value by default. Factors of such values merge to weights of 2^26.
MOST = 8192.0

TOKENS, HIDDEN = 8, 64
REGISTERED, CLIP_NORM = 16, 0.5


def training_model(*, alone: bool) -> TrainingModel:
    base = random_base("bert", hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, num_labels=3)
    settings = LoraSettings(rank=4, alpha=4.0, target_modules=("dense", "value"))
    return TrainingModel(attach(base, settings), memory_limit=2**28, max_length=40, alone=alone)


def attack(model: TrainingModel, kernel: str, records: Records, side: float) -> tuple[Adapter, Merged]:
    """All values are alike and cancel in pairs, unless the last bit of the first one differs."""
    layer = model.peft_model.base_model.model.bert.encoder.layer[0]
    inner, outer = layer.intermediate.dense, layer.output.dense
    if kernel == "attention":
        inner, outer = layer.attention.self.value, layer.attention.output.dense
    with torch.no_grad(), input_of(inner) as captured:
        model.logits(records.items([0]), cached=False)
    state = captured[0][0, 2]
    coordinate = int(state.abs().argmax())
    scale = 3.0 / float(state[coordinate])  # where GELU is steep enough
    names = {module: name for name, module in model.peft_model.named_modules()}
    alike = torch.zeros(HIDDEN, HIDDEN)
    alike[:, coordinate] = scale
    signs = torch.ones(HIDDEN)
    signs[1::2] = -1
    direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0)).sign()
    merged = {
        names[inner]: Product(alike - inner.base_layer.weight.detach()),
        names[outer]: Product(MOST * direction[:, None], MOST * signs[None]),
    }
    adapter = {n: torch.zeros_like(t) for n, t in read(model.peft_model).items()}
    adapter = {n: torch.full_like(t, MOST) if "layer.0.output.dense.lora_B" in n else t for n, t in adapter.items()}
    # Unperturbed, the head sees a little of the one class; a last bit shows it the other one.
    model.merge(merged)
    with torch.no_grad(), input_of(model.layers[model.head].module) as seen:
        model.logits(records.items([0]), cached=False)
    model.merge({})
    pooled, unit = seen[0][0], direction / HIDDEN
    head = unit * side - pooled * (unit @ pooled * side - 0.02) / (pooled @ pooled)
    for n, t in adapter.items():
        if n.endswith("classifier.weight"):
            t[1], t[2] = MOST * head, -MOST * head
        if n.endswith("classifier.bias"):
            t[0] = -MOST
    return adapter, merged


def sums(model: TrainingModel, adapter: Adapter, merged: Merged, records: Records, num: int) -> Tensor:
    """[values] The exact sum of the first records' clipped gradients."""
    spec = UpdateSpec.of(
        RunConfig(local_steps=1, batch_size=REGISTERED, learning_rate=1.0, clip_norm=CLIP_NORM, noise_multiplier=0.0)
    )
    task = UpdateTask(
        adapter=adapter,
        data=records.part(range(num)),
        spec=replace(spec, trains="lora-a"),
        round=1,
        sampler=PoissonSampler(
            num_registered=REGISTERED, expected_batch_size=REGISTERED, source=SeededSource(0, "inclusion")
        ),
        noise=SeededSource(0, "noise"),
        merged=merged,
    )
    clients = stacked._Clients.of(model, [task])
    model.merge(merged)
    return stacked._private_gradients(clients, clients.broadcast)[0][0]


def most_moved(kernel: str, *, alone: bool) -> float:
    """The most that a record moves the sum, over C."""
    with coupled_by(kernel) as stand_in:
        model = training_model(alone=alone)
        one = torch.randint(5, 60, (TOKENS,), generator=torch.Generator().manual_seed(1))
        records = Records({"input_ids": (one,) * 17}, torch.zeros(17, dtype=torch.int64), pad_token_id=0)
        worst = 0.0
        for side in (1.0, -1.0):
            adapter, merged = attack(model, kernel, records, side)
            stand_in.active = True
            totals = [sums(model, adapter, merged, records, num) for num in range(1, 17)]
            stand_in.active = False
            worst = max(worst, *(float((more - fewer).norm()) / CLIP_NORM for fewer, more in pairwise(totals)))
            model.merge({})
    return worst


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_record_moves_a_sum_by_c_though_a_kernel_couples_records(kernel):
    worst = most_moved(kernel, alone=True)
    assert worst <= 1 + 1e-6, f"a record moves the sum by {worst:.2f} C"
    assert worst > 0.5, "no record has a gradient, so the test would prove nothing"


@pytest.mark.parametrize("kernel", KERNELS)
def test_where_records_share_passes_the_attack_moves_a_sum_by_many_times_c(kernel):
    """So the test above can fail: a simulation protects nobody."""
    assert most_moved(kernel, alone=False) > 5


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_record_moves_counts_by_one_though_a_kernel_couples_records(kernel):
    with coupled_by(kernel) as stand_in:
        model = training_model(alone=True)
        one = torch.randint(5, 60, (TOKENS,), generator=torch.Generator().manual_seed(1))
        records = Records({"input_ids": (one,) * 17}, torch.arange(17) % 3, pad_token_id=0)
        adapter, merged = attack(model, kernel, records, 1.0)
        stand_in.active = True
        counts = [private_evaluation.count(model, adapter, merged, records.part(range(num))) for num in range(18)]
        model.merge({})
    assert all(float((more - fewer).norm()) <= 1 for fewer, more in pairwise(counts))
    assert counts[-1].sum() == 17

"""A coordinator amplifies the last bit of an activation; no record then moves a node's sum by more than C."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from fedpriv.adapters import LoraSettings, attach, read
from fedpriv.adapters._arithmetic import Adapter, Merged, Product
from fedpriv.config import RunConfig
from fedpriv.data.records import Records
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training import stacked
from fedpriv.training._caches import input_of
from fedpriv.training._sampling import PoissonSampler
from fedpriv.training.local_update import UpdateSpec, UpdateTask
from fedpriv.training.model import TrainingModel
from tests.architectures import random_base
from tests.threads import NUMBERS, with_threads

# A broadcast may hold no larger value by default. Factors of such values merge to weights of 2^26.
MOST = 8192.0

# Eight records of eight tokens are cut after an odd number of neurons if three threads share them, as records of 4864
# neurons are from four threads on.
WIDTH, TOKENS = 1088, 8

REGISTERED = 16
CLIP_NORM = 0.5


# Every day one thread, and two numbers that cut within vectors.
@pytest.fixture(params=[pytest.param(n, marks=[] if n in (1, 3, 7) else pytest.mark.slow) for n in NUMBERS])
def threads(request) -> Iterator[int]:
    """The number of threads, whatever the suite's."""
    with with_threads(request.param):
        yield request.param


def model_with(activation: str) -> TrainingModel:
    base = random_base(
        "bert", hidden_act=activation, hidden_size=64, intermediate_size=WIDTH, num_hidden_layers=1, num_labels=3
    )
    settings = LoraSettings(rank=4, alpha=4.0, target_modules=("dense",))
    return TrainingModel(attach(base, settings), memory_limit=5 * 2**20, max_length=40)


def states(model: TrainingModel, records: Records) -> Tensor:
    """[tokens, hidden] What the first layer's neurons read of the first record; its address is public."""
    layer = model.peft_model.base_model.model.bert.encoder.layer[0]
    with torch.no_grad(), input_of(layer.intermediate.dense) as captured:
        model.logits(records.items([0]), cached=False)
    return captured[0][0]


def telling_scale(activation: str, state: Tensor) -> tuple[int, float]:
    """A coordinate and a short number such that a vector's activation of their product differs from a single one's."""
    function = ACT2FN[activation]
    for coordinate in range(len(state)):
        for scale in torch.arange(64, 1024).div(64).tolist():
            value = state[coordinate] * scale
            alone, among = function(value.repeat(7))[0], function(value.repeat(64))[0]
            if alone != among and 1 < abs(value) < 8:
                return coordinate, scale
    raise AssertionError("vectors and single values round alike here")


def attack(model: TrainingModel, activation: str, records: Records, token: int, side: float) -> tuple[Adapter, Merged]:
    """All neurons are alike and cancel in pairs, unless a thread's chunk ends between two of a pair."""
    layer = model.peft_model.base_model.model.bert.encoder.layer[0]
    found = states(model, records)[token]
    coordinate, scale = telling_scale(activation, found)
    name = next(n for n in dict(model.peft_model.named_modules()) if n.endswith("layer.0.intermediate.dense"))
    alike = torch.zeros(WIDTH, 64)
    alike[:, coordinate] = scale
    before = layer.intermediate.dense.base_layer.weight.detach()
    signs = torch.ones(WIDTH)
    signs[1::2] = -1
    direction = torch.randn(64, generator=torch.Generator().manual_seed(0)).sign()
    merged = {
        name: Product(alike - before),
        name.replace("intermediate", "output"): Product(MOST * direction[:, None], MOST * signs[None]),
    }
    adapter = {n: torch.zeros_like(t) for n, t in read(model.peft_model).items()}
    adapter = {n: torch.full_like(t, MOST) if "layer.0.output.dense.lora_B" in n else t for n, t in adapter.items()}
    # Unperturbed, the head sees a little of the one class; a last bit shows it the other one.
    pooled = torch.nn.functional.layer_norm(states(model, records), (64,)).mean(dim=0)
    unit = direction / 64
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


@pytest.mark.parametrize("activation", ["silu", pytest.param("gelu_pytorch_tanh", marks=pytest.mark.slow)])
def test_a_record_moves_a_sum_by_c_though_its_last_bit_is_amplified(threads, activation):
    model = model_with(activation)
    one = torch.randint(5, 60, (TOKENS - 1,), generator=torch.Generator().manual_seed(1))
    records = Records({"input_ids": (one,) * 13}, torch.zeros(13, dtype=torch.int64), pad_token_id=0)
    worst = 0.0
    for token, side in ((5, 1.0), (5, -1.0), (2, 1.0), (2, -1.0)):
        adapter, merged = attack(model, activation, records, token, side)
        totals = [sums(model, adapter, merged, records, num) for num in range(4, 13)]
        moved = max(float((more - fewer).norm()) for fewer, more in pairwise(totals)) / CLIP_NORM
        worst = max(worst, moved)
        model.merge({})
    assert 0.5 < worst <= 1 + 1e-6, f"a record moves the sum by {worst:.2f} C at {threads} threads"

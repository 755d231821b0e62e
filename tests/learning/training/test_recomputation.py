"""Layers that run again in the backward pass: the same bits, from less memory."""

from __future__ import annotations

import weakref

import pytest
import torch

from fedpriv.learning.adapters import LoraSettings, attach
from fedpriv.learning.adapters._base_formats import to_bfloat16
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import Stack, per_sample_gradients
from tests.architectures import DECODERS, ENCODERS, EVERY_DAY, TARGETS, random_base
from tests.learning.training.test_independence import gradients, records_for
from tests.marks import slow
from tests.tiny import move, random_records

KINDS = [
    pytest.param(kind, marks=[] if kind in EVERY_DAY else pytest.mark.slow)
    for kind in (*ENCODERS, *DECODERS)
    if kind not in ("mixtral", "fnet")  # refused; trained outside of its layers too
]


def models(kind: str, *, bfloat16: bool = False, **settings) -> list[TrainingModel]:
    """Without and with recomputation."""
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    settings = LoraSettings(rank=4, task=task, target_modules=TARGETS.get(kind, ()), **settings)
    found = []
    for flag in (False, True):
        peft_model = move(attach(random_base(kind), settings))
        if bfloat16:
            to_bfloat16(peft_model)
        found.append(TrainingModel(peft_model, memory_limit=2**22, max_length=40, activation_checkpointing=flag))
    return found


@pytest.mark.parametrize("layers", ["all", *slow("last-1", "0")])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits(kind, layers):
    for cached in (False, True):
        plain, recomputing = models(kind, layers=layers)
        assert recomputing.recomputed
        assert not plain.recomputed
        records = records_for(plain)
        (expected,) = gradients(plain, [(records, list(range(0, 40, 3)))], cached=cached)
        (found,) = gradients(recomputing, [(records, list(range(0, 40, 3)))], cached=cached)
        assert expected.abs().sum(dim=1).gt(0).any()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"trains": "lora-b"}, marks=pytest.mark.slow),
        {"trains": "lora-r"},
        pytest.param({"trains": "weights"}, marks=pytest.mark.slow),
        {"bfloat16": True},
    ],
)
def test_they_have_whatever_is_trained_and_in_bfloat16(options):
    plain, recomputing = models("llama", **options)
    records = records_for(plain)
    clients = [(records, [3, 1, 7]), (records_for(plain, seed=1), [0, 2])]
    for expected, found in zip(
        gradients(plain, clients, cached=False), gradients(recomputing, clients, cached=False), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("targets", [("down_proj",), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")])
def test_gradients_are_those_of_single_samples_by_autograd(targets):
    settings = LoraSettings(rank=4, task="CAUSAL_LM", target_modules=targets)
    model = TrainingModel(
        move(attach(random_base("llama"), settings)), memory_limit=2**30, activation_checkpointing=True
    )
    items = random_records(4, classes=0, vocabulary=50).items()
    found, _ = per_sample_gradients(
        model.layers, lambda: model.predictions(items, cached=False).losses, recomputed=model.recomputed
    )
    names = {name: p for name, p in model.peft_model.named_parameters() if p.requires_grad}
    for row, item in enumerate(items):
        loss = model.predictions([item], cached=False).losses.sum()
        for (name, _), expected in zip(names.items(), torch.autograd.grad(loss, list(names.values())), strict=True):
            torch.testing.assert_close(found[name][row], expected, atol=1e-5, rtol=1e-4)


def test_with_a_head_alone_to_train_no_layer_runs_again():
    _, model = models("bert")
    calls = []
    model.recomputed[0].register_forward_hook(lambda *_: calls.append(1))
    items = random_records(4).items()
    trained = {name for name in model.adapter_names if ".modules_to_save." in name}
    found, _ = per_sample_gradients(
        model.layers,
        lambda: model.predictions(items, cached=False).losses,
        trained=trained,
        recomputed=model.recomputed,
    )
    assert found.keys() == trained
    assert len(calls) == 1


def test_a_layer_keeps_nothing_but_its_input():
    """What the first layer computes is gone when the second one runs for the first time."""
    kept = {}
    for model, name in zip(models("llama"), ("plain", "recomputing"), strict=True):
        seen = []
        first, second = model.peft_model.get_base_model().model.layers
        first.mlp.up_proj.register_forward_hook(lambda _module, _args, out, seen=seen: seen.append(weakref.ref(out)))

        def look(*_, seen=seen, name=name):
            kept.setdefault(name, seen[0]() is not None)

        second.register_forward_pre_hook(look)
        items = random_records(4, classes=0, vocabulary=50).items()
        owners = torch.zeros(4, dtype=torch.int64)
        parameters = {n: p.detach().unsqueeze(0) for n, p in model.peft_model.named_parameters() if p.requires_grad}
        per_sample_gradients(
            model.layers,
            lambda model=model, items=items: model.predictions(items, cached=False).losses,
            Stack(parameters=parameters, owners=owners),
            recomputed=model.recomputed,
        )
    assert kept == {"plain": True, "recomputing": False}


def test_a_layer_that_is_given_something_else_to_train_is_refused():
    _, model = models("llama")
    block = model.recomputed[1]
    block.register_forward_pre_hook(
        lambda _module, args, options: (args, {**options, "extra": torch.zeros(1, requires_grad=True)}),
        with_kwargs=True,
    )
    items = random_records(2, classes=0, vocabulary=50).items()
    with pytest.raises(ValueError, match="activation_checkpointing = true: a LlamaDecoderLayer takes trained inputs"):
        per_sample_gradients(
            model.layers, lambda: model.predictions(items, cached=False).losses, recomputed=model.recomputed
        )

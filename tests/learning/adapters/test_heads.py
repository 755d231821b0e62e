"""Encoders with a head of several layers: where features are normalised, one linear layer reads the pooled vector."""

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification

import fedpriv.learning.adapters
from fedpriv.learning.adapters import LoraSettings, attach, pooling, save
from fedpriv.learning.training._passes import predictions
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from tests import architectures
from tests.architectures import REPLACED_HEADS, random_base, random_model
from tests.learning.adapters.test_unit_features import load_unit
from tests.tiny import BATCH, move, random_records


# Every day one with RoBERTa's head, of which two others are copies, and the two with heads of their own.
@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.slow if kind in ("xlm-roberta", "camembert") else [])
        for kind in REPLACED_HEADS
    ]
)
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(kind, tmp_path, tiny_bert):
    return architectures.save(random_model(kind), tmp_path / kind, tokenizer_of=tiny_bert)


def test_the_head_is_one_linear_layer_of_zeros(folder):
    base = load_unit(folder)
    name, head = pooling.linear_head(base.model)
    assert base.new_modules == (name,) == ("classifier",)
    assert (head.in_features, head.out_features) == (32, 3)
    assert not any(parameter.any() for parameter in head.parameters())
    assert not any(parameter.requires_grad for parameter in base.model.parameters())


def test_it_reads_the_mean_of_the_real_tokens_states_at_unit_length(folder):
    base = load_unit(folder)
    _, head = pooling.linear_head(base.model)
    for parameter in head.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    encoder = AutoModel.from_pretrained(folder).eval()
    expected = []
    for tokens, length in zip(BATCH["input_ids"], BATCH["attention_mask"].sum(dim=1), strict=True):
        states = encoder(input_ids=tokens[:length].unsqueeze(0)).last_hidden_state[0]
        mean = states.mean(dim=0)
        expected.append(head.weight @ (mean / mean.norm() * pooling.STATE_SCALE) + head.bias)
    torch.testing.assert_close(base.model(**BATCH).logits, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_a_head_that_replaces_another_is_zeros_and_draws_no_random_number(kind):
    model = random_model(kind)
    before = torch.get_rng_state()
    torch.use_deterministic_algorithms(True)  # memory that nobody initialises holds NaN
    try:
        pooling.apply(model, "unit-mean")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, torch.zeros_like(p)) for p in pooling.linear_head(model)[1].parameters())


def test_what_a_relu_makes_of_both_signs_has_their_difference_to_the_bit():
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    again = pooling._Difference()(F.relu(pooling._BothSigns()(x)))
    assert torch.equal(again, x)
    (again**2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_per_sample_gradients_of_head_and_lora_are_autograds_one_by_one(kind):
    model = TrainingModel(move(attach(random_base(kind, normalize=True), LoraSettings(rank=2))), memory_limit=2**30)
    items = random_records(6).items()

    def losses(items=items):
        logits, batch = model.logits(items, cached=False)
        return predictions(logits, batch).losses

    found, _ = per_sample_gradients(model.layers, losses)
    parameters = {name: p for name, p in model.peft_model.named_parameters() if p.requires_grad}
    assert found.keys() == parameters.keys()
    for row, item in enumerate(items):
        expected = torch.autograd.grad(losses([item]).sum(), parameters.values())
        for name, gradient in zip(parameters, expected, strict=True):
            assert gradient.any(), name
            torch.testing.assert_close(found[name][row], gradient, atol=2e-6, rtol=1e-4, msg=name)


def test_the_head_on_kept_features_gives_what_the_whole_model_gives(kind):
    model = TrainingModel(
        move(attach(random_base(kind, normalize=True), LoraSettings(rank=2, layers="last-1"))), memory_limit=2**30
    )
    assert model.head is not None
    assert model.features is not None
    records = random_records(30, longest=30)
    whole, _ = model.logits(records.items(), cached=False)
    kept, _ = model.evaluation_logits(records, range(30))
    torch.testing.assert_close(kept, whole, atol=1e-5, rtol=1e-4)
    assert model.features.bytes_in_memory == 30 * 32 * 4


def test_the_other_recipe_leaves_the_models_own_head(kind):
    stock = random_model(kind)
    modules = {name: type(module) for name, module in stock.named_modules()}
    base = random_base(kind)
    assert {name: type(module) for name, module in base.model.named_modules()} == modules
    assert all(torch.equal(p, q) for p, q in zip(base.model.parameters(), stock.parameters(), strict=True))
    assert base.pooling == "mean"


def test_plain_peft_refuses_the_adapter_for_the_models_own_head(folder, tmp_path):
    base = load_unit(folder)
    model = move(attach(base, LoraSettings(rank=2)))
    save(model, base, tmp_path / "adapter", labels=("x", "y", "z"))
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(KeyError, match=r"classifier\.(dense\.)?weight"):
        PeftModel.from_pretrained(stock, tmp_path / "adapter")
    loaded = fedpriv.learning.adapters.load(str(folder), tmp_path / "adapter")
    assert torch.equal(loaded(**BATCH).logits, model(**BATCH).logits)

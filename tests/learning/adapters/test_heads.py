"""A classifier of any encoder: one linear layer reads the pooled vector, whatever transformers calls its own head."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, BartConfig, BartForSequenceClassification

import fedpriv.learning.adapters
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, freeze, pooling, save
from fedpriv.learning.training._passes import predictions
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from tests import architectures
from tests.architectures import random_base, random_model
from tests.learning.adapters.test_unit_features import load_unit
from tests.tiny import BATCH, move, random_records

PAGE = Path(__file__).parents[3] / "docs" / "base_models.md"
# {architecture: what is trained} of the page's table of encoders.
TABLE = dict(re.findall(r"^\| `([\w-]+)` \| (\w.*?) \|", PAGE.read_text(), re.M))
KINDS = tuple(TABLE)


@pytest.fixture(params=KINDS)
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


@pytest.mark.parametrize("convention", pooling.CONVENTIONS[1:])
def test_each_pooling_is_that_of_the_real_tokens_wherever_padding_is(convention):
    model = random_model("bert").eval()
    pooling.apply(model, convention)
    states = random_model("bert").eval().base_model(**BATCH).last_hidden_state
    kind = convention.removeprefix("unit-")
    expected = [
        {"mean": own.mean(dim=0), "max": own.amax(dim=0), "cls": own[0], "last": own[-1]}[kind]
        for own in (states[0], states[1, :3])
    ]
    expected = [each / each.norm() * pooling.STATE_SCALE if "unit" in convention else each for each in expected]
    found, _ = pooling.vectors(model, **BATCH)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-6, rtol=1e-5)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    left = pooling._pooled(states[:1], mask, kind)
    torch.testing.assert_close(left, pooling._pooled(states[:1, 2:], None, kind), atol=1e-6, rtol=1e-5)


def test_an_encoder_with_a_decoder_is_refused_by_name():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60, "num_labels": 3}
    model = BartForSequenceClassification(BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2))
    with pytest.raises(InputError, match=r"model = 'bart': it is an encoder with a decoder.*recipe = per-sample"):
        freeze("bart", model, None, task="SEQ_CLS", normalize=True)


def test_layers_that_a_pass_calls_twice_train_a_head_alone():
    base = random_base("albert", normalize=True, num_hidden_layers=2)
    model = TrainingModel(move(attach(base, LoraSettings(rank=2))), memory_limit=2**30)
    with pytest.raises(ValueError, match="called twice in one forward pass"):
        per_sample_gradients(model.layers, lambda: model.logits(random_records(2).items(), cached=False)[0].sum(dim=1))
    with pytest.raises(InputError, match=r"layers = 'last-1': not in model 'albert'; use layers = all"):
        attach(random_base("albert", num_hidden_layers=2), LoraSettings(rank=2, layers="last-1"))


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "modernbert"])
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


def test_per_sample_gradients_of_head_and_lora_are_autograds_one_by_one(kind):
    trains = "lora" if TABLE[kind] == "LoRA, head" else "head"
    settings = LoraSettings(rank=2, trains=trains)
    model = TrainingModel(move(attach(random_base(kind, normalize=True), settings)), memory_limit=2**30)
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
        move(attach(random_base(kind, normalize=True), LoraSettings(rank=2, trains="head"))), memory_limit=2**30
    )
    assert model.head is not None
    assert model.features is not None
    records = random_records(30, longest=30)
    whole, _ = model.logits(records.items(), cached=False)
    kept, _ = model.evaluation_logits(records, range(30))
    torch.testing.assert_close(kept, whole, atol=1e-5, rtol=1e-4)
    assert model.features.bytes_in_memory == 30 * 32 * 4


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "modernbert"])
def test_the_other_recipe_keeps_the_head_that_a_checkpoint_brings_with_its_own_pooling(kind):
    stock = random_model(kind).eval()
    base = random_base(kind)
    assert torch.equal(base.model(**BATCH).logits, stock(**BATCH).logits)
    assert (base.pooling, base.new_modules) == ("model", ())


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_plain_peft_refuses_the_adapter_for_the_models_own_head(folder, tmp_path):
    base = load_unit(folder)
    model = move(attach(base, LoraSettings(rank=2)))
    save(model, base, tmp_path / "adapter", labels=("x", "y", "z"))
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(KeyError, match="weight"):
        PeftModel.from_pretrained(stock, tmp_path / "adapter")
    loaded = fedpriv.learning.adapters.load(str(folder), tmp_path / "adapter")
    assert torch.equal(loaded(**BATCH).logits, model(**BATCH).logits)

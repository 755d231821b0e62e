"""Normalised features: whatever the text, the head reads a vector of one length, and a saved adapter keeps it so."""

import math

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import fedpriv.learning.adapters
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base, pooling, read, save
from fedpriv.learning.training.model import TrainingModel
from tests import architectures
from tests.architectures import REPLACED_HEADS, random_model
from tests.tiny import BATCH, move

SIZES = {"vocab_size": 40, "pad_token_id": 0, "num_labels": 3}
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def classifier(kind):
    torch.manual_seed(0)
    models = {
        "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, **HIDDEN)),
        "gpt2": lambda: GPT2ForSequenceClassification(GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2)),
        "llama": lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES, **HIDDEN)),
    }
    return models[kind]().eval() if kind in models else random_model(kind).eval()


OWN_HEADS = ("bert", "gpt2", "llama")


# Every day one of the heads that are replaced.
KINDS = [
    *OWN_HEADS,
    *(pytest.param(kind, marks=[] if kind == "roberta" else pytest.mark.slow) for kind in REPLACED_HEADS),
]


@pytest.fixture(params=KINDS)
def folder(request, tmp_path, tiny_bert):
    """A classifier's checkpoint."""
    return architectures.save(classifier(request.param), tmp_path / request.param, tokenizer_of=tiny_bert)


def load_unit(folder):
    return load_base(str(folder), task="SEQ_CLS", num_labels=3, normalize=True)


def head_of(model):
    return getattr(model, "classifier", None) or model.score


def test_with_the_constant_features_have_norm_one(folder):
    base = load_unit(folder)
    seen = []
    head_of(base.model).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    base.model(**BATCH)
    assert seen[0].dtype == torch.float32
    norms = torch.hypot(seen[0].norm(dim=-1), torch.tensor(pooling.BIAS_SCALE))
    torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-6, rtol=0)
    assert math.hypot(pooling.STATE_SCALE, pooling.BIAS_SCALE) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("folder", OWN_HEADS, indirect=True)
def test_the_direction_is_that_of_the_state_without_normalisation(folder):
    seen = []
    for normalize in (False, True):
        base = load_base(str(folder), task="SEQ_CLS", num_labels=3, normalize=normalize)
        head_of(base.model).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        base.model(**BATCH)
    plain, unit = seen
    # Transformers computes a decoder's logits at every token, and takes the last.
    plain = plain if plain.dim() == 2 else plain[range(2), BATCH["attention_mask"].sum(dim=1) - 1]
    torch.testing.assert_close(unit, plain / plain.norm(dim=-1, keepdim=True) * pooling.STATE_SCALE)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, math.nan])
def test_no_state_gives_a_longer_vector_or_an_infinite_gradient(value):
    states = torch.full((2, 8), value, dtype=torch.bfloat16, requires_grad=True)
    unit = pooling.unit_states(states)
    unit.sum().backward()
    if not math.isnan(value):
        assert (unit.norm(dim=1) <= pooling.STATE_SCALE * (1 + 1e-6)).all()
        assert torch.isfinite(states.grad).all()
    assert unit.dtype == torch.float32


def test_its_gradient_is_that_of_the_formula():
    states = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = states.float().requires_grad_(), states.clone().requires_grad_()
    (pooling.unit_states(one) ** 3).sum().backward()
    ((other / other.norm(dim=1, keepdim=True) * pooling.STATE_SCALE) ** 3).sum().backward()
    torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-6, rtol=1e-5)


def test_the_head_is_trained_and_starts_at_zero(folder):
    model = attach(load_unit(folder), LoraSettings(rank=2))
    heads = {name: tensor for name, tensor in read(model).items() if "lora" not in name}
    assert heads
    assert not any(tensor.any() for tensor in heads.values())
    assert not model(**BATCH).logits.any()


def test_a_saved_adapter_gives_the_same_logits_in_every_way_it_can_be_loaded(folder, tmp_path):
    base = load_unit(folder)
    model = move(attach(base, LoraSettings(rank=2)))
    expected, directory = model(**BATCH).logits, tmp_path / "adapter"
    assert expected.any()
    save(model, base, directory, labels=("x", "y", "z"))

    by_peft = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    pooling.apply(by_peft, base.pooling)
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    for loaded in (
        fedpriv.learning.adapters.load(str(folder), directory),
        fedpriv.learning.adapters.load(load_unit(folder), directory),
        fedpriv.learning.adapters.load(plain, directory),
        PeftModel.from_pretrained(by_peft, directory).eval(),
    ):
        assert torch.equal(loaded(**BATCH).logits, expected)
    with pytest.raises(InputError, match="pooling = unit-"):
        fedpriv.learning.adapters.load(load_base(str(folder), task="SEQ_CLS", num_labels=3), directory)


def test_an_unknown_convention_is_refused():
    with pytest.raises(
        ValueError, match="pooling = 'unit-median': must be one of model, mean, cls, max, last, unit-mean, "
    ):
        pooling.apply(classifier("bert"), "unit-median")


def test_a_head_alone_is_trained_while_a_and_b_are_saved_as_they_are(folder, tmp_path):
    base = load_unit(folder)
    model = move(attach(base, LoraSettings(rank=2, trains="head")))
    assert all("lora" not in name for name in read(model))
    training = TrainingModel(model, memory_limit=2**30)
    assert [type(layer.module) for layer in training.layers.values()] == [nn.Linear]
    expected = model(**BATCH).logits
    save(model, base, tmp_path / "adapter", labels=("x", "y", "z"))
    loaded = fedpriv.learning.adapters.load(str(folder), tmp_path / "adapter")
    assert torch.equal(loaded(**BATCH).logits, expected)
    factors = {name: p for name, p in loaded.named_parameters() if ".lora_" in name}
    assert all(bool(p.any()) == (".lora_A." in name) for name, p in factors.items())

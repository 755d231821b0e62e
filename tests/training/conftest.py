"""Tiny models of every kind, with adapters, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fedpriv.adapters import BaseModel, LoraSettings, attach, load_base, trainable
from fedpriv.adapters.base_models import freeze
from fedpriv.data.records import Records

VOCABULARY = 60


def tiny_causal(kind: str) -> BaseModel:
    """A random Llama or GPT-2 of two layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "llama":
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=32,
                    num_hidden_layers=3,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    intermediate_size=48,
                    max_position_embeddings=64,
                    pad_token_id=0,
                )
            )
        else:
            model = GPT2LMHeadModel(
                GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, pad_token_id=0)
            )
    return freeze(kind, model, tokenizer=None, task="CAUSAL_LM")


def move(model: PeftModel, *, seed: int = 1) -> PeftModel:
    """The model with every adapter tensor away from its initial value: at B = 0 the gradient of A vanishes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def random_records(
    num: int, *, classes: int = 3, seed: int = 0, vocabulary: int = 15, shortest: int = 2, longest: int = 12
) -> Records:
    """Records of random tokens and, with classes, random labels."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num,), generator=generator).tolist()
    tokens = tuple(torch.randint(5, vocabulary, (length,), generator=generator) for length in lengths)
    labels = torch.randint(classes, (num,), generator=generator) if classes else torch.tensor([], dtype=torch.int64)
    return Records({"input_ids": tokens}, labels, pad_token_id=0)


@pytest.fixture
def encoder(tiny_bert: Path) -> Callable[..., PeftModel]:
    """Builds the tiny BERT classifier with an adapter that is not at its start."""

    def build(**settings: object) -> PeftModel:
        base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3)
        return move(attach(base, LoraSettings(rank=4, **settings)))

    return build


@pytest.fixture
def causal() -> Callable[..., PeftModel]:
    """Builds a tiny causal model with an adapter that is not at its start."""

    def build(kind: str, **settings: object) -> PeftModel:
        return move(attach(tiny_causal(kind), LoraSettings(rank=4, task="CAUSAL_LM", **settings)))

    return build


@pytest.fixture
def tiny_causal_base() -> Callable[[str], BaseModel]:
    """Builds a tiny causal model without an adapter."""
    return tiny_causal


@pytest.fixture
def make_records() -> Callable[..., Records]:
    """Builds random records."""
    return random_records


@pytest.fixture
def move_adapter() -> Callable[..., PeftModel]:
    """Moves an adapter away from its start."""
    return move

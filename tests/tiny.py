"""Tiny real models of every kind, and records for them, made on the spot."""

import csv
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fedpriv.learning.adapters import BaseModel, trainable
from fedpriv.learning.adapters._base_models import freeze
from fedpriv.learning.data.records import Records

WORDS = ["the", "a", "patient", "has", "pain", "in", "chest", "knee", "skin", "head", "today", "rash", "cough"]
LABELS = ("cardiology", "dermatology", "neurology")


def write_rows(path: Path, rows: Iterable[Iterable[object]]) -> Path:
    """A CSV of these rows, of which the first is its header."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def write_table(path: Path, num_records: int = 240, *, seed: int = 0) -> Path:
    """A CSV of learnable records: the label's own word stands among others; three sites hold them."""
    generator, rows = torch.Generator().manual_seed(seed), [["text", "label", "site"]]
    for row in range(num_records):
        label = LABELS[row % 3]
        words = [WORDS[i] for i in torch.randint(len(WORDS), (3 + row % 9,), generator=generator)]
        rows.append([" ".join([*words, label]), label, f"site-{row % 7 % 3}"])
    return write_rows(path, rows)


def with_persons(table: Path, path: Path, of: int, *, at_all_sites: bool = False) -> Path:
    """The table with a column of persons, of so many records at one site each, or at every site."""
    with table.open(newline="") as file:
        header, *rows = csv.reader(file)
    seen: dict[str, int] = {}
    for row in rows:
        number = seen[row[2]] = seen.get(row[2], -1) + 1
        row.append(f"{'' if at_all_sites else row[2]} P{number // of:03}")
    return write_rows(path, [[*header, "patient"], *rows])


VOCABULARY = 60

# Two records of token ids, the second one padded.
BATCH = {
    "input_ids": torch.tensor([[2, 7, 8, 9, 3], [2, 10, 3, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}


def llama_config(vocab_size: int, **more: int) -> LlamaConfig:
    """That of a Llama of width 32."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=vocab_size, hidden_size=32, intermediate_size=48, pad_token_id=0, **heads, **more)


def tiny_causal(kind: str) -> BaseModel:
    """A random Llama or GPT-2 of two layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "llama":
            model = LlamaForCausalLM(llama_config(VOCABULARY, num_hidden_layers=3, max_position_embeddings=64))
        else:
            sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, pad_token_id=0, **sizes))
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

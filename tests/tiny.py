"""A tiny real model and a small table, made on the spot."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

WORDS = ["the", "a", "patient", "has", "pain", "in", "chest", "knee", "skin", "head", "today", "rash", "cough"]
LABELS = ("cardiology", "dermatology", "neurology")


def make_tiny_bert(folder: Path) -> Path:
    """A random BERT of 2 layers and width 64 with a word tokenizer, saved as transformers does."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LABELS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast(vocab_file=str(folder / "vocab.txt"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=64,
        )
        BertForSequenceClassification(config).bert.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_table(path: Path, num_records: int = 240, *, seed: int = 0) -> Path:
    """A CSV of learnable records: the label's own word stands among others; three sites hold them."""
    generator = torch.Generator().manual_seed(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "site"])
        for row in range(num_records):
            label = LABELS[row % 3]
            words = [WORDS[i] for i in torch.randint(len(WORDS), (3 + row % 9,), generator=generator)]
            writer.writerow([" ".join([*words, label]), label, f"site-{row % 7 % 3}"])
    return path

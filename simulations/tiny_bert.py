"""A model small enough for thousands of simulated federations, made on the spot without a download."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast


def make_tiny_bert(folder: Path, words: Iterable[str]) -> Path:
    """A random BERT of 2 layers and width 64 with a tokenizer of the given words, saved for transformers."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(words)]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = BertTokenizerFast(vocab={word: index for index, word in enumerate(vocabulary)})
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

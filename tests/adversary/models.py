"""Models that a coordinator may name: a tokenizer that is an oracle, and architectures in which records touch."""

import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    ConvBertConfig,
    ConvBertForSequenceClassification,
    FNetConfig,
    FNetForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.tiny import LABELS, WORDS

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def with_oracle(tiny_bert: Path, folder: Path, pattern: str) -> Path:
    """The tiny BERT with a tokenizer that fails exactly if some text matches the pattern.

    A text that does not match becomes one known word; one that matches keeps its words, which are unknown, and there is
    no token for the unknown.
    """
    known = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "known": 3}))
    known.normalizer = normalizers.Replace(Regex(rf"\A(?![\s\S]*{pattern})[\s\S]*\z"), "known")
    return _with_tokenizer(tiny_bert, folder, known)


def with_words(tiny_bert: Path, folder: Path, **beyond: int) -> Path:
    """The tiny BERT with a tokenizer that knows its words, and others by ids for which there may be no embedding."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LABELS]
    ids = {word: index for index, word in enumerate(words)} | beyond
    return _with_tokenizer(tiny_bert, folder, Tokenizer(models.WordLevel(ids, unk_token="[UNK]")))


def _with_tokenizer(tiny_bert: Path, folder: Path, tokenizer: Tokenizer) -> Path:
    shutil.copytree(tiny_bert, folder)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **SPECIAL).save_pretrained(folder)
    return folder


def with_coupled_records(kind: str, tiny_bert: Path, folder: Path) -> Path:
    """A small random model in which a record's result depends on how far other records pad it."""
    with_words(tiny_bert, folder)
    size = {
        "vocab_size": 5 + len(WORDS) + len(LABELS),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = {
            "convbert": lambda: ConvBertForSequenceClassification(
                ConvBertConfig(embedding_size=64, initializer_range=0.5, **size)
            ),
            "fnet": lambda: FNetForSequenceClassification(FNetConfig(initializer_range=0.5, **size)),
        }[kind]()
    model.base_model.save_pretrained(folder)
    return folder

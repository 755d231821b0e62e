"""Small real models and data, made on the spot, so that no test needs a network."""

from __future__ import annotations

import csv
import os
from pathlib import Path

# Before any test imports transformers or flwr.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

WORDS = ["the", "a", "patient", "has", "pain", "in", "chest", "knee", "skin", "head", "today", "rash", "cough"]
LABELS = ("cardiology", "dermatology", "neurology")
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


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


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny BERT."""
    return make_tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


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


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CSV with columns text, label and site."""
    return write_table(tmp_path_factory.mktemp("data") / "records.csv")


@pytest.fixture(scope="session")
def small_run(tiny_bert: Path, table: Path) -> dict[str, object]:
    """Configuration values of a federation that runs in seconds, as a simulation on the small table."""
    return {
        "model": str(tiny_bert),
        "data": str(table),
        "client_column": "site",
        "layers": "last-1",
        "rank": 4,
        "rounds": 2,
        "local_steps": 2,
        "batch_size": 8,
        "noise_multiplier": 1.0,
        "simulate": True,
        "comparison": False,
    }

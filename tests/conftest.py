"""Small real models and data, made on the spot, so that no test needs a network."""

from __future__ import annotations

import os
from pathlib import Path

# Before any test imports transformers or flwr.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from tests.tiny import make_tiny_bert, write_table


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny BERT."""
    return make_tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


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

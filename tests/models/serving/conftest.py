"""A small language model that chats, and a run of three variants of it, for all tests that only read them."""

from pathlib import Path

import pytest

from tests.chats import chat_model
from tests.served import save_run

NAMES = ("global", "client-0", "client-1")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def chat_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    columns = {"prompt_column": "prompt", "response_column": "response", "data": "x.csv"}
    values = {"model": str(model), "task": "CAUSAL_LM", "layers": "all", "normalize_features": False, **columns}
    return save_run(tmp_path_factory.mktemp("served") / "run", values, NAMES, scale=0.5)

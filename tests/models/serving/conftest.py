"""A small language model that chats, a run of three variants of it, and what its engine says token by token."""

from pathlib import Path
from typing import Any

import pytest

from fedpriv.models.serving._generation import Generation
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


@pytest.fixture
def tapped(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """{variant and prompt: the tokens that follow}, filled as answers grow."""
    tokens: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    extend = Generation._extend

    def told(self: Generation, answer: Any, token: int) -> Any:
        tokens.setdefault((answer.job.variant, answer.request.prompt), []).append(token)
        return extend(self, answer, token)

    monkeypatch.setattr(Generation, "_extend", told)
    return tokens

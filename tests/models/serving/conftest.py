"""A small language model that chats, a run of three variants of it, and what its engine says token by token."""

from pathlib import Path
from typing import Any

import pytest

from fedpriv.models.serving._generation import Generation
from tests.models.publishing import runs

NAMES = ("global", "client-0", "client-1")


@pytest.fixture(scope="session")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.chat_run(tmp_path_factory.mktemp("chat"), NAMES)


@pytest.fixture(scope="session")
def model(chat_run: Path) -> Path:
    return chat_run.parent / "model"


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

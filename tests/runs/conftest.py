"""A folder of a run, as far as its test needs it."""

from pathlib import Path
from typing import Any

import pytest

from fedpriv.config import parse
from fedpriv.runs._writer import RunWriter
from tests.runs.written import SIZES, WriteRun, client_row, round_row, write_checkpoint, wrote


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run of three clients up to a round, aged by so many seconds; the second client fails in round 2."""

    def write(
        name: str = "run", *, rounds: int = 3, seconds_ago: float = 12.0, checkpoints: bool = True, **config: Any
    ) -> Path:
        folder = RunWriter.created(tmp_path / name, parse({"rounds": 10, "round_seconds": 60.0, **config}))
        for round_ in range(rounds + 1):
            failed = ("failed", "training failed") if round_ == 2 else ("ok", "")
            clients = [client_row(round_, c, *(failed if c == 1 else ("ok", ""))) for c in SIZES] if round_ else []
            folder.add(round_row(round_, clients), clients)
        if checkpoints:
            write_checkpoint(folder.path, rounds, {})
        wrote(folder.path, seconds_ago)
        return folder.path

    return write

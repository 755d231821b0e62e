"""Killed by SIGKILL, a run loses no entry, leaves no release uncharged, and counts as interrupted at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w

from fedpriv.config import parse
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._status import status_of
from simulations.sites import wait_until
from tests.integration.killed_run import killed
from tests.marks import slow

ROOT = Path(__file__).resolve().parents[2]


# Kills of each kind: whole runs, and one node that is asked again.
@pytest.mark.parametrize("kills", [1, *slow(100)])
def test_no_kill_loses_an_entry_or_leaves_a_release_uncharged(small_run, tmp_path, kills):
    changes = {"simulate": False, "public_data": True, "comparison": False, "rounds": 200, "local_steps": 1}
    replies = killed(parse(small_run | changes), tmp_path, kills, seed=0)
    assert min(replies.values()) > kills, "the kills hit runs at work"


@contextmanager
def killed_after(has_come: Callable[[], bool], *arguments: str) -> Iterator[None]:
    """`python -m simulations ARGUMENTS`, which has come so far, and which SIGKILL ends with the block."""
    command = [sys.executable, "-m", "simulations", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or has_come(), "the moment to kill it", 600, every=0.01)
        assert process.poll() is None, "it ended by itself, nothing would be tested"
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def killed_when(has_come: Callable[[], bool], folder: Path, *arguments: str) -> None:
    """Start a run, and kill it by SIGKILL once that is so; until then, it is running."""
    with killed_after(has_come, "run", *arguments):
        found = status_of(RunFolder(folder))
        assert (found.state, found.is_alive) == ("running", True)


@pytest.mark.slow
def test_a_killed_run_is_interrupted_at_once_and_running_again_once_it_is_resumed(
    tmp_path: Path, small_run: Mapping[str, object]
) -> None:
    folder, ledger, config = tmp_path / "run", tmp_path / "ledgers" / "all.sqlite", tmp_path / "run.toml"
    config.write_text(tomli_w.dumps({**small_run, "rounds": 20, "comparison": True, "ledger": str(ledger)}))
    comparison = folder / "comparison" / "rounds.csv"

    killed_when(lambda: (folder / "checkpoint" / "round-000003").is_dir(), folder, str(config), "--out", str(folder))
    found = status_of(RunFolder(folder))
    assert (found.state, found.is_alive) == ("interrupted", False)
    assert found.seconds_since_change < 60 < found.round_seconds
    assert found.resume_command is not None

    def compares() -> bool:
        if comparison.is_file():
            Ledger(ledger).close()  # nobody holds the lock any more, so it would not tell
        return comparison.is_file()

    killed_when(compares, folder, "--resume", str(folder))
    assert status_of(RunFolder(folder)).state == "interrupted"

    subprocess.run([sys.executable, "-m", "simulations", "run", "--resume", str(folder)], cwd=ROOT, check=True)
    assert status_of(RunFolder(folder)).state == "finished"

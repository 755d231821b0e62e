"""A run that ends too early says in one line where it is and how to go on, and what it wrote can be gone on with."""

import errno
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedpriv.errors import DiskFullError, LedgerError
from fedpriv.runs import RunFolder, RunWriter, resume_command
from fedpriv.runs.figures import figures
from server import checkpoint
from server.bookkeeping import Books
from simulations import run
from simulations.__main__ import app
from simulations.engines import federation

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# Noise of a run with a target; its nodes keep no replies, so that a round that is asked again is charged again.
SECURE = {"simulate": False, "public_data": True, "baselines": False, "engine": "in-process", "rounds": 3}


def simulate(values: dict[str, object], out: Path, **changes: object) -> Result:
    pairs = [f"{key}={json.dumps(value)}" for key, value in {**values, **changes}.items()]
    return CliRunner().invoke(app, ["run", *(part for pair in pairs for part in ("-c", pair)), "--out", str(out)])


def resumed(folder: Path) -> Result:
    program, *arguments = shlex.split(resume_command(folder, "in-process"))
    assert program == "fedpriv"
    return CliRunner().invoke(app, arguments)


def fails_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, error: BaseException) -> None:
    """Let one call of a function raise, counted from 0, and none after it."""
    original, calls = getattr(owner, name), iter(range(1000))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.fixture(scope="module")
def whole(small_run, tmp_path_factory) -> dict[str, object]:
    """The summary of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("endings") / "whole"
    assert simulate(small_run, folder, engine="in-process").exit_code == 0
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (RunWriter, "add", FULL),
        pytest.param(checkpoint, "_digest_line", FULL, marks=pytest.mark.slow),
        (checkpoint, "sync_folder", FULL),
        (Books, "settle", LedgerError("ledger.sqlite: the disk is full or fails (database or disk is full)")),
    ],
    ids=["a table", "a checkpoint", "its folder", "the ledger"],
)
def test_a_full_disk_ends_in_one_line_and_its_command_goes_on(
    small_run, whole, tmp_path, monkeypatch, owner, name, error
):
    out = tmp_path / "a run"
    with monkeypatch.context() as patch:
        fails_at(patch, owner, name, 1, error)
        failed = simulate(small_run, out, engine="in-process")
    assert failed.exit_code == 1
    (line,) = failed.stderr.strip().splitlines()
    assert "the disk is full" in line
    assert line.endswith(f"resume it: {resume_command(out, 'in-process')}")
    assert not [path for path in out.rglob("*") if path.suffix == ".tmp"], "something is half-written"
    assert resumed(out).exit_code == 0
    assert json.loads((out / "summary.json").read_text())["accuracy"] == whole["accuracy"]


def test_a_full_disk_before_the_first_round_and_after_the_last_one_leaves_nothing_to_resume(
    small_run, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        fails_at(patch, checkpoint, "sync_folder", 0, FULL)
        before = simulate(small_run, tmp_path / "before")
    assert before.exit_code == 1
    assert "holds no finished round; remove it, and start again" in before.stderr
    with monkeypatch.context() as patch:
        patch.setattr("server.app._write_report", lambda path: fail(FULL))
        after = simulate(small_run, tmp_path / "after")
    assert after.exit_code == 1
    assert f"fedpriv report {tmp_path / 'after'} writes its page" in after.stderr


def fail(error: BaseException) -> None:
    raise error


def test_an_interrupted_run_prints_its_folder_and_the_command_that_resumes_it(small_run, tmp_path, monkeypatch):
    fails_at(monkeypatch, Books, "settle", 1, KeyboardInterrupt())
    stopped = simulate(small_run, tmp_path / "run", engine="in-process")
    assert stopped.exit_code == 130
    (line,) = stopped.stderr.strip().splitlines()
    assert line.startswith(f"interrupted; {tmp_path / 'run'} holds the run")
    assert line.endswith(resume_command(tmp_path / "run", "in-process"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<span class="state interrupted">' in page
    assert "The run goes on after round" in page
    with monkeypatch.context() as patch:
        patch.setattr(Books, "settle", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert resumed(tmp_path / "run").exit_code == 143
    assert resumed(tmp_path / "run").exit_code == 0
    monkeypatch.setattr(federation, "run", lambda *_: fail(KeyboardInterrupt()))
    assert "interrupted; nothing was written" in simulate(small_run, tmp_path / "none").stderr
    with pytest.raises(KeyboardInterrupt, match="nothing was written"):
        run(**small_run, out=tmp_path / "script", progress=False)
    monkeypatch.setattr(federation, "run", lambda *_: fail(FULL))
    with pytest.raises(DiskFullError, match="nothing was written"):
        run(**small_run, out=tmp_path / "script", progress=False)


def test_a_round_that_was_charged_twice_explains_a_figure_above_the_target(small_run, tmp_path, monkeypatch):
    values = {key: value for key, value in small_run.items() if key != "noise_multiplier"} | SECURE
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        fails_at(patch, Books, "settle", 1, KeyboardInterrupt())
        assert simulate(values, out, target_epsilon=4.0).exit_code == 130
    closing = resumed(out).stdout
    reason = "round 2 charged more than once: what an interrupted attempt released counts too"
    assert f"{reason}, which is why ε is above the target" in " ".join(closing.split())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["epsilon_local_max"] > 4.0
    assert summary["rounds_charged_again"] == [2]
    assert reason in (out / "report.html").read_text()
    for page in ("terminal", "closing", "report"):
        assert [figure for figure in figures(RunFolder(out), page) if figure.key == "charged_again"], page


def test_a_second_run_on_a_ledger_shows_what_it_spent_and_what_stood_there_before(small_run, tmp_path):
    values = {key: value for key, value in small_run.items() if key != "noise_multiplier"} | SECURE
    values |= {"ledger": str(tmp_path / "shared.sqlite"), "rounds": 1}
    assert simulate(values, tmp_path / "first", noise_multiplier=0.7).exit_code == 0
    shown = " ".join(simulate(values, tmp_path / "second", target_epsilon=1.0).stdout.split())
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "second"))
    assert "epsilon_before_max" not in first
    assert second["epsilon_before_max"] == pytest.approx(first["epsilon_local_max"])
    assert second["epsilon_this_run_max"] <= 1.0 < second["epsilon_local_max"]
    assert "of target 1 in this run, " in shown
    assert "in the account before it" in shown
    assert "of 1 local" not in shown
    assert "stood in an account before it" in (tmp_path / "second" / "report.html").read_text()

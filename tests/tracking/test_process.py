"""The process beside a run: it cannot fail or hold up the run, and what it says fits one line of a terminal."""

from __future__ import annotations

import time

import pytest

from fedpriv.errors import InputError
from fedpriv.runs.show import _following as following
from fedpriv.runs.show._following import FollowedFolder, _reason, follow


class Ended:
    """A run that is over after some looks."""

    def __init__(self, looks: int = 0, *, complete: bool = True) -> None:
        self.looks, self.complete = looks, complete

    def wait(self, seconds: float) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_what_fails_is_said_once_and_tried_until_the_end(monkeypatch, tmp_path):
    said, tries = [], []

    class Broken:
        def update(self, *, complete, ended):
            tries.append((complete, ended))
            raise ConnectionError("refused")

    monkeypatch.setattr(following, "_follower_of", lambda job: Broken())
    assert not follow(FollowedFolder(tracker="mlflow", folder=str(tmp_path)), Ended(3), said.append)
    assert said == ["ConnectionError: refused"]
    assert tries == [(False, False)] * 3 + [(True, True)]


def test_a_reason_from_a_server_holds_no_control_characters_and_no_password():
    text = _reason(RuntimeError("\x1b[2J\x1b]0;owned\x07 https://user:hunter2@host/x\nsecond line " + "x" * 10_000))
    assert text.isprintable()
    assert "hunter2" not in text
    assert len(text) <= 201


def test_without_a_job_nothing_is_started(monkeypatch):
    monkeypatch.setattr(following.subprocess, "Popen", None)
    with following.following(None, pytest.fail):
        pass


def job(tmp_path, track="tensorboard"):
    return FollowedFolder(tracker=track, folder=str(tmp_path))


def started(monkeypatch, code: str) -> None:
    """Another program takes the process's place."""
    real = following.subprocess.Popen
    monkeypatch.setattr(
        following.subprocess, "Popen", lambda command, **rest: real([command[0], "-S", "-c", code], **rest)
    )


def test_a_process_that_hangs_is_ended_in_time_with_all_that_it_started(monkeypatch, tmp_path):
    started(monkeypatch, "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)")
    monkeypatch.setattr(following, "END_SECONDS", 0.3)
    notices, began = [], time.monotonic()
    with following.following(job(tmp_path), notices.append):
        pass
    assert time.monotonic() - began < 5
    assert len(notices) == 1
    assert notices[0].startswith("track = tensorboard: not everything arrived")


def test_a_process_that_floods_or_dies_costs_one_notice(monkeypatch, tmp_path):
    started(monkeypatch, "import os\nwhile True: print('no')")
    monkeypatch.setattr(following, "_SHORT_SECONDS", 0.3)
    monkeypatch.setattr(following, "END_SECONDS", 0.3)
    notices = []
    with following.following(job(tmp_path), notices.append):
        time.sleep(0.2)
    assert notices == [f"track = tensorboard: no; the run is not affected, {tmp_path} holds everything"]


def test_a_run_s_own_failure_is_not_hidden(monkeypatch, tmp_path):
    started(monkeypatch, "import sys; sys.exit(0 if not sys.stdin.read() else 1)")
    notices = []
    with pytest.raises(InputError), following.following(job(tmp_path), notices.append):
        raise InputError("x")
    assert not notices, "the process was not told that the run's files are complete"


def test_a_process_that_cannot_start_costs_one_notice(monkeypatch, tmp_path):
    def refuse(*args, **rest):
        raise OSError("no memory")

    monkeypatch.setattr(following.subprocess, "Popen", refuse)
    notices, ran = [], []
    with following.following(job(tmp_path), notices.append):
        ran.append(1)
    assert ran
    assert len(notices) == 1


def test_a_missing_package_is_refused_in_one_line_with_the_command(monkeypatch):
    monkeypatch.setattr(following, "find_spec", lambda name: None)
    with pytest.raises(InputError) as refusal:
        following.check_installed("mlflow")
    assert str(refusal.value) == "track = mlflow: needs mlflow; pip install 'fedpriv[mlflow]', or use none"
    following.check_installed("none")

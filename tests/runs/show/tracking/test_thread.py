"""The thread beside a run: it cannot fail or hold up the run, and what it says fits one line of a terminal."""

import threading
import time

import pytest

from fedpriv.errors import InputError
from fedpriv.runs.show import _tracker, _tracking
from fedpriv.runs.show._tracker import check_installed
from fedpriv.runs.show._tracking import _reason, tracked


def run(tmp_path, tell, notices, *, looks: int = 0) -> float:
    """Seconds that a run took beside which a tracker is told."""
    began = time.monotonic()
    with tracked("tensorboard", tmp_path, lambda: tell, notices.append) as look:
        for _ in range(looks):
            look()
    return time.monotonic() - began


def test_all_is_told_in_the_end_and_before_it_as_often_as_there_is_time(tmp_path):
    notices, told = [], []
    run(tmp_path, told.append, notices, looks=100)
    assert told[-1] == "finished"
    assert set(told[:-1]) <= {None}
    assert len(told) <= 101
    assert not notices


def test_what_fails_is_said_once_and_told_no_more(tmp_path):
    notices, tries = [], []

    def refuse(ending):
        tries.append(ending)
        raise ConnectionError("refused")

    run(tmp_path, refuse, notices, looks=5)
    reason = f"ConnectionError: refused; the run is not affected, {tmp_path} holds everything"
    assert notices == [f"track = tensorboard: {reason}"]
    assert len(tries) == 1
    with tracked("mlflow", tmp_path, lambda: 1 / 0, notices.append) as look:  # it cannot even be made
        look()
    assert len(notices) == 2
    assert "ZeroDivisionError" in notices[1]


def test_a_reason_from_a_server_holds_no_control_characters_and_no_password():
    text = _reason(RuntimeError("\x1b[2J\x1b]0;owned\x07 https://user:hunter2@host/x\nsecond line " + "x" * 10_000))
    assert text.isprintable()
    assert "hunter2" not in text
    assert len(text) <= 201


@pytest.fixture
def hanging():
    """A tracker that does not return until the test is over."""
    over = threading.Event()
    yield lambda ending: over.wait(60)
    over.set()


@pytest.mark.parametrize(("looks", "said"), [(3, "not everything arrived within 0.3 s"), (5000, "does not keep up")])
def test_a_tracker_that_hangs_holds_up_no_run(monkeypatch, tmp_path, hanging, looks, said):
    """It is waited for no longer than the limit; one that does not keep up is dropped during the run."""
    monkeypatch.setattr(_tracking, "END_SECONDS", 0.3)
    notices = []
    assert run(tmp_path, hanging, notices, looks=looks) < 5
    (notice,) = notices
    assert notice.startswith("track = tensorboard: ")
    assert said in notice


def test_a_run_s_own_failure_is_told_and_not_hidden(tmp_path):
    told, notices = [], []

    def fail():
        with tracked("tensorboard", tmp_path, lambda: told.append, notices.append):
            raise InputError("x")

    with pytest.raises(InputError, match="x"):
        fail()
    assert told == ["failed"]
    assert not notices


def test_a_missing_package_is_refused_in_one_line_with_the_command_and_none_needs_none(monkeypatch, tmp_path):
    monkeypatch.setattr(_tracker, "find_spec", lambda name: None)
    with pytest.raises(InputError) as refusal:
        check_installed("mlflow")
    assert str(refusal.value) == "track = mlflow: needs mlflow; pip install 'fedpriv[mlflow]', or use none"
    check_installed("none")
    monkeypatch.setattr(_tracking.threading, "Thread", None)
    with tracked("none", tmp_path, pytest.fail, pytest.fail) as look:  # and nothing is started
        look()

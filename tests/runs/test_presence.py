"""Whether a run's process lives is asked of the kernel; whoever asks is in nobody's way."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpriv.errors import InputError
from fedpriv.runs import files
from fedpriv.runs.files import is_alive, marked_alive, refuse_second

ROOT = Path(__file__).resolve().parents[2]
HOLD = "import sys, time; from pathlib import Path; from fedpriv.runs.files import marked_alive\n"
HOLD += "with marked_alive(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """One that runs the run in the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_lives_until_it_is_killed_and_then_at_once_no_more(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        assert is_alive(tmp_path) is True
        with pytest.raises(InputError, match=f"another process runs this run, process {process.pid};"):
            refuse_second(tmp_path)
        process.send_signal(signal.SIGSTOP)  # one that waits is not dead
        assert is_alive(tmp_path) is True
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert is_alive(tmp_path) is False
    with marked_alive(tmp_path):
        (tmp_path / files.PRESENCE).read_bytes()  # classic POSIX locks would be gone once this is closed
        assert is_alive(tmp_path) is True
    assert is_alive(tmp_path) is False


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_resumed_run_that_is_killed_while_it_writes_the_file_is_dead(tmp_path, monkeypatch, call, moment) -> None:
    (tmp_path / files.PRESENCE).write_text(json.dumps({"boot": files._boot(), "process": 10**9}) + "\n")
    real = getattr(files.os, call)

    def dies(*arguments) -> None:
        if moment == "after":
            real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, call, dies)
    with pytest.raises(KeyboardInterrupt), marked_alive(tmp_path):
        pass
    assert is_alive(tmp_path) is False


def test_of_two_that_begin_at_the_same_moment_one_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Both have looked and seen nobody, or what they saw names another machine; only the lock decides."""
    presence, elsewhere = tmp_path / files.PRESENCE, b'{"boot": "another machine"}'
    with other_process(tmp_path):
        for written in (presence.read_bytes(), elsewhere):
            presence.write_bytes(written)
            with monkeypatch.context() as patch:
                if written != elsewhere:
                    patch.setattr(files, "refuse_second", lambda _: None)
                with pytest.raises(InputError, match="another process runs this run"), marked_alive(tmp_path):
                    pass
            assert presence.read_bytes() == written


def test_those_who_look_all_the_time_keep_no_run_from_starting(tmp_path: Path) -> None:
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            is_alive(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with marked_alive(tmp_path):
                assert is_alive(tmp_path) is True
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"boot": 7}', b'{"boot": "another machine"}'])
def test_of_another_machine_or_from_a_damaged_file_nothing_is_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / files.PRESENCE).write_bytes(content)
    assert is_alive(tmp_path) is None
    with marked_alive(tmp_path):  # and it keeps nobody from going on
        assert json.loads((tmp_path / files.PRESENCE).read_text())["boot"] == files._boot()


def test_without_a_file_or_locks_nothing_is_known_and_a_run_runs(tmp_path: Path, monkeypatch) -> None:
    assert is_alive(tmp_path) is is_alive(tmp_path / "nowhere") is None
    monkeypatch.setattr(files, "_SET", None)
    with marked_alive(tmp_path):
        assert is_alive(tmp_path) is None


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / files.PRESENCE).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=files.PRESENCE), marked_alive(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "mine"

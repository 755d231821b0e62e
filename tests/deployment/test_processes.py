"""What a killed `start` left behind is ended by the next, and nothing else: no stranger, and nobody with its number."""

import errno
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fedpriv.errors import FlowerError, InputError
from fedpriv.operate import processes
from fedpriv.operate.processes import Kept, only_start
from simulations.sites import ROOT, wait_until

# A `start` with a child that starts another, neither of which cares about it.
_START = """
import os, subprocess, sys, time
from pathlib import Path
from fedpriv.operate.processes import only_start
child = "import subprocess; print(subprocess.Popen(['sleep', '100']).pid, flush=True); import time; time.sleep(100)"
with only_start(Path(sys.argv[1]), {os.geteuid()}, print) as mark:
    process = subprocess.Popen([sys.executable, "-c", child], env={**os.environ, **mark}, stdout=subprocess.PIPE)
    print(process.pid, int(process.stdout.readline()), flush=True)
    time.sleep(100)
"""
_ENDS_WITH_PARENT = """
import signal, sys, time
from fedpriv.operate import processes
processes._GRACE_SECONDS = 0.2
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
processes.end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""

OWN = {os.geteuid()}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(processes, "_END_SECONDS", 5.0)
    monkeypatch.setattr(processes, "_RESTART_SECONDS", 0.0)


def sleeper(variables: dict[str, str], **options: int) -> psutil.Popen:
    """A process whose environment can be read, which is a moment after Popen returns."""
    process = psutil.Popen(["sleep", "100"], env={**os.environ, **variables}, **options)
    wait_until(lambda: bool(process.environ()), "the program", 10, every=0.01)
    return process


@contextmanager
def sleeping(**variables: str) -> Iterator[psutil.Popen]:
    """A process that nothing but the test ends."""
    process = sleeper(variables)
    yield process
    process.kill()
    process.wait()


@contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A `start`, and what it has started."""
    start = subprocess.Popen([sys.executable, "-c", _START, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert start.stdout is not None
    family = [psutil.Process(int(number)) for number in start.stdout.readline().split()]
    yield start, family
    start.kill()
    start.communicate()
    for process in family:
        if process.is_running():
            process.kill()


def lives(process: psutil.Process) -> bool:
    """Whether it runs; nobody may have asked yet how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mark_of(folder: Path) -> dict[str, str]:
    with only_start(folder, OWN, print) as mark:
        return mark


def test_what_a_killed_start_left_behind_ends_before_the_next(tmp_path):
    lines: list[str] = []
    with started(tmp_path) as (start, family):
        start.kill()
        start.wait()
        assert all(map(lives, family))
        with only_start(tmp_path, OWN, lines.append):
            assert not any(map(lives, family))
    told = "ended process {} ({}), which was left behind"
    assert lines[0].startswith(f"ended process {family[0].pid} ({sys.executable} -c ")
    assert lines[1:] == [told.format(family[1].pid, "sleep 100")]


def test_what_a_start_left_behind_itself_ends_with_it(tmp_path):
    with only_start(tmp_path, OWN, print) as mark:
        child = sleeper(mark)
    assert child.wait(5) == -signal.SIGKILL


def test_a_second_start_of_a_folder_is_refused_by_name_and_ends_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with started(tmp_path / "folder") as (_, family):
        for path in (tmp_path / "folder", tmp_path / "link"):
            refused = pytest.raises(InputError, match=f"{path}: another `start` of this folder runs")
            with refused, only_start(path, OWN, print):
                pytest.fail("the block must not run")
        assert all(map(lives, family))


def test_two_folders_do_not_concern_each_other(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    with sleeping(**mark_of(first)) as other, sleeping() as unmarked:
        with only_start(second, OWN, print):
            pass
        assert (other.poll(), unmarked.poll()) == (None, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_a_stranger_with_the_mark_is_left_alone_and_the_nodes_own_user_is_not(tmp_path):
    nobody = pwd.getpwnam("nobody").pw_uid
    mark = mark_of(tmp_path)
    stranger = sleeper(mark, user=nobody)
    with only_start(tmp_path, OWN, print):
        assert stranger.poll() is None
    with only_start(tmp_path, {*OWN, nobody}, print):
        assert stranger.wait(5) == -signal.SIGKILL


def test_a_mark_among_arguments_or_at_the_end_of_another_value_is_none(tmp_path):
    ((name, value),) = mark_of(tmp_path).items()
    with sleeping(OTHER=f"x{name}={value}", **{name: f"{value}0"}) as process:
        with only_start(tmp_path, OWN, print):
            pass
        assert process.poll() is None


def test_a_number_that_another_process_has_since_is_not_killed(tmp_path, monkeypatch):
    """The list is old, and the number now is a stranger's; or it becomes one between the look and the signal."""
    lines: list[str] = []
    mark = "=".join(*mark_of(tmp_path).items())
    with sleeping() as stranger:
        processes._kill(stranger.pid, mark, OWN, lines.append)
        assert stranger.poll() is None
    gone = subprocess.Popen(["sleep", "100"])

    def looked(*_: object) -> bool:
        gone.kill()
        gone.wait()
        return True

    monkeypatch.setattr(processes, "_is_marked", looked)
    processes._kill(gone.pid, mark, OWN, lines.append)
    processes._kill(gone.pid, mark, OWN, lines.append)
    assert not lines


def test_a_process_that_cannot_be_killed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_END_SECONDS", 0.2)
    with sleeping(**mark_of(tmp_path)) as process:
        monkeypatch.setattr(processes, "_kill", lambda *_: None)
        with pytest.raises(FlowerError, match=f"processes {process.pid} do not end"), only_start(tmp_path, OWN, print):
            pytest.fail("the block must not run")


def test_where_there_are_no_locks_nothing_is_ended(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    mark = mark_of(tmp_path)
    monkeypatch.setattr(processes.fcntl, "flock", flock)
    with sleeping(**mark) as process:
        with only_start(tmp_path, OWN, print) as own:
            assert own == mark
        assert process.poll() is None


@pytest.mark.parametrize(("how", "code"), [("polite", -signal.SIGTERM), ("stubborn", -signal.SIGKILL)])
def test_a_process_ends_with_the_one_that_started_it(how, code):
    command = [sys.executable, "-c", _ENDS_WITH_PARENT, how]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    child.stdin.close()
    assert child.wait(20) == code


def test_a_kept_process_is_started_again_and_told_of_what_comes(tmp_path):
    file = tmp_path / "told"
    code = f"import os; open({str(file)!r}, 'a').write(f'{{os.getpid()}} '); os.read(0, 1); os.kill(os.getpid(), 9)"
    kept = Kept("helper", [sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not file.exists() or len(file.read_text().split()) < 3:
        kept.tell()
        time.sleep(0.05)
        assert time.monotonic() < deadline

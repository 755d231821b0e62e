"""The processes of a folder's `start`: they end with it, and what a killed one left all the same ends before the next.

Each carries the folder's mark in its environment, which the kernel keeps and which a process hands on to those that it
starts, Flower's own among them. So no file lists them that a crash could leave half-written or somebody could plant,
and a number that another process has been given since names nobody.
"""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedpriv.errors import FlowerError, InputError
from fedpriv.files import User

log = logging.getLogger("flwr")  # of the processes that keep another, which are Flower's

UTF8 = {"PYTHONUTF8": "1"}
"""The variable by which a Python program reads and writes UTF-8, whatever this machine's encoding is."""

_MARK = "FEDPRIV_STARTED_IN"
_PROC = Path("/proc")

# What ends by itself, as nearly all does, takes its leave: a SuperNode whose place is freed is let in again at once.
_GRACE_SECONDS = 5.0
_END_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_RESTART_SECONDS = 1.0

_NAME_CHARACTERS = 100


@contextmanager
def signals_handled_by(
    handler: Callable[[int, Any], None], numbers: Collection[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[None]:
    """Give these signals to a handler while the block runs, in the main thread."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


@contextmanager
def only_start(folder: Path, users: Collection[int], say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """While the block runs no other `start` of the folder does; it gets the variables that its processes must have.

    Those that an earlier `start` left behind are ended first, and those that this one leaves behind, last. Where the
    file system has no locks nobody can tell a killed `start` from one that runs, so nothing is ended.

    Args:
        folder: of a node or coordinator, which alone its users can read.
        users: numbers of the users whose processes may be ended; those of others are left alone, whatever their mark.
        say: prints a line for each process that is ended.

    Raises:
        InputError: another `start` of the folder runs.
        FlowerError: a process that was left behind does not end.
    """
    # The folder itself is locked: the kernel unlocks it with the death of this process, and no child gets the lock.
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    status = os.fstat(lock)
    mark = f"{_MARK}={status.st_dev}:{status.st_ino}"  # two containers may give two folders one path
    try:
        is_alone = _locked(lock, folder)
        if is_alone:
            _end_all(folder, mark, users, say)
        try:
            yield dict([mark.split("=")])
        finally:
            if is_alone:
                _end_all(folder, mark, users, say)
    finally:
        os.close(lock)


def _locked(file: int, folder: Path) -> bool:
    """Lock an open folder; False where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{folder}: another `start` of this folder runs; end that one first") from None
    except OSError:
        return False
    return True


def _end_all(folder: Path, mark: str, users: Collection[int], say: Callable[[str], None]) -> None:
    """Wait for the processes with this mark to end, then kill them, those first that started the others."""
    begin = time.monotonic()
    while left := _marked(mark, users):
        waited = time.monotonic() - begin
        if waited > _GRACE_SECONDS + _END_SECONDS:
            raise FlowerError(f"{folder}: processes {', '.join(map(str, left))} do not end, though they were killed")
        if waited > _GRACE_SECONDS:
            for process in left:
                _kill(process, mark, users, say)
        time.sleep(_LOOK_SECONDS)


def _marked(mark: str, users: Collection[int]) -> list[int]:
    """The numbers of the processes with this mark, in the order in which they were started."""
    found = [int(entry.name) for entry in _PROC.glob("[0-9]*") if _is_marked(int(entry.name), mark, users)]
    return sorted(found, key=_started)


def _is_marked(process: int, mark: str, users: Collection[int]) -> bool:
    """Whether a process began with this mark and belongs to one of the users; not if it is over or cannot be read."""
    with suppress(OSError):
        entry = _PROC / str(process)
        return entry.stat().st_uid in users and mark.encode() in (entry / "environ").read_bytes().split(b"\0")
    return False


def _started(process: int) -> int:
    """When a process started, in ticks since boot; 0 if it is over."""
    with suppress(OSError):
        return int((_PROC / str(process) / "stat").read_bytes().rpartition(b")")[2].split()[19])
    return 0


def _kill(process: int, mark: str, users: Collection[int], say: Callable[[str], None]) -> None:
    """Kill a process, unless it is over and another has its number: what is opened before the look cannot be that."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process)
        try:
            if _is_marked(process, mark, users):
                name = _name(process)
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                say(f"ended process {process} ({name}), which was left behind")
        finally:
            os.close(handle)


def _name(process: int) -> str:
    """The command line of a process up to its first option in words, in 100 characters: one of them may be a token."""
    with suppress(OSError):
        words = (_PROC / str(process) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        return " ".join(takewhile(lambda word: not word.startswith("--"), words))[:_NAME_CHARACTERS]
    return "over"


def start_child(
    command: Sequence[str], *, folder: Path, variables: Mapping[str, str], user: User | None
) -> subprocess.Popen[str]:
    """A process whose output, errors too, comes through a pipe as text, and whose standard input is one from here.

    It is in a process group of its own: otherwise Ctrl-C in a terminal would reach it too, besides whoever started it.
    Its standard input closes if this process is killed; see `end_with_parent`. OSError if it cannot be started.
    """
    return subprocess.Popen(
        command,
        cwd=folder,
        env=dict(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        process_group=0,
        **(user.popen_options if user else {}),
    )


def end_with_parent() -> None:
    """End this process as SIGTERM does, or a few seconds later as SIGKILL, once nobody holds its standard input.

    That is a pipe from the process that started it, which the kernel closes however that one ended.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class Kept:
    """A process that is started again whenever it ends, for as long as this one lives."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self._name, self._command, self._variables = name, command, {**os.environ, **(variables or {})}
        self._process = self._popen()
        threading.Thread(target=self._keep, daemon=True).start()

    def tell(self) -> None:
        """Write a byte to its standard input; one that has just ended gets none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(b".")

    def _popen(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, bufsize=0, env=self._variables)

    def _keep(self) -> None:
        while True:
            code = self._process.wait()
            log.error("the %s ended with exit code %s; it is started again", self._name, code)
            time.sleep(_RESTART_SECONDS)
            self._process = self._popen()

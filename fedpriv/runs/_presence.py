"""Whether the process of a run or a sweep lives: it locks a file in the folder, which the kernel unlocks as it dies.

The lock belongs to an open file (Linux's open file description locks): it survives that someone in the same process
opens and closes the file, and it is asked for without being taken, so that nobody who looks can be in a run's way.
Locks tell of processes on the same machine only. So the file names the machine's boot; of any other, nothing is known.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpriv.errors import InputError
from fedpriv.runs import files

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# `struct flock` of 64-bit Linux: type, whence, start, length (0 for all), process (must be 0), padding.
_FLOCK = struct.Struct("hhqqi4x")
# macOS has no such locks: there a run is judged by its silence alone.
_GET: int | None = getattr(fcntl, "F_OFD_GETLK", None)
_SET: int | None = getattr(fcntl, "F_OFD_SETLK", None)
_MAX_BYTES = 1000


@contextmanager
def marked_alive(run_dir: Path) -> Iterator[None]:
    """While the block runs, `is_alive(run_dir)` is True for all processes on this machine.

    Where the file system has no locks the block runs all the same, and nobody can tell.

    Args:
        run_dir: of a run or of a sweep.

    Raises:
        InputError: another process runs it.
    """
    refuse_second(run_dir)
    file = os.open(run_dir / files.PRESENCE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        content = b""
        if _lock(file, run_dir):
            content = json.dumps({"boot": _boot(), "process": os.getpid()}).encode() + b"\n"
        # In this order a run that is killed between the two leaves a first line that names the machine.
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
        yield
    finally:
        os.close(file)


def refuse_second(run_dir: Path) -> None:
    """Refuse to touch a run or a sweep that another process runs.

    Raises:
        InputError: it does.
    """
    if is_alive(run_dir):
        raise _second(run_dir)


def _second(run_dir: Path) -> InputError:
    kind = "sweep" if (run_dir / files.SWEEP_PLAN).is_file() else "run"
    number = _noted(run_dir).get("process")
    named = "" if number is None else f", process {number}"
    return InputError(f"{run_dir}: another process runs this {kind}{named}; wait until it ends, or end it first")


def is_alive(run_dir: Path) -> bool | None:
    """Whether the process that runs the run lives; None if that cannot be told.

    That is so for a process on another machine or before this one was restarted.
    """
    try:
        if _GET is None or str(_noted(run_dir).get("boot", "")) != _boot():  # "" is no machine's
            return None
        with (run_dir / files.PRESENCE).open("rb") as file:
            asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            found: int = _FLOCK.unpack(fcntl.fcntl(file, _GET, asked))[0]
    except OSError:
        return None
    return found != fcntl.F_UNLCK


def _lock(file: int, run_dir: Path) -> bool:
    """Lock the file; False where there are no locks.

    Raises:
        InputError: another process has it, which began at the same moment or on another machine.
    """
    if _SET is None or _boot() is None:
        return False
    try:
        fcntl.fcntl(file, _SET, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _second(run_dir) from None
        return False
    return True


def _boot() -> str | None:
    """Names this machine since it was last started, containers on it included; None if it has no such name."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _noted(run_dir: Path) -> dict[str, object]:
    """The machine's boot and the process that its file names; nothing if the file is missing or damaged."""
    try:
        with (run_dir / files.PRESENCE).open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES).partition(b"\n")[0])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

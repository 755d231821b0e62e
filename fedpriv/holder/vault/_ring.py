"""Lines of a vault from a charge to its answer: they may depend on records, so they take one room whatever they are."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RING_BYTES = 2**18
_FORMAT = "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"


class Ring(logging.Handler):
    """Keeps the last lines in a file of one size, whatever they are and however many; for its owner alone.

    The newest line is the last, and blank ones fill the rest. Processes may add lines at the same time.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        formatter = logging.Formatter(*_FORMAT)
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def make(self) -> None:
        """Make the file, unless it is there, and take all of its room.

        Raises:
            OSError: there is none.
        """
        self._add(b"", os.O_CREAT)

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line; where there is no file the line is lost, since none may be made now."""
        with suppress(OSError):
            self._add(f"{self.format(record)}\n".encode(errors="replace")[-_RING_BYTES // 2 :], 0)

    def _add(self, lines: bytes, flags: int) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file).st_size
            if size != _RING_BYTES:
                os.posix_fallocate(file, 0, _RING_BYTES)
                os.fsync(file)
            elif not lines:
                return
            # Without the line of which only a part is left.
            _, _, kept = (os.pread(file, size, 0) + lines)[-_RING_BYTES:].partition(b"\n")
            os.pwrite(file, kept.rjust(_RING_BYTES, b"\n"), 0)
            os.ftruncate(file, _RING_BYTES)
        finally:
            os.close(file)


@contextmanager
def heard_by(ring: Ring) -> Iterator[None]:
    """Within this context, what this process logs goes to the ring, and what libraries print goes nowhere.

    So nothing of it reaches a log that grows, such as a service manager's.
    """
    with suppress(OSError):  # where there is no room, the lines are lost
        ring.make()
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    outputs = sys.stdout, sys.stderr
    for output in outputs:
        output.flush()
    kept, nowhere = [os.dup(number) for number in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    try:
        root.handlers[:] = [ring]
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for output in outputs:
            output.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
        root.handlers[:] = before
        for file in (*kept, nowhere):
            os.close(file)

"""The system's page cache: what it holds, what it had to read, and how to empty it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import numpy as np

_PIECE_BYTES = 2**20


def drop(paths: Iterable[Path]) -> bool:
    """Drop the files from the page cache, and return whether none of their pages remain there.

    False also where the system does not say. Pages that a process has mapped and read remain.

    Raises:
        OSError: a file cannot be read.
    """
    dropped = [_drop(path) for path in paths]  # a list, since all() would stop at the first failure
    return all(dropped)


def read_speed(path: Path) -> float:
    """Bytes per second of one pass through a file that is not in the page cache, in pieces of a MiB."""
    drop([path])
    piece, read = bytearray(_PIECE_BYTES), 0
    started = perf_counter()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            read += count
    return read / (perf_counter() - started)


def bytes_from_disk() -> int | None:
    """What this process has made the disk read so far; None where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _drop(path: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):  # macOS
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if num_cached_pages(path):
            os.fsync(descriptor)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return not num_cached_pages(path)


def num_cached_pages(path: Path) -> int:
    """How many pages of a file are in memory; all of them where the system does not say.

    It asks mincore(2), which Python does not offer.
    """
    if not (size := path.stat().st_size):
        return 0
    pages = np.ones(-(-size // mmap.PAGESIZE), np.uint8)
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is not None:
        mapped = np.memmap(path, np.uint8, "r")
        failed = mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, size, pages.ctypes.data)))
        if failed:
            return len(pages)
    return int(np.count_nonzero(pages & 1))

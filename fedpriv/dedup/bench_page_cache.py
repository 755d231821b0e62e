"""Files out of the system's page cache, so that the next read comes from the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def drop(paths: Iterable[Path]) -> bool:
    """Whether the page cache holds nothing of the files any more; False too where the system does not tell.

    What a process has mapped and looked at stays: see `let_go`.

    Raises:
        OSError: a file cannot be read.
    """
    gone = [_drop(path) for path in paths]  # of each, whatever became of those before it
    return all(gone)


def let_go(array: NDArray[Any]) -> None:
    """Let the page cache drop what an array maps from a file; the array's values stay what they are in the file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def _drop(path: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):  # macOS
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if num_cached_pages(path):
            os.fsync(descriptor)  # what is not on the disk yet stays
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return not num_cached_pages(path)


def num_cached_pages(path: Path) -> int:
    """How many pages of a file are in memory; all of them where the system does not tell.

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

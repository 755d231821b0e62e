"""Drop files from the system's page cache, so that the next read comes from the disk."""

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
    """Drop the files from the page cache, and return whether none of their pages remain there.

    False also where the system does not say. Pages that a process has mapped and read remain: see
    `release_mapped_pages`.

    Raises:
        OSError: a file cannot be read.
    """
    dropped = [_drop(path) for path in paths]  # a list, since all() would stop at the first failure
    return all(dropped)


def release_mapped_pages(array: NDArray[Any]) -> None:
    """Allow the page cache to drop what an array maps from a file; the array reads the same values afterwards."""
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

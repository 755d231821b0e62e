"""A bound on the memory of a whole process: by a control group where one can be made, else on its address space.

A control group counts the pages of files that its processes bring into the system's cache, so the bound also limits
what that cache can do for them. A bound on the address space does not.

The system's page cache itself is observed and emptied here too, and a second group makes a disk as slow as asked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from fedpriv.errors import InputError

_NUM_TRIES, _PAUSE_SECONDS = 100, 0.02
_BLOCK_IO = Path("/sys/fs/cgroup/blkio")  # of version 1


@dataclass(frozen=True, kw_only=True)
class _Files:
    """Names of the files and figures in a version of control groups."""

    limit: str
    swap_limit: str
    usage: str
    cached: str
    mapped: str


_FILES = {
    1: _Files(
        limit="memory.limit_in_bytes",
        swap_limit="memory.memsw.limit_in_bytes",
        usage="memory.usage_in_bytes",
        cached="cache",
        mapped="mapped_file",
    ),
    2: _Files(
        limit="memory.max",
        swap_limit="memory.swap.max",
        usage="memory.current",
        cached="file",
        mapped="file_mapped",
    ),
}


@dataclass(frozen=True)
class Group:
    """A control group for one process.

    Attributes:
        path: its folder.
        version: 1 or 2.
        slow: the folder of one that reads slowly; None if the disk is as it is.
    """

    path: Path
    version: int
    slow: Path | None = None


@contextmanager
def temporary_group(proc: Path = Path("/proc/self")) -> Iterator[Group | None]:
    """A new group below that of this process, removed at the end; None where none can be made.

    All its processes must have ended by then.

    Args:
        proc: the folder in which the system describes this process.
    """
    group = _make(proc)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group.path)


@contextmanager
def slowed(group: Group | None, folder: Path, bytes_per_second: float | None) -> Iterator[Group | None]:
    """The group, in which a folder's disk reads at most so fast, cache apart; as it is for None.

    Raises:
        InputError: there is no group, or none of this system slows the disk.
    """
    if bytes_per_second is None:
        yield group
        return
    if group is None:
        raise InputError(f"disk = {bytes_per_second / 1e6:g} MB/s: takes a control group, and none can be made here")
    device, path = folder.stat().st_dev, _BLOCK_IO / f"fedpriv-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        path.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_second:.0f}"
        (path / "blkio.throttle.read_bps_device").write_text(limit)
    except OSError as error:
        _remove(path)
        raise InputError(f"disk = {bytes_per_second / 1e6:g} MB/s: no control group slows {folder} ({error})") from None
    try:
        yield replace(group, slow=path)
    finally:
        _remove(path)


def enter(group: Group | None) -> None:
    """Move this process into the group; what it has already allocated counts where it was allocated."""
    for path in (group.path, group.slow) if group else ():
        if path is not None:
            (path / "cgroup.procs").write_text(str(os.getpid()))


def used_bytes(group: Group | None) -> int:
    """Count the bytes that cannot be given back within the bound: all but cached pages of files that nobody maps."""
    if group is None:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    files = _FILES[group.version]
    figures = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
    usage = int((group.path / files.usage).read_text())
    return usage - int(figures[files.cached]) + int(figures[files.mapped])


def bound(group: Group | None, num_bytes: int) -> None:
    """Bound the group's memory, or the address space of this process, from now on, swap included."""
    if group is None:
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        return
    files = _FILES[group.version]
    (group.path / files.limit).write_text(str(num_bytes))
    with suppress(OSError):  # a kernel that does not count swap
        (group.path / files.swap_limit).write_text(str(num_bytes if group.version == 1 else 0))


def kind_of(group: Group | None) -> str:
    """Say in words how the memory is bounded."""
    return "address space" if group is None else f"cgroup v{group.version}"


def _make(proc: Path) -> Group | None:
    for parent, version in _parents(proc):
        path = parent / f"fedpriv-bench-{os.getpid()}-{time.monotonic_ns()}"
        try:
            path.mkdir()
        except OSError:
            continue
        group = Group(path, version)
        if os.access(path / _FILES[version].limit, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK):
            return group
        _remove(path)
    return None


def _parents(proc: Path) -> Iterator[tuple[Path, int]]:
    """Folders in which a group that bounds memory may be made, with the version of control groups there."""
    try:
        mounts = [line.split() for line in (proc / "mounts").read_text().splitlines()]
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, mounted, kind, options, *_ in mounts:
        for _, controllers, path in own:
            inside = Path(mounted) / path.lstrip("/")
            if kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                yield inside if inside.is_dir() else Path(mounted), 1
            elif kind == "cgroup2" and not controllers:
                # A group with processes cannot bound its children's memory, except for the topmost one.
                parent = inside if inside == Path(mounted) else inside.parent
                with suppress(OSError):
                    if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                        yield parent, 2


def _remove(path: Path) -> None:
    for _ in range(_NUM_TRIES):  # it is busy for an instant after its last process has ended
        with suppress(FileNotFoundError):
            try:
                path.rmdir()
            except OSError:
                time.sleep(_PAUSE_SECONDS)
                continue
        return


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


def clock() -> float:
    """Seconds, less those in which this thread was ready and other processes had the processor, if the system says.

    A disk may go on reading ahead in these, so that a busy machine shows less than an idle one.
    """
    path = Path("/proc/thread-self/schedstat")
    while path.exists():
        waited, now = path.read_text(), perf_counter()
        if path.read_text().split()[1] == waited.split()[1]:  # else it waited in between
            return now - int(waited.split()[1]) / 1e9
    return perf_counter()


def bytes_from_disk() -> int | None:
    """Bytes that this process has made the disk read so far; None where the system does not say."""
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

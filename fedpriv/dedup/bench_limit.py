"""A bound on the memory of a whole process: by a control group where one can be made, else on its address space.

A control group counts the pages of files that its processes bring into the system's cache, so the bound also limits
what that cache can do for them. A bound on the address space does not.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NUM_TRIES, _PAUSE_SECONDS = 100, 0.02


@dataclass(frozen=True, kw_only=True)
class _Files:
    """What a version of control groups calls its files and figures."""

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
    """

    path: Path
    version: int


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
            _remove(group)


def enter(group: Group | None) -> None:
    """Move this process into the group; what it has already allocated counts where it was allocated."""
    if group is not None:
        (group.path / "cgroup.procs").write_text(str(os.getpid()))


def used_bytes(group: Group | None) -> int:
    """What counts towards the bound and cannot be given back: all but cached pages of files that nobody maps."""
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
    """What bounds the memory, in words."""
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
        _remove(group)
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


def _remove(group: Group) -> None:
    for _ in range(_NUM_TRIES):  # it is busy for an instant after its last process has ended
        with suppress(FileNotFoundError):
            try:
                group.path.rmdir()
            except OSError:
                time.sleep(_PAUSE_SECONDS)
                continue
        return

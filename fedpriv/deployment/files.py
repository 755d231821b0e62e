"""Files of a deployment: written completely or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpriv.deployment.users import User
from fedpriv.errors import InputError


def write_new(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a new file; a reader sees all of it or nothing.

    Args:
        path: in an existing folder.
        content: of the file.
        mode: its permissions, from the first byte on.

    Raises:
        InputError: the file exists.
    """
    temporary = _temporary(path, content, mode)
    try:
        os.link(temporary, path)  # unlike a rename, a link fails if the target exists
    except FileExistsError:
        raise InputError(f"{path}: exists; give another path, or move it away first") from None
    finally:
        temporary.unlink()


def replace(path: Path, content: bytes, *, mode: int = 0o644, owner: User | None = None) -> None:
    """Write a file, replacing any old one; a reader sees either the old or the new one.

    Args:
        path: in an existing folder.
        content: of the file.
        mode: its permissions, from the first byte on.
        owner: whose file it becomes; None stands for the user of this process.
    """
    _temporary(path, content, mode, owner).replace(path)


def sync_folder(path: Path) -> None:
    """Flush the name of a file, which is new in its folder, to disk."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes `path` on success and is deleted on failure. Only its owner can access it.

    Args:
        path: does not exist or is an empty folder.

    Raises:
        InputError: path is a file, or a folder that is not empty.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"folder = {path}: exists and is not an empty folder; give another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _temporary(path: Path, content: bytes, mode: int, owner: User | None = None) -> Path:
    """A temporary file beside `path` with this content, flushed to disk; none is left if that fails."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
            os.fchmod(descriptor, mode)
            if owner is not None:
                os.fchown(descriptor, owner.uid, owner.gid)
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)

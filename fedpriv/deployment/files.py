"""Files of a deployment: written whole or not at all, and never over another."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpriv.errors import InputError


def write_new(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file that does not exist yet; who looks sees all of it or nothing.

    Args:
        path: in a folder that exists.
        content: of the file.
        mode: its permissions, from the first byte on.

    Raises:
        InputError: the file exists.
    """
    temporary = _temporary(path, content, mode)
    try:
        os.link(temporary, path)  # unlike a rename, a link fails where something is
    except FileExistsError:
        raise InputError(f"{path}: exists; give another path, or move it away first") from None
    finally:
        temporary.unlink()


def replace(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file over the one that may be there; who looks sees the old one or the new one."""
    _temporary(path, content, mode).replace(path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` once that went well; else nothing of it stays. Its owner's alone.

    Args:
        path: may be there as an empty folder.

    Raises:
        InputError: it is a file, or a folder that holds something.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"folder = {path}: exists and is no empty folder; give another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _temporary(path: Path, content: bytes, mode: int) -> Path:
    """A file with this content beside `path`, on the disk before anyone can see it under its name."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
        os.fchmod(descriptor, mode)
    return Path(name)

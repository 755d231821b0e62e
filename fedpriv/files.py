"""Files that are written completely or not at all, and structured logs: one JSON line for each event of a run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from fedpriv.errors import InputError

_log = logging.getLogger(__name__)

_Value = str | int | float | bool | None

_MAX_TEXT_LENGTH = 300

# Fields that are never truncated: a receipt, whose own length is bounded.
_NEVER_TRUNCATED = {"receipt"}


class _Owner(Protocol):
    """A Unix user, who can own a file."""

    @property
    def uid(self) -> int: ...

    @property
    def gid(self) -> int: ...


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


def replace_file(path: Path, content: bytes, *, mode: int = 0o644, owner: _Owner | None = None) -> None:
    """Write a file, replacing any old one; a reader sees either the old or the new one.

    Args:
        path: in an existing folder.
        content: of the file.
        mode: its permissions, from the first byte on.
        owner: the user who then owns the file; None stands for the user of this process.

    Raises:
        OSError: it cannot be written, or something that is no file has its name; nothing is left behind.
    """
    temporary = _temporary(path, content, mode, owner)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink()
        raise


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


def _temporary(path: Path, content: bytes, mode: int, owner: _Owner | None = None) -> Path:
    """A temporary file in the folder of `path` with this content, flushed to disk; none is left if that fails."""
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


class Journal:
    """Appends events to a file, each with the time and the common fields.

    An event describes a run, a round, a client, and numbers that are public anyway; never a record, a text, a gradient,
    or the message of an exception, which could contain one. If the file cannot be written, only the event is lost.

    Args:
        path: of the file; None writes nothing.
        common: fields of every event, such as the run.
    """

    def __init__(self, path: Path | None, **common: _Value) -> None:
        self._path = path
        self._common = common

    def with_fields(self, **common: _Value) -> Journal:
        """This journal with further fields in every event."""
        return Journal(self._path, **{**self._common, **common})

    def write(self, event: str, **fields: _Value) -> None:
        """Append an event; texts are truncated to 300 characters, but for a receipt.

        Raises:
            TypeError: a field is not a plain value.
        """
        if self._path is None:
            return
        values = {"time": datetime.now(UTC).isoformat(), "event": event, **self._common, **fields}
        for name, value in values.items():
            if value is not None and not isinstance(value, (str, int, float, bool)):
                raise TypeError(f"{name}: an event holds plain values, not {type(value).__name__}")
        truncated = {
            name: value[:_MAX_TEXT_LENGTH] if isinstance(value, str) and name not in _NEVER_TRUNCATED else value
            for name, value in values.items()
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(truncated)}\n")
        except OSError as error:
            _log.warning("%s: an event could not be written (%s)", self._path, error.strerror)


def trace_without_message(error: BaseException) -> str:
    """The type of an error and its traceback, without its message."""
    return f"{type(error).__name__} at\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()

"""Files that are written whole or not at all, or deleted by name, their texts, modes and users, and logs of events."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from io import BufferedWriter
from pathlib import Path, PurePath
from typing import Any

from fedpriv.errors import InputError
from fedpriv.texts import VERSION

LIBRARY = Path(__file__).parent
"""The folder of the fedpriv that runs."""


@cache
def library_digest(folder: Path = LIBRARY) -> str:
    """SHA-256, in hex, of a package's code and the TOML that it reads, which tells apart what one version stands for.

    Names are relative and sorted, every line ends alike, and the programs that only a wheel has within do not count: so
    a wheel, a clone and another platform agree.
    """
    digest = hashlib.sha256()
    sources = (file for file in folder.rglob("*") if file.suffix in {".py", ".toml"})
    for name, file in sorted((file.relative_to(folder).as_posix(), file) for file in sources):
        if file.is_file() and not name.startswith("_apps/"):  # an editor's lock is a link that leads nowhere
            content = file.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    return digest.hexdigest()


def software() -> str:
    """The version of the fedpriv that runs, with the start of its digest: `0.2.0 (1f3a9c0b7d42)`."""
    return f"{VERSION} ({library_digest()[:12]})"


_log = logging.getLogger(__name__)

_Value = str | int | float | bool | None

_MAX_TEXT_LENGTH = 300

# Nothing is written to a disk that would have less room left than this: the rest is for what must not fail. It is more
# than a node's log, which others can fill, takes at most.
FLOOR_BYTES = 2**26

# Fields that are never truncated: a receipt, whose own length is bounded.
_NEVER_TRUNCATED = {"receipt"}

_NUMBER = re.compile("[0-9]+")
_MAX_UID = 2**31 - 2


@dataclass(frozen=True)
class User:
    """A Unix user.

    Attributes:
        name: of the user; its number, where the machine knows no name, as in containers.
        uid: its number.
        gid: number of its own group.
        groups: numbers of all its groups.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    @property
    def is_nameless(self) -> bool:
        """Whether this machine knows the user by its number alone."""
        return self.name == str(self.uid)

    @property
    def popen_options(self) -> dict[str, Any]:
        """Options of `subprocess.Popen` that start a process of this user; only root may use them."""
        return {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}


def read_text(path: Path) -> str:
    """The text of a file: UTF-8 whatever this machine's encoding is, without the mark that some editors put before it.

    Raises:
        InputError: it holds anything else.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not text in UTF-8; save it as UTF-8") from None


def write_new(path: Path, content: bytes, *, mode: int | None = 0o644) -> None:
    """Write a new file; a reader sees all of it or nothing. For arguments and errors see `new_file`."""
    with new_file(path, mode=mode) as file:
        file.write(content)


def replace_file(path: Path, content: bytes, *, mode: int | None = 0o644, owner: User | None = None) -> None:
    """Write a file, replacing any old one. For arguments and errors see `replaced_file`."""
    with replaced_file(path, mode=mode, owner=owner) as file:
        file.write(content)


@contextmanager
def new_file(path: Path, *, mode: int | None = None) -> Iterator[BufferedWriter]:
    """An empty temporary file to fill, also by its name, which then becomes the new one: a reader sees all or nothing.

    Args:
        path: in an existing folder.
        mode: its permissions, from the first byte on; None stands for those that the process gives to new files.

    Raises:
        InputError: something has that name already.
        OSError: it cannot be written; nothing is left behind.
    """
    with _temporary(path, mode) as file:
        yield file
        try:
            os.link(_finished(file, mode), path)  # unlike a rename, a link fails if the target exists
        except FileExistsError:
            raise InputError(f"{path}: exists; give another path, or move it away first") from None


@contextmanager
def replaced_file(path: Path, *, mode: int | None = None, owner: User | None = None) -> Iterator[BufferedWriter]:
    """An empty temporary file to fill, also by its name, which then takes the place of any old one at once.

    A link in that place is replaced itself: what it leads to stays as it is.

    Args:
        path: in an existing folder.
        mode: its permissions, from the first byte on; None stands for those that the process gives to new files.
        owner: the user who then owns the file; None stands for the user of this process.

    Raises:
        OSError: it cannot be written, or something that is no file has its name; nothing is left behind.
    """
    with _temporary(path, mode) as file:
        yield file
        _finished(file, mode, owner).replace(path)


def remove_files(root: Path, names: Iterable[str]) -> None:
    """Delete files below a folder, and the folders between that are then empty; one that is missing is none.

    Nothing else goes: neither a file of another name nor a link, nor anything that a link leads to.

    Args:
        root: a folder, or a link to one.
        names: of the files in it, such as `manifests/global.json`.

    Raises:
        OSError: a file cannot be deleted.
    """
    emptied = set[Path]()
    for name in map(PurePath, names):
        between = [root / parent for parent in name.parents][:-1]
        if name.is_absolute() or ".." in name.parts or any(folder.is_symlink() for folder in between):
            continue
        file = root / name
        if file.is_file() and not file.is_symlink():
            file.unlink(missing_ok=True)
        emptied.update(between)
    for folder in sorted(emptied, key=lambda folder: len(folder.parts), reverse=True):
        with suppress(OSError):  # it holds something else, or is gone
            folder.rmdir()


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder, for programs without privileges."""
    return shutil.disk_usage(folder).free


def require_room(folder: Path, num_bytes: int) -> None:
    """Refuse, with ENOSPC, to write so much to a folder's disk if less than `FLOOR_BYTES` would be left."""
    if free_bytes(folder) < num_bytes + FLOOR_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def sync_folder(path: Path) -> None:
    """Flush the name of a file, which is new in its folder, to disk."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_free(folder: Path) -> bool:
    """Whether nothing has this path, or an empty folder."""
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes `path` on success and is deleted on failure. Only its owner can access it.

    InputError if the path is a file, a link, or a folder that is not empty.
    """
    if path.is_symlink() or not is_free(path):
        raise InputError(f"folder = {path}: exists and is not an empty folder; give another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


@contextmanager
def _temporary(path: Path, mode: int | None) -> Iterator[BufferedWriter]:
    """An open file in the folder of `path` under a name of its own, which is gone at the end."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(name, "xb", opener=partial(os.open, mode=0o666 if mode is None else 0o600)) as file:
        try:
            yield file
        finally:
            name.unlink(missing_ok=True)


def _finished(file: BufferedWriter, mode: int | None, owner: User | None = None) -> Path:
    """The path of a temporary file, whose content is on the disk when this returns."""
    file.flush()
    with Path(file.name).open("rb") as written:  # who writes by the name may have put another file there
        os.fsync(written.fileno())
        os.fchmod(written.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) if mode is None else mode)
        if owner is not None:
            os.fchown(written.fileno(), owner.uid, owner.gid)
    return Path(file.name)


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

    def write(self, event: str, **fields: _Value) -> bool:
        """Append an event, and return whether it may be logged too; texts are truncated to 300 characters, but for a
        receipt.

        Raises:
            TypeError: a field is not a plain value.
        """
        self._append(self._line(event, fields))
        return True

    def _line(self, event: str, fields: Mapping[str, _Value]) -> str:
        time = datetime.now(UTC).isoformat(timespec="microseconds")
        values = {"time": time, "event": event, **self._common, **fields}
        for name, value in values.items():
            if value is not None and not isinstance(value, (str, int, float, bool)):
                raise TypeError(f"{name}: an event holds plain values, not {type(value).__name__}")
        truncated = {
            name: value[:_MAX_TEXT_LENGTH] if isinstance(value, str) and name not in _NEVER_TRUNCATED else value
            for name, value in values.items()
        }
        return f"{json.dumps(truncated)}\n"

    def _append(self, line: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            _log.warning("%s: an event could not be written (%s)", self._path, error.strerror)


def trace_without_message(error: BaseException) -> str:
    """The type of an error and its traceback, without its message."""
    return f"{type(error).__name__} at\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()


def user_named(name: str) -> User:
    """The user with this name or number; InputError if there is no such name, or no such number can be."""
    if _NUMBER.fullmatch(name):
        if int(name) > _MAX_UID:
            raise InputError(f"client_user = {name!r}: must be a number of at most {_MAX_UID}, or a user's name")
        return _numbered(int(name))
    try:
        return _user(pwd.getpwnam(name))
    except KeyError:
        raise InputError(f"client_user = {name!r}: this machine has no such user") from None


def owner_for(folder: Path) -> User | None:
    """The user who is to own new files in a folder, if root makes them: the folder's; None if root does not."""
    return owner_of(folder) if os.geteuid() == 0 else None


def owner_of(path: Path) -> User:
    """The user who owns a file or folder."""
    return _numbered(path.stat().st_uid)


def _numbered(uid: int) -> User:
    """The user with this number; one whom this machine has no name for is in the group of that number alone."""
    try:
        return _user(pwd.getpwuid(uid))
    except KeyError:
        return User(str(uid), uid, uid, (uid,))


def _user(entry: pwd.struct_passwd) -> User:
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)))

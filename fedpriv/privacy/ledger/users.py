"""Unix users: whose processes run what, and who can read a file."""

from __future__ import annotations

import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError

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


def user_named(name: str) -> User:
    """The user with this name or number.

    Raises:
        InputError: there is no such name, or no such number can be.
    """
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


def can_read(user: User, path: Path) -> bool:
    """Whether a file lets this user read it, were all folders above it open; its owner can always change that."""
    status = path.stat()
    if user.uid == status.st_uid:
        return True
    return bool(status.st_mode & (stat.S_IRGRP if status.st_gid in user.groups else stat.S_IROTH))


def _numbered(uid: int) -> User:
    """The user with this number; one whom this machine has no name for is in the group of that number alone."""
    try:
        return _user(pwd.getpwuid(uid))
    except KeyError:
        return User(str(uid), uid, uid, (uid,))


def _user(entry: pwd.struct_passwd) -> User:
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)))

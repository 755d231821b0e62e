"""Unix users: whose processes run what, and who can read a file."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError


@dataclass(frozen=True)
class User:
    """A Unix user.

    Attributes:
        name: of the user.
        uid: its number.
        gid: number of its own group.
        groups: numbers of all its groups.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    @property
    def popen_options(self) -> dict[str, Any]:
        """Options of `subprocess.Popen` that start a process of this user; only root may use them."""
        return {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}


def user_named(name: str) -> User:
    """The user with this name.

    Raises:
        InputError: there is none.
    """
    try:
        return _user(pwd.getpwnam(name))
    except KeyError:
        raise InputError(f"client_user = {name!r}: this machine has no such user") from None


def owner_for(folder: Path) -> User | None:
    """The user who is to own new files in a folder, if root makes them: the folder's; None if root does not.

    Raises:
        InputError: the owner has no name on this machine.
    """
    return owner_of(folder) if os.geteuid() == 0 else None


def owner_of(path: Path) -> User:
    """The user who owns a file or folder.

    Raises:
        InputError: the owner has no name on this machine.
    """
    uid = path.stat().st_uid
    try:
        return _user(pwd.getpwuid(uid))
    except KeyError:
        raise InputError(f"{path}: its owner, number {uid}, is no user of this machine") from None


def can_read(user: User, path: Path) -> bool:
    """Whether a file lets this user read it, were all folders above it open; its owner can always change that."""
    status = path.stat()
    if user.uid == status.st_uid:
        return True
    return bool(status.st_mode & (stat.S_IRGRP if status.st_gid in user.groups else stat.S_IROTH))


def _user(entry: pwd.struct_passwd) -> User:
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)))

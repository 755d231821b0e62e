"""The head of a ledger, PATH.head: number and digest of its last entry, so that entries lost at the end are noticed.

A new ledger's head is on disk, with number 0, before the ledger has a table, and it is rewritten after every commit.
So at any instant, also after a crash, a ledger with tables has a readable head, and its chain holds the entry that the
head names: a crash between a commit and its head leaves the head behind, which the next writer mends. A ledger with
tables and no readable head was tampered with, or moved without it. Anyone who can write both files can replace both;
against that helps only a digest that is kept elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import time
from pathlib import Path

from fedpriv.errors import LedgerError
from fedpriv.files import sync_folder

# The digest that the first entry is chained to.
EMPTY_CHAIN = "0" * 64
START = (0, EMPTY_CHAIN)

# As long as any head that was ever written, and then some.
_MAX_BYTES = 200

# A vault's charge takes less, and so does a command of its operator.
_LOCK_SECONDS = 5.0


def head_path(path: Path) -> Path:
    """PATH.head."""
    return path.with_name(path.name + ".head")


def wal_path(path: Path) -> Path:
    """PATH-wal, which SQLite keeps, and in which a ledger in use has its newest entries."""
    return path.with_name(path.name + "-wal")


def has_log(path: Path) -> bool:
    """Whether anything is in PATH-wal."""
    log = wal_path(path)
    return log.is_file() and log.stat().st_size > 0


def without_log(path: Path) -> str:
    """The likely cause why a file lacks what its head has seen, and the cure, if no log is beside it; else nothing."""
    if has_log(path):
        return ""
    return (
        f"; a copy of a ledger in use needs {wal_path(path).name} too: make copies with `fedpriv ledger backup`, which "
        "takes all"
    )


def opened(path: Path) -> int:
    """A descriptor of a ledger's head, which is created empty if there is none."""
    return os.open(head_path(path), os.O_RDWR | os.O_CREAT, 0o600)


def lock(file: int, path: Path) -> None:
    """Keep other writers off until the descriptor is closed; one that is writing is waited for, for some seconds.

    Raises:
        LedgerError: it goes on.
    """
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise LedgerError(f"{path}: another process is writing it, and it has one writer at a time") from None
        time.sleep(0.05)


def begin(file: int, path: Path) -> None:
    """Write the head of a ledger without entries, and its name in the folder, durably."""
    write(file, *START)
    sync_folder(path)


def write(file: int, number: int, digest: str) -> None:
    """Replace the head, durably."""
    text = f"{number:>20} {digest}\n".encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))
    os.fsync(file)


def read(file: int) -> str:
    """The text of a head."""
    return os.pread(file, _MAX_BYTES, 0).decode(errors="replace")


def read_beside(path: Path) -> str:
    """The text of a ledger's head; empty if there is none."""
    try:
        with head_path(path).open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""


def parse(text: str) -> tuple[int, str] | None:
    """The number and digest that a head holds; None if it is empty or garbled."""
    found = re.fullmatch(r" *(\d{1,18}) ([0-9a-f]{64})\n", text)
    if found is None:
        return None
    head = int(found[1]), found[2]
    return None if head[0] == 0 and head != START else head


def check_unused(text: str, path: Path) -> None:
    """Refuse to start a new ledger next to the head of an old one.

    Raises:
        LedgerError: the head has seen entries, or holds something else. What a crash leaves of a first head, zeros or
            nothing, is unused.
    """
    head = parse(text)
    if text.strip("\0") and head != START:
        seen = "entries" if head is None else f"entry {head[0]}"
        raise LedgerError(
            f"{path}: damaged: it is empty, but {head_path(path).name} has seen {seen}; restore the newest copy"
            f"{without_log(path)}"
        )


def check(text: str, db: sqlite3.Connection, path: Path, last: int) -> None:
    """Refuse a ledger whose head is missing or names an entry that the chain lacks.

    Args:
        text: of the head; empty if there is none.
        last: number of the ledger's last entry; 0 if it is empty.

    Raises:
        LedgerError: the head is missing, empty or garbled; or entries were lost, or replaced by those of an old copy.
    """
    name, head = head_path(path).name, parse(text)
    if head is None:
        raise LedgerError(
            f"{path}: {name} is missing or unreadable, so entries may be missing at the end; put it back, "
            f"or see `fedpriv ledger adopt-head {path}`"
        )
    row = db.execute("SELECT digest FROM entries WHERE number = ?", head[:1]).fetchone()
    if head != START and (row is None or row[0] != head[1]):
        raise LedgerError(
            f"{path}: broken chain: ends at entry {last}, but {name} has seen entry {head[0]}{without_log(path)}"
        )


def check_missing(text: str, db: sqlite3.Connection, path: Path, last: int) -> None:
    """Refuse to adopt a ledger that has a head; arguments as for `check`.

    Raises:
        LedgerError: the head names an entry, which the chain has or lacks.
    """
    if parse(text) is not None:
        check(text, db, path, last)
        raise LedgerError(f"{path}: its head is there and agrees with the chain; there is nothing to adopt")

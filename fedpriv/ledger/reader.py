"""Read-only access to a ledger, and the verification of its chain of hashes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpriv.errors import LedgerError
from fedpriv.ledger import entries, head
from fedpriv.ledger.entries import Entry
from fedpriv.ledger.head import EMPTY_CHAIN

VERSION = 1
# Of a ledger with an `adopted` entry: a reader that does not know these would state its spending without reserve.
ADOPTED_VERSION = 2
# Of a ledger with an entry of a phase that came later: a reader that does not know it would state too little spending,
# or enforce another rule.
LATEST_VERSION = 3


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to the ledger, which another process may be writing at the same time.

    Raises:
        LedgerError: the file does not exist, is damaged or has another version.
    """
    if not path.is_file():
        raise LedgerError(f"{path}: no such ledger")
    with as_ledger_errors(path):
        db = _connect_to_read(path)
        try:
            yield db
        finally:
            db.close()


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that never changes the ledger; SQLite may write its own files beside it if it has the permission."""
    for options in ("mode=rw", "mode=ro&immutable=1"):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, timeout=10)
        try:
            db.execute("PRAGMA query_only = ON")
            check_version(db, path)
            return db
        except sqlite3.OperationalError:
            db.close()
            if "immutable" in options:
                raise
        except BaseException:
            db.close()
            raise
    raise AssertionError("unreachable")


def verify(db: sqlite3.Connection, path: Path) -> Entry | None:
    """The last entry of a ledger whose chain is intact from the first entry on; None if the ledger is empty.

    Raises:
        LedgerError: the chain is broken; names the first entry that was edited, moved or lost.
    """
    previous, last = EMPTY_CHAIN, None
    with as_ledger_errors(path):
        (quick_check,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if quick_check != "ok":
            raise LedgerError(f"{path}: damaged: {' '.join(quick_check.split())}")
        for number, entry in enumerate(entries.entries(db), start=1):
            if entry.number != number:
                raise LedgerError(f"{path}: broken chain: entry {number} is missing")
            if entry.digest != entry.chained_digest(previous):
                raise LedgerError(f"{path}: broken chain: entry {number} was changed after it was written")
            previous, last = entry.digest, entry
    return last


def verify_with_head(db: sqlite3.Connection, path: Path) -> Entry | None:
    """Like `verify`, and checks that PATH.head is there and names an entry of the chain.

    Raises:
        LedgerError: as for `verify` and `head.check`.
    """
    last = verify(db, path)
    # Read after the entries: it may name one that was appended since, and the check looks that one up.
    head.check(head.read_beside(path), db, path, last.number if last else 0)
    return last


def verify_without_head(db: sqlite3.Connection, path: Path) -> Entry | None:
    """Like `verify`, for a ledger whose head is missing or unreadable.

    Raises:
        LedgerError: as for `verify`; or the ledger has a head.
    """
    last = verify(db, path)
    head.check_missing(head.read_beside(path), db, path, last.number if last else 0)
    return last


def check_version(db: sqlite3.Connection, path: Path) -> int:
    """The version of the file.

    Raises:
        LedgerError: this fedpriv does not read that version.
    """
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if not VERSION <= version <= LATEST_VERSION:
        raise LedgerError(f"{path}: ledger version {version}: this fedpriv reads {VERSION} to {LATEST_VERSION}")
    return version


@contextmanager
def as_ledger_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into one-line `LedgerError`s; the caller has then released nothing."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise LedgerError(f"{path}: charged or released before ({error})") from None
    except (sqlite3.Error, OSError) as error:
        text = str(error).lower()
        if "readonly" in text or "read-only" in text or "permission denied" in text or "unable to open" in text:
            reason = "cannot be written (read-only?)"
        elif "full" in text or "disk i/o" in text or "no space" in text or "too large" in text:
            reason = "the disk is full or fails"
        elif "locked" in text:
            reason = "another process is writing it"
        elif "malformed" in text or "not a database" in text or "no such table" in text or "no such column" in text:
            reason = "damaged: truncated, or no ledger at all"
        else:
            reason = "cannot be used"
        raise LedgerError(f"{path}: {reason} ({error}); nothing is released") from None

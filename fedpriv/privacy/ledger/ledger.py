"""The ledger: a durable, append-only record, chained by hashes, of what was released on every data set.

A charge is on disk before anything is computed for it, and a reply before it is sent: a crash may over-count, never
under-count. Spending attaches to a registered random data set id and accumulates over runs.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Self

from fedpriv.errors import LedgerError
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger import head_file
from fedpriv.privacy.ledger.entries import (
    ADOPTED,
    ADOPTED_VERSION,
    BOUNDED,
    CHANGED,
    CHARGED,
    COLUMNS,
    LATEST_VERSION,
    PERMITTED,
    REGISTERED,
    VERSION,
    WITHDRAWN,
    Charge,
    DataSet,
    Key,
    LedgerConnection,
    Queries,
    as_stored,
    chained_digest,
)
from fedpriv.privacy.ledger.reader import as_ledger_errors, check_version, verify, write_copy
from fedpriv.privacy.ledger.receipts import Chain, Missing, chain_of, chains_of

# Entries that are written before they are read back: of many the rest need not be in memory.
_MOST_AT_ONCE = 1000

# The content of an entry, by column, of which a line has some.
_EMPTY: dict[str, Any] = dict.fromkeys(COLUMNS[:-1])


class Ledger(Queries):
    """A ledger file, opened by its only writer; a context manager.

    Opening it checks the whole chain, so nothing is released on top of an entry that was edited or lost.

    Args:
        path: an SQLite file, created if it does not exist. PATH.head next to it holds the number and digest of the last
            entry, so that entries missing at the end are noticed.
        adopting: why the operator vouches for a ledger whose head is missing: an `adopted` entry with this reason is
            appended, and the head is written again. None refuses such a ledger.

    Raises:
        LedgerError: another process keeps writing the file; it is read-only, damaged, edited, without its head or of
            another version; the disk is full; or there is nothing to adopt. One line that names the file and, for a
            broken chain, the entry.
    """

    def __init__(self, path: Path, *, adopting: str | None = None) -> None:
        self.path = path
        self._number, self._digest = head_file.START
        with as_ledger_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._head = head_file.opened(path)
        try:
            head_file.lock(self._head, path)
            with as_ledger_errors(path):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # a secret and replies are in it
                self._db = sqlite3.connect(path, isolation_level=None, timeout=10, factory=LedgerConnection)
            try:
                with as_ledger_errors(path):
                    self._prepare()
                    if adopting is None:
                        self._check_head()
                    else:
                        self._adopt(adopting)
            except BaseException:
                self._db.close()
                raise
        except BaseException:
            os.close(self._head)
            raise

    def _prepare(self) -> None:
        if self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise LedgerError(f"{self.path}: its file system cannot hold a write-ahead log; use a local disk")
        self._db.execute("PRAGMA synchronous = FULL")
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._create()
        else:
            # A first write shows at once whether the file can be written.
            with self._transaction():
                self._db.execute(f"PRAGMA user_version = {check_version(self._db, self.path)}")
        last = verify(self._db, self.path)
        if last is not None:
            self._number, self._digest = last.number, last.digest

    def _create(self) -> None:
        """Make the tables, after the head: see `head` for the order."""
        head_file.check_unused(head_file.read(self._head), self.path)
        head_file.begin(self._head, self.path)
        with self._transaction():
            self._db.create_tables()

    def _check_head(self) -> None:
        """Check the head, and bring it up to date if a crash left it behind."""
        text = head_file.read(self._head)
        head_file.check(text, self._db, self.path, self._number)
        if head_file.parse(text) != self.last:
            self._write_head()

    def _adopt(self, reason: str) -> None:
        """Log that the operator vouches for the entries so far, and write a head."""
        head_file.check_missing(head_file.read(self._head), self._db, self.path, self._number)
        self._append([{"phase": ADOPTED, "data_set": "", "client": "", "note": reason}], version=ADOPTED_VERSION)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let the next writer in."""
        self._db.close()
        os.close(self._head)

    @property
    def head(self) -> str:
        """Digest of the last entry: anyone who keeps it can tell later whether an earlier entry was changed."""
        return self._digest

    @property
    def last(self) -> tuple[int, str]:
        """Number and digest of the last entry."""
        return self._number, self._digest

    def _execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def register(
        self,
        client: str,
        num_records: int,
        delta: float,
        *,
        data_set: str | None = None,
        note: str | None = None,
        bound: str | None = None,
    ) -> DataSet:
        """Register a data set, which starts with nothing spent.

        Args:
            num_records: N_k >= 1, constant from now on.
            delta: in (0, 1).
            data_set: its id, if another ledger has assigned one; None draws a random id.
            note: if the client has registered data before, why this data set shares no record with them.
            bound: how its budget is enforced, see `bound`; None leaves that open until the first charge.
        """
        registered = DataSet(
            id=data_set or secrets.token_hex(16),
            **as_stored({"client": client, "num_records": num_records, "delta": delta}),
        )
        line = _registration(registered) | {"note": note}
        if bound is None:
            self._append([line])
        else:
            self._append([line, _bounded(registered, bound)], version=LATEST_VERSION)
        return registered

    def register_all(self, data_sets: Sequence[DataSet]) -> None:
        """Register data sets whose ids another ledger has assigned, all or none of them, as `register` does one."""
        self._append(map(_registration, data_sets))

    def bound(self, data_set: DataSet, note: str) -> None:
        """Record how the budget of a data set is enforced; the vault decides whether that may be.

        Args:
            data_set: registered here.
            note: of `fedpriv.privacy.accounting.filters.to_json`.
        """
        self._append([_bounded(data_set, note)], version=LATEST_VERSION)

    def permit(self, data_set: DataSet, run: str, note: str, *, withdraw: bool = False) -> None:
        """Record that the holder lets its own uploads of a run be published, or no longer does; the last entry counts.

        Args:
            run: id of the run.
            note: who said so, when and how.
            withdraw: whether this ends the permission.
        """
        phase = WITHDRAWN if withdraw else PERMITTED
        self._append([{"phase": phase, "data_set": data_set.id, "client": data_set.client, "run": run, "note": note}])

    def log_content(self, data_set: DataSet, content: bytes) -> bool:
        """Log the content of a data set if it has changed since it was last noted; the spending so far still counts.

        Returns:
            Whether the content differs from what was noted before.
        """
        changes, note = self.content_changes(data_set.id), self.content_note(content)
        if changes and changes[-1].note == note:
            return False
        self._append([{"phase": CHANGED, "data_set": data_set.id, "client": data_set.client, "note": note}])
        return bool(changes)

    def has_changed(self, data_set: DataSet, content: bytes) -> bool:
        """Whether the content of a data set differs from what was noted before; not if nothing was."""
        changes = self.content_changes(data_set.id)
        return bool(changes) and changes[-1].note != self.content_note(content)

    def data_set_with(self, content: bytes) -> str | None:
        """Id of the last data set of this ledger that was noted with this content; None if none was."""
        return self.data_set_noted(self.content_note(content))

    def content_note(self, content: bytes) -> str:
        """A hash of a data set's content, keyed with this ledger's secret; it never leaves the ledger."""
        return hashlib.blake2b(content, key=self._secret(), digest_size=32).hexdigest()

    def coin_key(self, data_set: DataSet) -> bytes:
        """A key that is the same whenever it is asked for, and that nobody knows without this ledger; 32 bytes.

        It decides what becomes of a data set's records; another data set has another.
        """
        return hashlib.blake2b(data_set.id.encode(), key=self._secret(), digest_size=32, person=b"coins").digest()

    def _secret(self) -> bytes:
        (key,) = self._db.execute("SELECT content_key FROM secret").fetchone()
        return bytes(key)

    def charge(self, charges: Sequence[Charge]) -> None:
        """Charge uploads, all or none of them; the charges are durable when this returns.

        Raises:
            LedgerError: one of them was charged before, or the charges cannot be written.
        """
        self._append([charge.line for charge in charges])

    def recover(self, missing: Sequence[Missing], reason: str) -> None:
        """Charge releases that this ledger lacks, all or none of them; those that nobody knows retire their data set.

        Args:
            reason: why the ledger lacks them, in the operator's words.

        Raises:
            LedgerError: they cannot be written.
        """
        self._append([line for each in missing for line in each.lines(reason)], version=LATEST_VERSION)

    def chain(self, data_set: str) -> Chain:
        """The chain of a data set's charges; see `fedpriv.privacy.ledger.receipts`."""
        return chain_of(self._db, data_set)

    def chains(self) -> list[Chain]:
        """The chains of all data sets."""
        return chains_of(self._db)

    def release(self, released: Sequence[tuple[Charge, str | None]]) -> None:
        """Record how charges ended: the rho_bar of their round, and the digest of each reply that arrived.

        Then the file itself has all entries, as far as readers let it, and not the log alone.
        """
        self._append([charge.line_of_release(reply) for charge, reply in released])
        with suppress(sqlite3.OperationalError):  # the entries are on disk already
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def store(self, key: Key, content: bytes, note: str | None = None) -> bytes:
        """Record the upload of a charge with its content, and return what to send: what was stored first for this key.

        Replies of the run's earlier rounds are deleted: a server repeats a request only within the current round.

        Args:
            note: on the content of the data set, where the vault read its records for the reply.

        Raises:
            LedgerError: the upload was never charged, or cannot be written.
        """
        if (stored := self.stored(key)) is not None:
            return stored
        row = self._db.execute(
            "SELECT data_set, event, rho_bar, aggregate_scale, noise_source FROM entries "
            "WHERE run = ? AND client = ? AND round = ? AND request = ? AND phase = 'charged'",
            _key_values(key),
        ).fetchone()
        if row is None:
            raise LedgerError(
                f"{self.path}: round {key.round} of client {key.client} was never charged; nothing is released"
            )
        release = Release(event=events.from_json(row[1]), rho_bar=row[2], aggregate_scale=row[3])
        charge = Charge(key=key, data_set=row[0], release=release, noise_source=row[4])
        with self._transaction():
            self._insert([charge.line_of_release(hashlib.sha256(content).hexdigest(), note)])
            self._db.execute("DELETE FROM replies WHERE run = ? AND client = ? AND round < ?", _key_values(key)[:3])
            self._db.execute("INSERT INTO replies VALUES (?, ?, ?, ?, ?)", (*_key_values(key), content))
        self._write_head()
        return content

    def phase(self, key: Key) -> str | None:
        """The state of the upload with this key: `charged`, `released`, or None if it is unknown."""
        # Alphabetically, `released` comes after `charged`.
        row = self._db.execute(
            "SELECT max(phase) FROM entries WHERE run = ? AND client = ? AND round = ? AND request = ?",
            _key_values(key),
        ).fetchone()
        phase: str | None = row[0]
        return phase

    def charged_data_set(self, key: Key) -> str | None:
        """Id of the data set that was charged for the upload with this key; None if the key was never charged."""
        row = self._db.execute(
            "SELECT data_set FROM entries WHERE run = ? AND client = ? AND round = ? AND request = ? AND phase = ?",
            (*_key_values(key), CHARGED),
        ).fetchone()
        return None if row is None else row[0]

    def stored(self, key: Key) -> bytes | None:
        """The content of the upload with this key, if it is still stored."""
        row = self._db.execute(
            "SELECT content FROM replies WHERE run = ? AND client = ? AND round = ? AND request = ?", _key_values(key)
        ).fetchone()
        return None if row is None else bytes(row[0])

    def copy(self, path: Path) -> None:
        """Write a copy of the ledger as it is now, with a head of its own."""
        write_copy(self._db, path)

    def _append(self, lines: Iterable[dict[str, Any]], *, version: int = VERSION) -> None:
        """Append entries, all or none of them; no reader opens the file any more that knows only older versions."""
        with self._transaction():
            self._insert(lines)
            if version > VERSION:
                self._db.execute(f"PRAGMA user_version = {max(version, check_version(self._db, self.path))}")
        self._write_head()

    def _insert(self, lines: Iterable[dict[str, Any]]) -> None:
        time, left = datetime.now(UTC).isoformat(timespec="milliseconds"), iter(lines)
        while some := list(islice(left, _MOST_AT_ONCE)):
            first, rows = self._number + 1, list[tuple[Any, ...]]()
            for line in some:
                content = _EMPTY | {"number": self._number + 1, "time": time} | as_stored(line)
                self._check_data_set(content["data_set"], content["phase"])
                self._number, self._digest = content["number"], chained_digest(self._digest, content)
                rows.append((*content.values(), self._digest))
                self._db.execute(f"INSERT INTO entries VALUES ({', '.join('?' * len(COLUMNS))})", rows[-1])
            if self._db.rows_from(first) != rows:
                raise LedgerError(f"{self.path}: SQLite keeps another entry than was hashed; nothing is written")

    def _check_data_set(self, id_: str, phase: str) -> None:
        """Refuse a charge on a data set that no reader would find, and to begin one again at zero."""
        asked = "SELECT EXISTS (SELECT 1 FROM entries WHERE data_set = ? AND phase = ?)"
        is_known = phase in (REGISTERED, CHARGED) and self._execute(asked, (id_, REGISTERED)).fetchone()[0]
        if phase == REGISTERED and is_known:
            raise LedgerError(f"{self.path}: data set {id_} is registered already, and keeps what it has spent")
        if phase == CHARGED and not is_known:
            raise LedgerError(f"{self.path}: data set {id_} is not registered here; register it before it is charged")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and on disk afterwards."""
        before = self.last
        with as_ledger_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                self._number, self._digest = before
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _write_head(self) -> None:
        """Write the head, after the commit: a crash in between leaves the ledger ahead of its head, never behind."""
        with as_ledger_errors(self.path):
            head_file.write(self._head, *self.last)


def _registration(data_set: DataSet) -> dict[str, Any]:
    """The fields of a data set's entry of phase `registered`."""
    fields = {"client": data_set.client, "num_records": data_set.num_records, "delta": data_set.delta}
    return {"phase": REGISTERED, "data_set": data_set.id, **fields}


def _bounded(data_set: DataSet, note: str) -> dict[str, Any]:
    """The fields of an entry of phase `bounded`."""
    return {"phase": BOUNDED, "data_set": data_set.id, "client": data_set.client, "note": note}


def _key_values(key: Key) -> tuple[str, str, int, str]:
    run, client, round_, request = as_stored(asdict(key)).values()
    return run, client, round_, request

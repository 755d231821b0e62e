"""The requests of a run to nodes without a network, and their answers, in one file next to the run's folder."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.files import new_file
from fedpriv.runs.files import run_folder_of

BY_FILE = ".by-file"
"""In place of `.pub`, ends the name of a file among the keys of vaults, which says that this node has no network, and
holds Flower's id of it. Behind the name of a run's folder, it is the name of the run's mailbox."""

_TABLES = """
CREATE TABLE run (id TEXT, node_keys TEXT, bundle TEXT, is_over INTEGER);
CREATE TABLE requests (number INTEGER PRIMARY KEY, message TEXT, client INTEGER, content BLOB, state TEXT, key BLOB,
    file BLOB, reply BLOB, taken TEXT);
"""


class Asked(NamedTuple):
    """A request in a mailbox.

    Attributes:
        number: among the run's requests, from 1.
        client: that is asked.
        state: `open`, `answered`, `left` (the operator goes on without the answer), or `over`.
        key: private, in PEM, for which the answer is to be sealed; None before the request is posted, or once it is
            over.
        taken: SHA-256 of the file that was taken as its answer; empty without one.
    """

    number: int
    client: int
    state: str
    key: bytes | None
    taken: str


class Mailbox:
    """The requests of one run to nodes without a network, and their answers.

    Attributes:
        path: of the file, which its owner alone can read.
        run: random id of the mailbox.
        node_keys: as in the run's configuration.
        bundle: SHA-256 of the run's code.

    Raises:
        InputError: there is none at the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"RUN = {path.with_suffix('')}: is no run that has asked nodes without a network")
        try:
            with self._open() as db:
                self.run, node_keys, self.bundle = db.execute("SELECT id, node_keys, bundle FROM run").fetchone()
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path}: is no mailbox of a run ({error})") from None
        self.node_keys = Path(node_keys)

    @staticmethod
    def of(run_folder: Path) -> Mailbox:
        """The mailbox of the run in this folder, which need not be there yet."""
        folder = run_folder.expanduser().absolute()
        return Mailbox(folder.with_name(folder.name + BY_FILE))

    @staticmethod
    def begun(config: RunConfig, bundle: str) -> Mailbox:
        """The mailbox of a run that begins, or goes on: what was asked before is over."""
        folder = run_folder_of(Path(config.resume or config.out))
        path = folder.with_name(folder.name + BY_FILE)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path, mode=0o600) as file, closing(sqlite3.connect(file.name)) as db, db:
                db.executescript(_TABLES)
                db.execute("INSERT INTO run VALUES (?, ?, ?, 0)", (uuid.uuid4().hex, config.node_keys, bundle))
        mailbox = Mailbox(path)
        with mailbox._open() as db:
            db.execute("UPDATE run SET is_over = 0, node_keys = ?, bundle = ?", (config.node_keys, bundle))
        mailbox._end(("open", "answered", "left"))
        return Mailbox(path)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=60)) as db, db:
            db.execute("PRAGMA secure_delete = ON")
            yield db

    def _end(self, states: Collection[str], clients: Collection[int] | None = None) -> None:
        """Nobody waits any more for the answers of these clients, or of all, in these states."""
        with self._open() as db:
            for number, client, state in db.execute("SELECT number, client, state FROM requests").fetchall():
                if state in states and (clients is None or client in clients):
                    _forget(db, number)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        with self._open() as db:
            return bool(db.execute("SELECT is_over FROM run").fetchone()[0])

    def end(self) -> None:
        """The run has ended."""
        self._end(("open", "answered", "left"))
        with self._open() as db:
            db.execute("UPDATE run SET is_over = 1")

    def ask(self, requests: Mapping[str, tuple[int, bytes]]) -> None:
        """Put in {message: (client, content)}; an earlier request to one of these clients is over."""
        self._end(("open", "left"), {client for client, _ in requests.values()})
        with self._open() as db:
            db.executemany(
                "INSERT INTO requests (message, client, content, state, taken) VALUES (?, ?, ?, 'open', '')",
                [(message, client, content) for message, (client, content) in requests.items()],
            )

    def take(self, messages: Collection[str]) -> dict[str, bytes | None]:
        """{message: its answer}, of those of these messages that have one by now; None for one that is left."""
        with self._open() as db:
            found = db.execute(
                "SELECT message, number, reply FROM requests WHERE state IN ('answered', 'left') ORDER BY number"
            ).fetchall()
            for message, number, _ in found:
                if message in messages:
                    _forget(db, number)
        return {message: reply for message, _, reply in found if message in messages}

    def asked(self) -> dict[int, Asked]:
        """All requests, by number."""
        names = ", ".join(Asked._fields)
        with self._open() as db:
            return {row[0]: Asked(*row) for row in db.execute(f"SELECT {names} FROM requests ORDER BY number")}

    def content(self, number: int) -> tuple[bytes, bytes | None]:
        """A request that is open, as `Request.packed` makes it; and its file, if it was posted before."""
        with self._open() as db:
            content, file = db.execute("SELECT content, file FROM requests WHERE number = ?", (number,)).fetchone()
            return content or b"", file

    def post(self, number: int, key: bytes, file: bytes) -> bytes:
        """Note what is carried, and return it: that of the first call, whoever calls again."""
        with self._open() as db:
            db.execute("UPDATE requests SET key = ?, file = ? WHERE number = ? AND file IS NULL", (key, file, number))
        return self.content(number)[1] or file

    def answer(self, number: int, reply: bytes, digest: str) -> bool:
        """Put in the answer to a request; False if it is not open any more."""
        with self._open() as db:
            change = "UPDATE requests SET state = 'answered', reply = ?, taken = ? WHERE number = ? AND state = 'open'"
            return db.execute(change, (reply, digest, number)).rowcount == 1

    def leave(self, number: int) -> None:
        """Go on without the answer to a request, if it has none."""
        with self._open() as db:
            db.execute("UPDATE requests SET state = 'left' WHERE number = ? AND state = 'open'", (number,))


def _forget(db: sqlite3.Connection, number: int) -> None:
    """A request is over, and all of it is gone but its number and that it was answered."""
    forgotten = "state = 'over', content = NULL, key = NULL, file = NULL, reply = NULL"
    db.execute(f"UPDATE requests SET {forgotten} WHERE number = ?", (number,))

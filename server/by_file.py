"""Nodes without a network: their messages wait in a mailbox for somebody who carries them; all others go by network.

A run with such nodes has a mailbox next to its folder. The run puts requests in and takes replies out, and the commands
`post` and `collect` of its operator exchange them for sealed files. Rounds, sums and ledgers do not know of it.
"""

from __future__ import annotations

import copy
import sqlite3
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.files import new_file, read_text
from fedpriv.holder.wire.frame import FAILED, FRAME, OWN, Request, Response, Scalars, carried, frame_in
from fedpriv.privacy.ledger import keys
from fedpriv.runs.files import run_folder_of
from server.exchange import Exchange, set_message_id

BY_FILE = ".by-file"
"""In place of `.pub`, ends the name of a file among the keys of vaults, which says that this node has no network, and
holds Flower's id of it. Behind the name of a run's folder, it is the name of the run's mailbox."""

# The id in whose name Flower's link says that it gave up on a node.
_LINK = 1

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


class MixedGrid(Grid):
    """A grid of which some nodes are reached by file.

    Args:
        network: reaches all others.
        clients: {node id: partition id} of those by file.
        run_config: of the run, as Flower gives it to nodes.
        mailbox: of the run.
    """

    def __init__(self, network: Grid, clients: Mapping[int, int], run_config: Scalars, mailbox: Mailbox) -> None:
        self._network, self._clients, self._run_config, self.mailbox = network, clients, run_config, mailbox
        self._sent: dict[str, Message] = {}
        self._leaves = False

    def goes_on(self) -> bool:
        """Whether the operator has said, since messages were sent last, not to wait for those that are missing."""
        return self._leaves

    def set_run(self, run: Any) -> None:
        """Set the run that this grid works for."""
        self._network.set_run(run)

    @property
    def run(self) -> Any:
        """The run that this grid works for."""
        return self._network.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        """A message to a node."""
        return self._network.create_message(*arguments, **options)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are online, and all by file."""
        return list(dict.fromkeys([*self._network.get_node_ids(), *self._clients]))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages by network, and put those to nodes by file into the mailbox, each with an id of its own."""
        messages = list(messages)
        here = [message for message in messages if message.metadata.dst_node_id in self._clients]
        if others := [message for message in messages if message.metadata.dst_node_id not in self._clients]:
            self._network.push_messages(others)
        for message in here:
            set_message_id(message, uuid.uuid4().hex)
        if here:
            self._leaves = False
            sent = {message.metadata.message_id: message for message in here}
            self.mailbox.ask({id_: self._packed(message) for id_, message in sent.items()})
            self._sent |= sent
        return [message.metadata.message_id for message in messages]

    def _packed(self, message: Message) -> tuple[int, bytes]:
        """The client that a message is for, and the request that its vault is to be handed."""
        own: Any = message.content.config_records.get(OWN, {})
        request = Request(frame=frame_in(message.content.array_records), run_config=self._run_config, own=dict(own))
        return self._clients[message.metadata.dst_node_id], request.packed()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there by now; each is handed out once."""
        ids = set(message_ids)
        taken = self.mailbox.take(by_file) if (by_file := ids & self._sent.keys()) else {}
        replies = [_reply(self._sent.pop(id_), answer) for id_, answer in taken.items()]
        self._leaves |= None in taken.values()
        return [*replies, *(self._network.pull_messages(others) if (others := ids - by_file) else ())]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send the messages, and return the replies that arrive within this time."""
        return list(Exchange().replies(self, list(messages), float("inf") if timeout is None else timeout))


def _reply(message: Message, answer: bytes | None) -> Message:
    """The reply to a message, or without an answer the link's word that there is none."""
    if answer is None:
        of_link = copy.deepcopy(message)
        of_link.metadata.dst_node_id = _LINK
        return Message(
            Error(FAILED, "no answer came by file, and the coordinator goes on without it"), reply_to=of_link
        )
    response = Response(answer)
    if response.code:
        return Message(Error(response.code, response.reason), reply_to=message)
    return Message(RecordDict({FRAME: ArrayRecord({FRAME: Array(**carried(answer))})}), reply_to=message)


@contextmanager
def mixed(network: Grid, config: RunConfig, run_config: Scalars) -> Iterator[Grid]:
    """The grid of a run; the network's own if no admitted node is by file."""
    found = keys.files_of_nodes(Path(config.node_keys), BY_FILE) if config.node_keys else {}
    if not found:
        yield network
        return
    clients = {int(read_text(file)): client for client, file in found.items()}
    mailbox = Mailbox.begun(config, network.run.fab_hash)
    try:
        yield MixedGrid(network, clients, run_config, mailbox)
    finally:
        mailbox.end()

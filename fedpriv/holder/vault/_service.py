"""The vault as a process of the data holder's own: records, ledger, keys, guard and model, behind a Unix socket.

The service itself only carries frames between a socket and a child process, one at a time. If the child is killed
before it has been charged, another takes its place and gets the same frame again; later, the node closes.

From a charge on, nothing leaves before the public time that the child has named, whatever becomes of the child; nor is
anything else answered or even received before, which would tell how long the records took, or make it longer. What is
said of an answer after its charge may depend on records too, so it takes one room whatever it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fedpriv.errors import InputError
from fedpriv.files import replace_file, sync_folder, user_named
from fedpriv.holder.vault.settings import CLOSED, VaultSettings
from fedpriv.holder.wire.frame import FAILED, REFUSED, FrameError, Request, Response, peer_uid, receive

_REASON = "a process of its vault was ended or killed while it worked on records"

log = logging.getLogger(__name__)
# Takes what is said of an answer after its charge.
private = logging.getLogger(f"{__name__}.private")

# So often a frame is tried before its charge.
_ATTEMPTS = 3
_MAX_CONNECTIONS = 256
# One frame of a socket is received and answered at a time, and must arrive within this time.
_FRAME_SECONDS = 60.0
_IDLE_SECONDS = 30.0
# Of sun_path in sockaddr_un, with its final zero.
_MAX_PATH_BYTES = 107


# Libraries compute the same product alike each time, in teams of fixed size; read when torch is loaded. A tokenizer is
# as fast where its time is measured as in a forked process, which has none of its threads.
ENVIRONMENT = {
    "MKL_CBWR": "AUTO",
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    "TOKENIZERS_PARALLELISM": "false",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

_RING_BYTES = 2**18
_FORMAT = "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"

# The first byte of what the worker sends: the request is charged and records will be touched next; or the response.
CHARGED = b"c"
ANSWERED = b"a"

# After CHARGED: T, the seconds after which the response may leave, or else after 2 T, 4 T and so on; 0 for at once.
SECONDS = struct.Struct("!d")


class Ring(logging.Handler):
    """Keeps the last lines in a file of one size, whatever they are and however many; for its owner alone.

    The newest line is the last, and blank ones fill the rest. Processes may add lines at the same time.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        formatter = logging.Formatter(*_FORMAT)
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def make(self) -> None:
        """Make the file, unless it is there, and take all of its room.

        Raises:
            OSError: there is none.
        """
        self._add(b"", os.O_CREAT)

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line; where there is no file the line is lost, since none may be made now."""
        with suppress(OSError):
            self._add(f"{self.format(record)}\n".encode(errors="replace")[-_RING_BYTES // 2 :], 0)

    def _add(self, lines: bytes, flags: int) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file).st_size
            if size != _RING_BYTES:
                os.posix_fallocate(file, 0, _RING_BYTES)
                os.fsync(file)
            elif not lines:
                return
            # Without the line of which only a part is left.
            _, _, kept = (os.pread(file, size, 0) + lines)[-_RING_BYTES:].partition(b"\n")
            os.pwrite(file, kept.rjust(_RING_BYTES, b"\n"), 0)
            os.ftruncate(file, _RING_BYTES)
        finally:
            os.close(file)


@contextmanager
def heard_by(ring: Ring) -> Iterator[None]:
    """Within this context, what this process logs goes to the ring, and what libraries print goes nowhere.

    So nothing of it reaches a log that grows, such as a service manager's.
    """
    with suppress(OSError):  # where there is no room, the lines are lost
        ring.make()
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    outputs = sys.stdout, sys.stderr
    for output in outputs:
        output.flush()
    kept, nowhere = [os.dup(number) for number in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    try:
        root.handlers[:] = [ring]
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for output in outputs:
            output.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
        root.handlers[:] = before
        for file in (*kept, nowhere):
            os.close(file)


@dataclass(frozen=True)
class Closing:
    """The files that say that a node works on records, or that it is closed.

    A node closes if a process of its vault dies while it works on records, or with records in memory. A marker lies on
    disk from before the records are touched until the reply may leave, whose time is public. If the vault ends in
    between, whatever ended it, its next start finds the marker, and the node is closed until its operator has looked.
    Others then learn at most once that it did, and a restart at another time shows them nothing.

    Attributes:
        marker: of work on records.
        closed: closes the node while it exists; it says why.
    """

    marker: Path
    closed: Path

    @staticmethod
    def of(settings: VaultSettings) -> Closing:
        """Those of a node's folder."""
        return Closing(settings.folder / "working", settings.closed)

    def begin(self) -> None:
        """Note durably that records will be touched.

        Raises:
            OSError: that cannot be written, so they must not be.
        """
        replace_file(self.marker, f"{_REASON}\n".encode(), mode=0o600)
        sync_folder(self.marker)

    def end(self) -> None:
        """Take note that a reply may leave, whatever became of the records."""
        self.marker.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the node, durably.

        Raises:
            OSError: that cannot be written, so nothing may be answered any more.
        """
        if not self.marker.exists():  # records were in memory only
            self.begin()
        self.marker.replace(self.closed)
        sync_folder(self.closed)
        log.error("this node is closed: %s; look at its log and its records before you open it again", _REASON)

    def close_if_left(self) -> None:
        """Close the node if its vault ended while it worked on records."""
        if self.marker.exists():
            self.close()


class _Hold:
    """Until when an answer must wait: T after its charge, or 2 T, 4 T and so on; not at all without a charge."""

    def __init__(self) -> None:
        self._begin = self._seconds = 0.0

    def begin(self, seconds: float) -> None:
        """Count from now on."""
        self._begin, self._seconds = time.monotonic(), seconds

    def wait(self) -> None:
        """Return at the next of these times: doubled, they tell less of how long the work took than multiples would."""
        if not self._seconds:
            return
        taken = time.monotonic() - self._begin
        if taken > self._seconds:
            private.warning(
                "an answer took %.2f s, longer than the %.2f s after which it was to leave; a larger reply_seconds in "
                "vault.toml keeps such answers from being told apart",
                taken,
                self._seconds,
            )
        leaves = self._seconds
        while leaves < taken:
            leaves *= 2
        time.sleep(leaves - taken)


class Worker:
    """The child process that answers frames; it is started when first asked, and again after it has died.

    Args:
        folder: of the node.
        closing: closes the node if the child dies once there may be records in its memory.
        run: the child's program.
    """

    def __init__(self, folder: Path, closing: Closing, run: Callable[[Connection, Path], None] | None = None) -> None:
        self._folder = folder
        self._run = run or run_worker
        self._closing = closing
        self._lock, self._is_ending = threading.Lock(), False
        self._context = multiprocessing.get_context("spawn")
        closing.close_if_left()
        self._start()

    def _start(self) -> None:
        self._may_have_records = False
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=self._run, args=(theirs, self._folder), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, frame: bytes) -> bytes:
        """The frame that answers this one, at a public time after its charge.

        Raises:
            OSError: there is no answer, since the child is to end, or the node cannot be closed as it must be.
        """
        with self._lock:
            if self._is_ending:
                raise ConnectionAbortedError("the vault ends")
            hold = _Hold()
            answer = self._answer(frame, hold)
            hold.wait()
            self._closing.end()
            return answer

    def _answer(self, frame: bytes, hold: _Hold) -> bytes:
        for _ in range(_ATTEMPTS):
            try:
                self._connection.send_bytes(frame)
                while (message := self._connection.recv_bytes())[:1] != ANSWERED:
                    (seconds,) = SECONDS.unpack(message[1:])
                    self._may_have_records |= seconds > 0
                    hold.begin(seconds)
                return message[1:]
            except (EOFError, OSError):
                self._process.kill()
                self._process.join()
                said = private if self._may_have_records else log
                said.error("the vault's child process ended with exit code %s", self._process.exitcode)
            if self._is_ending:  # a marker that is left closes the node at its next start
                raise ConnectionAbortedError("the vault ends")
            if self._may_have_records:
                self._closing.close()  # before there is another child
                self._start()
                return Response.of(code=REFUSED, reason=f"refused: {CLOSED}").frame
            self._start()
        return Response.of(code=FAILED, reason="failed; this node's log says why").frame

    def stop(self) -> None:
        """End the child; after a charge once the reply may leave, so that no record decides what is left behind.

        The reply is stored, and sent when it is asked for again.
        """
        self._is_ending = True
        self._process.terminate()
        if self._lock.locked():
            log.info("the vault ends; if it has charged a request, when its reply may leave")
        with self._lock:
            self._process.kill()
            self._process.join()


def serve(settings: VaultSettings, say: Callable[[str], None]) -> None:
    """Answer on the vault's socket until SIGINT or SIGTERM ends this process, with exit code 0; see `Worker.stop`.

    Args:
        settings: of the vault.
        say: prints a line; called once, when the vault listens.

    Raises:
        InputError: another vault listens there, a path is too long, or the user of the ClientApp is unknown.
    """
    private.propagate, private.handlers = False, [Ring(settings.log)]
    own = {os.geteuid()}
    users = own | ({user_named(settings.client_user).uid} if settings.client_user else set())
    listener = _listener(settings.socket, mode=0o600 if users == own else 0o666)
    worker = Worker(settings.folder, Closing.of(settings))

    def stop(_number: int, _frame: FrameType | None) -> None:
        settings.socket.unlink(missing_ok=True)
        worker.stop()
        os._exit(0)  # threads may wait for a client, or for the child

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    say(f"vault listens on {settings.socket}")
    _accept(listener, users, worker)


def _accept(listener: socket.socket, users: set[int], worker: Worker) -> NoReturn:
    """Answer every connection of these users, for ever."""
    connections, turn = threading.Semaphore(_MAX_CONNECTIONS), threading.Lock()

    def converse(connection: socket.socket) -> None:
        try:
            if peer_uid(connection) in users:
                _converse(connection, worker, turn)
            else:
                log.warning("refused: a process of user %s", peer_uid(connection))
        finally:
            connection.close()
            connections.release()

    while True:
        connections.acquire()
        connection, _ = listener.accept()
        threading.Thread(target=converse, args=(connection,), daemon=True).start()


def _converse(connection: socket.socket, worker: Worker, turn: threading.Lock) -> None:
    """Answer the frames of one connection until it ends, in whatever way."""
    connection.settimeout(_IDLE_SECONDS)
    with contextlib.suppress(OSError):  # a client that goes away is its own affair
        while connection.recv(1, socket.MSG_PEEK):  # only a client that sends something waits for its turn
            # Until the answer is sent: there is one frame in memory at a time, and none comes while another is held.
            with turn:
                try:
                    frame = receive(connection, seconds=_FRAME_SECONDS)
                    if frame is None:
                        return
                    answer = worker.answer(frame)
                except FrameError as error:  # what follows cannot be told from the rest of this frame
                    connection.sendall(Response.of(code=REFUSED, reason=f"refused: {error}").frame)
                    return
                connection.settimeout(_IDLE_SECONDS)
                connection.sendall(answer)


def _listener(path: Path, *, mode: int) -> socket.socket:
    """A listening socket at the path, where a vault that has died may have left one."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise InputError(
            f"socket = {path}: a Unix socket's path has at most {_MAX_PATH_BYTES} bytes; use a shorter one"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise InputError(f"socket = {path}: another vault listens there")
    if path.is_socket() and not path.is_symlink():
        path.unlink()
    elif os.path.lexists(path):
        raise InputError(f"socket = {path}: exists and is no socket; give another path, or move it away first")
    listener = socket.socket(socket.AF_UNIX)
    old = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
    finally:
        os.umask(old)
    listener.listen(_MAX_CONNECTIONS)
    return listener


def run_worker(connection: Connection, folder: Path) -> None:
    """Answer a coordinator's frames until the other end closes.

    Args:
        connection: to the service.
        folder: of the node.
    """
    _prepare_process(folder)
    # These load torch, which the service itself does without.
    from fedpriv.holder.vault import history
    from fedpriv.holder.vault._apart import Apart, compute
    from fedpriv.holder.vault.answer import answer
    from fedpriv.holder.vault.holder import Holder, NodeHolder

    note_changes = history.watch(folder)
    note_changes()  # even of settings that cannot be read
    settings = VaultSettings.read(folder)
    closing, ring, heard = Closing.of(settings), Ring(settings.log), ExitStack()
    is_charged = False

    def end(*_: object) -> None:
        if not is_charged:
            os._exit(0)

    def charged(reply_seconds: float) -> None:
        nonlocal is_charged
        is_charged = True
        heard.enter_context(heard_by(ring))
        if reply_seconds:
            closing.begin()
        connection.send_bytes(CHARGED + SECONDS.pack(reply_seconds))

    holder = replace(Holder.of(settings), before_records=charged)
    apart = Apart(holder)
    if isinstance(holder, NodeHolder):
        holder = replace(holder, apart=apart if settings.device == "cpu" else partial(compute, holder))

    def answered(request: Request) -> Response:
        nonlocal is_charged
        is_charged = False
        apart.check()
        note_changes()  # approvals and peers count from the next request on
        with heard:
            return answer(request, holder)

    signal.signal(signal.SIGTERM, end)  # from the service
    _answer_frames(connection, answered)


def _prepare_process(folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    with contextlib.suppress(InputError):  # settings that cannot be read are told by whoever needs them
        if VaultSettings.read(folder).device == "cpu":  # a process that could use a GPU cannot fork workers
            os.environ.update({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
    from fedpriv.learning.training.independence import compute_alike  # loads torch, which reads the environment

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file shows what a process that was killed had in memory
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides when its child ends
    threading.Thread(target=_end_with_service, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.captureWarnings(True)
    compute_alike()


def _end_with_service() -> None:
    """End with the service, in a pass too: a charge whose reply could not leave closes the node at its next start."""
    service = multiprocessing.parent_process()
    assert service is not None
    service.join()
    os._exit(1)


def _answer_frames(connection: Connection, answer: Callable[[Request], Response]) -> None:
    while True:
        try:
            frame = connection.recv_bytes()
        except EOFError:
            return
        try:
            response = answer(Request.unpacked(frame))
        except FrameError as error:
            response = Response.of(code=REFUSED, reason=f"refused: {error}")
        connection.send_bytes(ANSWERED + response.frame)

"""The vault as a process of the data holder's own: records, ledger, keys, guard and model, behind a Unix socket.

The service itself only carries frames between a socket and a child process, one at a time. If the child is killed,
another takes its place and gets the same frame again: the ledger then knows whether the request was charged, and if it
was, the answer is noise alone. Updates of other frameworks come on a second socket, to a child of their own.

From a charge on, nothing leaves before the public time that the child has named, whatever becomes of the child; nor
does anything else get an answer before, which would tell how long the records took.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fedpriv.deployment.users import user_named
from fedpriv.errors import InputError
from fedpriv.vault._ring import Ring, heard_by
from fedpriv.vault.frames import (
    FAILED,
    REFUSED,
    FrameError,
    Request,
    Response,
    pack_response,
    peer_uid,
    receive,
    unpack_request,
)
from fedpriv.vault.settings import VaultSettings

log = logging.getLogger(__name__)
# Takes what is said of an answer after its charge.
private = logging.getLogger(f"{__name__}.private")

# A frame may be tried before its charge, again if that attempt died, and once more for noise alone.
_ATTEMPTS = 3
_MAX_CONNECTIONS = 256
# Frames may be large, so only some are read and answered at the same time, and each must arrive within this time.
_MAX_READERS = 8
_FRAME_SECONDS = 60.0
_IDLE_SECONDS = 30.0
# Of sun_path in sockaddr_un, with its final zero.
_MAX_PATH_BYTES = 107


# Libraries compute the same product alike each time, in teams of fixed size; read when torch is loaded.
ENVIRONMENT = {
    "MKL_CBWR": "AUTO",
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

# The first byte of what the worker sends: the request is charged and records will be touched next; or the response.
CHARGED = b"c"
ANSWERED = b"a"

# After CHARGED: the seconds after which, or after a multiple of which, the response may leave; 0 for at once.
SECONDS = struct.Struct("!d")


class _Hold:
    """Until when an answer must wait: the next multiple of T after its first charge; not at all without a charge."""

    def __init__(self) -> None:
        self._begin = self._seconds = 0.0

    def begin(self, seconds: float) -> None:
        """Count from now on; a request that is tried again is counted from the first time."""
        if not self._seconds:
            self._begin, self._seconds = time.monotonic(), seconds

    def wait(self) -> None:
        """Return at the next multiple of T."""
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
        time.sleep(max(1, math.ceil(taken / self._seconds)) * self._seconds - taken)


class Worker:
    """The child process that answers frames; it is started when first asked, and again after it has died.

    Args:
        folder: of the node.
        on_death: called with a line when the child died while it worked on records.
        run: the child's program.
    """

    def __init__(
        self, folder: Path, on_death: Callable[[str], None], run: Callable[[Connection, Path], None] | None = None
    ) -> None:
        self._folder = folder
        self._run = run or run_worker
        self._on_death = on_death
        self._lock = threading.Lock()
        self._context = multiprocessing.get_context("spawn")
        self.start()

    def start(self) -> None:
        """Start a child."""
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=self._run, args=(theirs, self._folder), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, frame: bytes) -> bytes:
        """The frame that answers this one, at a public time after its charge."""
        with self._lock:
            hold = _Hold()
            answer = self._answer(frame, hold)
            hold.wait()
            return answer

    def _answer(self, frame: bytes, hold: _Hold) -> bytes:
        died_on_records = False
        for _ in range(_ATTEMPTS):
            charged = False
            try:
                self._connection.send_bytes(frame)
                while (message := self._connection.recv_bytes())[:1] != ANSWERED:
                    charged = True
                    hold.begin(*SECONDS.unpack(message[1:]))
            except (EOFError, OSError):
                self._process.join()
                died_on_records |= charged
                said = private if charged else log
                said.error("the vault's child process ended with exit code %s", self._process.exitcode)
                self.start()
            else:
                if died_on_records:
                    self._on_death("its child process was killed while it worked on records")
                return message[1:]
        if died_on_records:
            self._on_death("its child process was killed again and again")
        return pack_response(Response(code=FAILED, reason="failed; this node's log says why"))

    def stop(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.join()


def serve(settings: VaultSettings, say: Callable[[str], None]) -> None:
    """Answer on the vault's socket until SIGINT or SIGTERM ends this process, with exit code 0.

    Args:
        settings: of the vault.
        say: prints a line; called once, when the vault listens.

    Raises:
        InputError: another vault listens there, a path is too long, or the user of the ClientApp is unknown.
    """
    private.propagate, private.handlers = False, [Ring(settings.log)]
    own = {os.geteuid()}
    users = own | ({user_named(settings.client_user).uid} if settings.client_user else set())
    listeners = [_listener(settings.socket, mode=0o600 if users == own else 0o666)]
    workers = [Worker(settings.folder, lambda reason: _close_node(settings.closed, reason))]
    if settings.updates is not None:
        listeners.append(_listener(settings.updates_socket, mode=0o600))
        workers.append(Worker(settings.folder, log.error, run_update_worker))

    def stop(_number: int, _frame: FrameType | None) -> None:
        for listener, worker in zip(listeners, workers, strict=True):
            Path(listener.getsockname()).unlink(missing_ok=True)
            worker.stop()
        os._exit(0)  # threads may wait for a client, or for the child

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    for listener, worker in list(zip(listeners, workers, strict=True))[1:]:
        threading.Thread(target=_accept, args=(listener, own, worker), daemon=True).start()
    say(f"vault listens on {' and '.join(listener.getsockname() for listener in listeners)}")
    _accept(listeners[0], users, workers[0])


def _accept(listener: socket.socket, users: set[int], worker: Worker) -> NoReturn:
    """Answer every connection of these users, for ever."""
    connections, readers = threading.Semaphore(_MAX_CONNECTIONS), threading.Semaphore(_MAX_READERS)

    def converse(connection: socket.socket) -> None:
        try:
            if peer_uid(connection) in users:
                _converse(connection, worker, readers)
            else:
                log.warning("refused: a process of user %s", peer_uid(connection))
        finally:
            connection.close()
            connections.release()

    while True:
        connections.acquire()
        connection, _ = listener.accept()
        threading.Thread(target=converse, args=(connection,), daemon=True).start()


def _converse(connection: socket.socket, worker: Worker, readers: threading.Semaphore) -> None:
    """Answer the frames of one connection until it ends, in whatever way."""
    connection.settimeout(_IDLE_SECONDS)
    with contextlib.suppress(OSError):  # a client that goes away is its own affair
        while connection.recv(1, socket.MSG_PEEK):  # only a client that sends something waits for its turn
            try:
                # Until it is answered, so that not more than a few frames are in memory at a time.
                with readers:
                    frame = receive(connection, seconds=_FRAME_SECONDS)
                    answer = worker.answer(frame) if frame is not None else None
            except FrameError as error:  # what follows cannot be told from the rest of this frame
                connection.sendall(pack_response(Response(code=REFUSED, reason=f"refused: {error}")))
                return
            if answer is None:
                return
            connection.settimeout(_IDLE_SECONDS)
            connection.sendall(answer)


def _close_node(marker: Path, reason: str) -> None:
    log.error("this node is closed: %s; look at its log and its records before you open it again", reason)
    marker.write_text(f"{reason}\n")


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
    from fedpriv.ledger import history
    from fedpriv.vault.answer import answer
    from fedpriv.vault.holder import Holder

    note_changes = history.watch(folder)
    note_changes()  # even of settings that cannot be read
    settings = VaultSettings.read(folder)
    ring, heard = Ring(settings.log), ExitStack()

    def charged(reply_seconds: float) -> None:
        heard.enter_context(heard_by(ring))
        connection.send_bytes(CHARGED + SECONDS.pack(reply_seconds))

    holder = replace(Holder.of(settings), before_records=charged)

    def answered(request: Request) -> Response:
        note_changes()  # approvals and peers count from the next request on
        with heard:
            return answer(request, holder)

    _answer_frames(connection, answered)


def run_update_worker(connection: Connection, folder: Path) -> None:
    """Answer frames with updates of other frameworks until the other end closes.

    Args:
        connection: to the service.
        folder: of the node.
    """
    _prepare_process(folder)
    from fedpriv.vault._updates import UpdateGuard, release  # loads torch

    settings = VaultSettings.read(folder)
    guard = UpdateGuard.of(settings)
    with heard_by(Ring(settings.log)):
        _answer_frames(connection, lambda request: release(request, guard))


def _prepare_process(folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    with contextlib.suppress(InputError):  # settings that cannot be read are told by whoever needs them
        if VaultSettings.read(folder).device == "cpu":  # a process that could use a GPU cannot fork workers
            os.environ.update({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
    from fedpriv.training.workers import compute_alike  # loads torch, which reads the environment

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file shows what a process that was killed had in memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when its child ends
    threading.Thread(target=_end_with_service, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.captureWarnings(True)
    compute_alike()


def _end_with_service() -> None:
    """End with the service, in a pass too: the next one answers with noise alone what was charged and not stored."""
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
        request = _request(frame)
        if isinstance(request, FrameError):
            response = Response(code=REFUSED, reason=f"refused: {request}")
        else:
            response = answer(request)
        connection.send_bytes(ANSWERED + pack_response(response))


def _request(frame: bytes) -> Request | FrameError:
    try:
        return unpack_request(frame)
    except FrameError as error:
        return error

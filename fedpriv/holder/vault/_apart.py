"""The process that has a node's records, apart from the one that answers, which has none.

What precedes a charge is done where no record is: checks, the ledger, the rehearsal and what it measures. Neither the
time of a refusal nor the public time of a reply then depends on a record. For each release that may read the records,
a process is forked that has the model, the caches' room and the libraries' kernels as the rehearsal left them. It stays
for as long as releases find in it what they need.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from fedpriv.errors import is_memory_failure
from fedpriv.files import trace_without_message
from fedpriv.holder.vault import _records
from fedpriv.holder.vault.holder import Holder, RecordsToRead
from fedpriv.learning.training.independence import die, forked
from fedpriv.learning.training.local_update import ClientUpdate, UpdateTask
from fedpriv.learning.training.stacked import execute_one_by_one
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.mechanisms.sources import SecureSource

log = logging.getLogger(__name__)

_secure = SecureSource()


def compute(
    holder: Holder, bench: Workbench, task: UpdateTask, reading: RecordsToRead, _room: ExitStack | None = None
) -> ClientUpdate | Exception:
    """The result of a task on the records that it reads; if memory runs out, this process dies.

    Args:
        holder: of the node.
        bench: of the run.
        task: charged, without records.
        reading: its records.
    """
    update: ClientUpdate | Exception
    try:
        data = _records.of_release(reading, bench, holder)
        (update,) = execute_one_by_one(bench.model, [replace(task, data=data)])
    except Exception as error:
        update = error
    if isinstance(update, Exception):
        log.error("failed: %s", trace_without_message(update))
        if is_memory_failure(update):  # what else is in memory must not decide what is released
            die()
        if not reading.aside:
            bench.forget_records()
    return update


class Apart:
    """Computes releases in a process that it forks for the records; if that dies, so does this one.

    Args:
        holder: of the node, whose device is the CPU: a process that has used a GPU cannot be forked.
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._connection: Connection | None = None
        self._child = 0
        self._end: weakref.finalize[Any, Any] | None = None

    def __call__(
        self, bench: Workbench, task: UpdateTask, reading: RecordsToRead, room: ExitStack
    ) -> ClientUpdate | Exception:
        """As `compute`; a new process reads the records if the reply has the time, else it is the last one."""
        if reading.may_begin or self._connection is None:
            self._begin(bench, room)
        assert self._connection is not None
        try:
            self._connection.send_bytes(_packed((task, reading)))
            update, bench.content_note = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            log.error("the process with the records ended")
            die()
        return update or RuntimeError("the lines above say why")

    def check(self) -> None:
        """Die if the process with the records has died meanwhile: what it needed of memory is no affair of others."""
        if self._end and self._end.alive and os.waitpid(self._child, os.WNOHANG) != (0, 0):
            log.error("the process with the records ended")
            die()

    def _begin(self, bench: Workbench, room: ExitStack) -> None:
        if self._end:
            self._end()
        self._connection, theirs = Pipe()
        self._child = forked(partial(_serve, theirs, self._connection, bench, self._holder, room))
        theirs.close()
        # With the model too, of which it may have the only copy.
        self._end = weakref.finalize(bench, _end, self._child, self._connection)


def _end(child: int, connection: Connection) -> None:
    connection.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _serve(connection: Connection, theirs: Connection, bench: Workbench, holder: Holder, room: ExitStack) -> None:
    """Compute what is asked until the other end closes."""
    theirs.close()
    room.close()  # it stays taken for as long as any process holds it
    while True:
        try:
            task, reading = _Unpickler(io.BytesIO(connection.recv_bytes())).load()
        except EOFError:
            return
        update = compute(holder, bench, task, reading)
        result = None if isinstance(update, Exception) else update
        connection.send_bytes(pickle.dumps((result, bench.content_note)))


def _packed(asked: tuple[UpdateTask, RecordsToRead]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(asked)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A secure source belongs to its process, so another one takes its place."""

    def persistent_id(self, value: Any) -> str | None:
        return SecureSource.name if isinstance(value, SecureSource) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, _name: str) -> SecureSource:
        return _secure

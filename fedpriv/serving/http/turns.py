"""Work that would hold up the event loop, done in a thread at which clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_Work = tuple["Future[Any]", Callable[[], Any]]


class Turns:
    """One thread, which ends when nothing waits for it, and with the process: no work delays the end.

    Whatever one client has waiting, another's next work has at most one of each other client before it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        self._is_working = False
        self._lock = threading.Lock()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """The result of the work, or the error that it raises; it does not begin once the caller is cancelled."""
        entry: tuple[Future[T], Callable[[], T]] = Future(), work
        with self._lock:
            self._waiting.setdefault(client, deque()).append(entry)
            if not self._is_working:
                self._is_working = True
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        try:
            return await asyncio.wrap_future(entry[0])
        except asyncio.CancelledError:
            with self._lock:
                self._forget(client, entry)
            raise

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            future, work = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # also a panic in Rust: the caller is told, and the thread goes on
                future.set_exception(error)

    def _next(self) -> _Work | None:
        with self._lock:
            if not self._waiting:
                self._is_working = False
                return None
            client, entries = next(iter(self._waiting.items()))
            self._waiting.move_to_end(client)
            entry = entries[0]
            self._forget(client, entry)
            return entry

    def _forget(self, client: str, entry: _Work) -> None:
        entries = self._waiting.get(client, deque())
        if entry in entries:
            entries.remove(entry)
            if not entries:
                del self._waiting[client]

"""Limits on what one client may ask of the server, so that slow, broken and greedy ones harm no other.

Work that would hold up the event loop is done in a thread at which clients take turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope

from fedpriv.errors import InputError
from fedpriv.models.serving.http.refusals import RefusalError, values_of


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Bounds on requests.

    Attributes:
        body_bytes: of one request.
        num_inputs: texts or prompts of one request.
        max_new_tokens: that one prompt is continued by.
        requests_per_token: under way at once; without tokens, of all clients together.
        inputs_per_token: texts or prompts of these requests together. One request alone may have `num_inputs`.
        connections_per_address: connections of nginx at once, and requests a second.
        drain_seconds: for which a server that is told to stop works on.

    Raises:
        InputError: one of them is not > 0.
    """

    body_bytes: int = 2**18
    num_inputs: int = 64
    max_new_tokens: int = 256
    requests_per_token: int = 64
    inputs_per_token: int = 128
    connections_per_address: int = 64
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise InputError(f"{field.name} = {getattr(self, field.name)}: must be > 0")


class InFlight:
    """The requests under way and their inputs, counted for each token.

    Args:
        per_token: requests.
        inputs_per_token: texts or prompts.
    """

    def __init__(self, per_token: int, inputs_per_token: int) -> None:
        self._per_token, self._inputs_per_token = per_token, inputs_per_token
        self._counts: Counter[str] = Counter()
        self._inputs: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        """Under way."""
        return self._counts.total()

    @contextmanager
    def one_more(self, token: str) -> Iterator[Callable[[int], None]]:
        """Count a request while it is under way; what it yields counts its inputs, once these are known.

        Raises:
            RefusalError: the token has as many as it may.
        """
        if self._counts[token] >= self._per_token:
            message = f"This token has {self._per_token} requests under way, which is its limit; wait for one of them."
            raise _too_many(message)
        counted = 0

        def count(num_inputs: int) -> None:
            nonlocal counted
            # Its own limit is enough for a request alone.
            if self._inputs[token] and self._inputs[token] + num_inputs > self._inputs_per_token:
                raise _too_many(
                    f"This token has {self._inputs[token]} texts or prompts under way, and with {num_inputs} more than "
                    f"its limit of {self._inputs_per_token}; wait for some of them."
                )
            self._inputs[token] += num_inputs
            counted += num_inputs

        self._counts[token] += 1
        try:
            yield count
        finally:
            self._counts[token] -= 1
            self._inputs[token] -= counted


def capped(scope: Scope, receive: Receive, most_bytes: int) -> Receive:
    """A `receive` that refuses a body as soon as it is known to be longer.

    Raises:
        RefusalError: its stated length is; what it returns raises it, too.
    """
    refusal = RefusalError(413, f"The body has more than {most_bytes} bytes.", code="body_too_large")
    stated = values_of(scope, b"content-length")
    # The protocol's parser let only digits through; a very long number is not read as one.
    if stated and (len(stated[0]) > 18 or int(stated[0]) > most_bytes):
        raise refusal
    num_bytes = 0

    async def next_message() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most_bytes:
            raise refusal
        return message

    return next_message


def _too_many(message: str) -> RefusalError:
    return RefusalError(429, message, code="too_many_requests", headers={"Retry-After": "1"})


T = TypeVar("T")

_Work = tuple["Future[Any]", Callable[[], Any]]


class ThreadTurns:
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

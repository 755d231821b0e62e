"""Limits on what one client may ask of the server, so that slow, broken and greedy ones harm no other.

Work that would hold up the event loop is done in a thread at which clients take turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.types import Message, Receive, Scope

from fedpriv.errors import InputError
from fedpriv.serving.http.refusals import RefusalError, stopping

# Long bodies of one token that are read at once, and bytes beyond which one is long: a round of the event loop takes up
# a part of every connection that has one, and so must not have many. Each keeps its turn for some seconds more, as it
# is parsed with the interpreter's lock held for up to 25 ms: 8 a second leave others most of it.
_LONG_BODIES_AT_ONCE = 2
_SECONDS_OF_A_LONG_BODY = 0.25
_LONG_BODY = 2**14

# Requests of one token that begin in one round of the event loop. Whatever another waits for takes several rounds, and
# a round with a request of each of 64 connections would last 50 ms.
_BEGUN_IN_A_ROUND = 4


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Bounds on requests and connections.

    Attributes:
        body_bytes: of one request.
        body_seconds: in which the whole body must have come.
        header_seconds: in which a request's head must have come.
        handshake_seconds: in which TLS must have begun.
        write_seconds: for which a client may leave an answer unread.
        keep_alive_seconds: for which a connection without a request stays open.
        num_inputs: texts or prompts of one request.
        max_new_tokens: that one prompt is continued by.
        requests_per_token: under way at once; without tokens, of all clients together.
        inputs_per_token: texts or prompts of these requests together. One request alone may have `num_inputs`.
        num_connections: open at once.
        connections_per_address: open at once, or begun within some seconds, through which no valid token came.
        drain_seconds: for which a server that is told to stop works on.

    Raises:
        InputError: one of them is not > 0.
    """

    body_bytes: int = 2**20
    body_seconds: float = 10.0
    header_seconds: float = 10.0
    handshake_seconds: float = 5.0
    write_seconds: float = 30.0
    keep_alive_seconds: int = 5
    num_inputs: int = 64
    max_new_tokens: int = 256
    requests_per_token: int = 64
    inputs_per_token: int = 128
    num_connections: int = 512
    connections_per_address: int = 64
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise InputError(f"{field.name} = {getattr(self, field.name)}: must be > 0")


class InFlight:
    """The requests under way and their inputs, counted for each token; once closed it admits no more.

    Args:
        per_token: requests.
        inputs_per_token: texts or prompts.

    Attributes:
        is_open: whether requests are accepted.
    """

    def __init__(self, per_token: int, inputs_per_token: int) -> None:
        self.is_open = True
        self._per_token, self._inputs_per_token = per_token, inputs_per_token
        self._counts: Counter[str] = Counter()
        self._inputs: Counter[str] = Counter()
        self._readers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._begun: Counter[str] = Counter()
        self._beginning: dict[str, deque[asyncio.Future[None]]] = {}

    async def begins(self, token: str) -> None:
        """Wait until the request may begin: of one token, few do so in each round of the event loop."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._begun[token] < _BEGUN_IN_A_ROUND:
            self._begun[token] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._beginning.setdefault(token, deque()).append(turn)
        await turn

    def _next_round(self) -> None:
        self._begun.clear()
        for token, waiting in list(self._beginning.items()):
            while waiting and self._begun[token] < _BEGUN_IN_A_ROUND:
                if not (turn := waiting.popleft()).done():  # the client is still there
                    turn.set_result(None)
                    self._begun[token] += 1
            if not waiting:
                del self._beginning[token]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_round)

    @asynccontextmanager
    async def reading(self, token: str, scope: Scope) -> AsyncIterator[None]:
        """The turn of a request's body to be read: of long ones, a token has few at once and few in a second."""
        if _stated_length(scope) <= _LONG_BODY:
            yield
            return
        readers = self._readers.get(token)
        if readers is None:
            readers = self._readers[token] = asyncio.Semaphore(_LONG_BODIES_AT_ONCE)
        await readers.acquire()
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(_SECONDS_OF_A_LONG_BODY, readers.release)

    @property
    def num_requests(self) -> int:
        """Under way."""
        return self._counts.total()

    @contextmanager
    def one_more(self, token: str) -> Iterator[Callable[[int], None]]:
        """Count a request while it is under way; what it yields counts its inputs, once these are known.

        Raises:
            RefusalError: the token has as many as it may, or the server is about to stop.
        """
        if not self.is_open:
            raise stopping()
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

    async def wait_until_none(self, seconds: float) -> bool:
        """Whether the last request ended within this time."""
        try:
            async with asyncio.timeout(seconds):
                while self.num_requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True


async def read_body(scope: Scope, receive: Receive, limits: RequestLimits) -> bytes | None:
    """The request's whole body, or None if the client is gone; whatever is longer is refused as soon as that is known.

    Raises:
        RefusalError: it is too long, states no length, or does not come in time.
    """
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        # A chunk for each byte would cost seconds of the event loop.
        raise RefusalError(411, "The body's length must be stated, in Content-Length.", code="no_length")
    if _stated_length(scope) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        text = f"The body did not come within {limits.body_seconds:g} s."
        raise RefusalError(408, text, code="slow_body") from None


def replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body which was read already, and then what still comes: the client's leaving."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


def _stated_length(scope: Scope) -> int:
    """The length that the head states; 0 if it states none: there is no body."""
    stated = [value for name, value in scope["headers"] if name == b"content-length"]
    # The protocol's parser let only digits through; a very long number is not read as one.
    return 0 if not stated else int(stated[0]) if len(stated[0]) < 20 else 2**63


def _too_many(message: str) -> RefusalError:
    return RefusalError(429, message, code="too_many_requests", headers={"Retry-After": "1"})


def _too_large(limits: RequestLimits) -> RefusalError:
    return RefusalError(413, f"The body has more than {limits.body_bytes} bytes.", code="body_too_large")


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

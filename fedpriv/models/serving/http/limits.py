"""The way of every request to the application: who asks, how much at once, how much of a body; and its metrics.

Limits keep slow, broken and greedy clients from harming others. Work that would hold up the event loop is done in a
thread at which clients take turns. Nothing in the metrics names a variant or a token: the one who may read them may
know neither.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter as Counts
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpriv.errors import InputError
from fedpriv.models.serving.http.refusals import RefusalError, check_local_name, stopping, values_of, with_headers
from fedpriv.models.serving.http.tokens import ANYONE, Token, Tokens
from fedpriv.models.serving.requests import Statistics

T = TypeVar("T")
_Work = tuple["Future[Any]", Callable[[], Any]]

# What a stranger may see: that a server is here and well, and an empty page that asks for a token.
OPEN = ("/", "/health")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# {field of Statistics: (name of the counter, what it counts)}
_COUNTERS = {
    "num_passes": ("fedpriv_passes", "Passes of the frozen base."),
    "num_rows": ("fedpriv_pass_rows", "Rows of all passes; divided by the passes, the mean batch."),
    "num_variants_of_passes": ("fedpriv_pass_variants", "Different variants, summed over passes."),
    "hits": ("fedpriv_variant_hits", "Requests whose variant was in memory."),
    "misses": ("fedpriv_variant_misses", "Requests whose variant was read from the disk."),
    "bytes_read": ("fedpriv_variant_read_bytes", "Bytes of variants read from the disk."),
}

_GAUGES = {
    "num_waiting": ("fedpriv_requests_waiting", "Requests that no pass has begun with."),
    "bytes_in_memory": ("fedpriv_variant_memory_bytes", "Bytes of the variants in memory."),
}


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Bounds on requests.

    Attributes:
        num_inputs: texts or prompts of one request.
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
    """The requests under way and their inputs, counted for each token."""

    def __init__(self, per_token: int, inputs_per_token: int) -> None:
        self._per_token, self._inputs_per_token = per_token, inputs_per_token
        self._counts: Counts[str] = Counts()
        self._inputs: Counts[str] = Counts()

    @property
    def num_requests(self) -> int:
        """Under way."""
        return self._counts.total()

    @contextmanager
    def one_more(self, token: str) -> Iterator[Callable[[int], None]]:
        """Count a request under way, and with what it yields its inputs; RefusalError at the token's limit."""
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
    """A `receive` that refuses a body as soon as it is known, as its stated length may tell at once, to be longer."""
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


class ThreadTurns:
    """One thread, which ends when nothing waits for it, and with the process: no work delays the end.

    Whatever one client has waiting, another's next work has at most one of each other client before it.
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


class Entrance:
    """Middleware around the application.

    In this order, so that no client costs much before it is known who asks: the host, the token, the number of its
    requests under way, the kind and the length of the body.
    """

    def __init__(
        self, app: ASGIApp, tokens: Tokens, limits: RequestLimits, in_flight: InFlight, metrics: ServerMetrics
    ) -> None:
        self._app, self._tokens, self._limits = app, tokens, limits
        self._in_flight, self._metrics = in_flight, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, statuses = time.perf_counter(), list[int]()
        answer = with_headers(send, statuses.append)
        try:
            await self._admit(scope, receive, answer)
        except RefusalError as refusal:
            scope["refused"] = refusal.code
            await refusal.response()(scope, receive, answer)
        except asyncio.CancelledError:
            # The server's time to stop is over. An answer that has begun breaks off.
            if not statuses:
                await stopping().response()(scope, receive, answer)
        finally:
            if "refused" in scope:
                self._metrics.refused(scope["refused"])
            endpoint = getattr(scope.get("route"), "path", "other")
            # Without a status the client has left before there was one; nginx counts that as 499, too.
            self._metrics.observe(endpoint, statuses[0] if statuses else 499, time.perf_counter() - started)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._tokens.are_required:  # a page elsewhere has no token
            check_local_name(scope)
        if scope["path"] in OPEN:
            await self._let_in(scope, receive, send, ANYONE)
            return
        token = self._tokens.bearer(values_of(scope, b"authorization"))
        if token is None:
            message = "Give one valid token in one header, Authorization: Bearer TOKEN."
            raise RefusalError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        with self._in_flight.one_more(token.name) as count_inputs:
            scope["count_inputs"] = count_inputs
            if scope["method"] == "POST":
                _check_content_type(scope)
            await self._let_in(scope, receive, send, token)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, token: Token) -> None:
        scope["token"] = token
        await self._app(scope, capped(scope, receive, self._limits.body_bytes), send)


def _check_content_type(scope: Scope) -> None:
    """JSON alone: a web page elsewhere cannot send that without asking first, and is never allowed to."""
    kinds = values_of(scope, b"content-type")
    if len(kinds) != 1 or kinds[0].partition(b";")[0].strip().lower() != b"application/json":
        raise RefusalError(
            415, "The body must be JSON, with Content-Type: application/json.", code="wrong_content_type"
        )
    if values_of(scope, b"content-encoding"):
        raise RefusalError(415, "The body must not be compressed.", code="wrong_content_type")


class ServerMetrics:
    """The metrics of one server, in a registry of its own; `num_requests` tells how many are under way."""

    def __init__(self, statistics: Callable[[], Statistics], num_requests: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "fedpriv_request_seconds",
            "From a request's head to the end of its answer.",
            ("endpoint", "status"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._refusals = Counter(
            "fedpriv_refusals", "Requests that were not answered, by reason.", ("reason",), registry=self._registry
        )
        under_way = Gauge("fedpriv_requests_under_way", "Requests under way.", registry=self._registry)
        under_way.set_function(num_requests)
        self._registry.register(_OfEngine(statistics))

    def observe(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request: the route that it took, its status, and the time that it took."""
        self._seconds.labels(endpoint, str(status)).observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._refusals.labels(reason).inc()

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self._registry)


class _OfEngine(Collector):
    """The engine's statistics as metrics."""

    def __init__(self, statistics: Callable[[], Statistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        values = vars(self._statistics())
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=values[field])
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=values[field])

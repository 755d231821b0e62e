"""The way of every request to the application: who asks, how much at once, and how much of a body; and its metrics.

Nothing in the metrics names a variant or a token: the one who may read them may know neither.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from fedpriv.models.serving.http.limits import InFlight, RequestLimits, capped
from fedpriv.models.serving.http.refusals import RefusalError, check_local_name, stopping, values_of, with_headers
from fedpriv.models.serving.http.tokens import ANYONE, Token, Tokens
from fedpriv.models.serving.requests import Statistics

# What a stranger may see: that a server is here and well, and an empty page that asks for a token.
OPEN = ("/", "/health")


class Entrance:
    """Middleware around the application.

    In this order, so that no client costs much before it is known who asks: the host, the token, the number of its
    requests under way, the kind and the length of the body.

    Args:
        app: the application.
        tokens: who may ask.
        limits: of each.
        in_flight: the requests under way.
        metrics: are told of every request.
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
        token = self._bearer(scope)
        with self._in_flight.one_more(token.name) as count_inputs:
            scope["count_inputs"] = count_inputs
            if scope["method"] == "POST":
                _check_content_type(scope)
            await self._let_in(scope, receive, send, token)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, token: Token) -> None:
        scope["token"] = token
        await self._app(scope, capped(scope, receive, self._limits.body_bytes), send)

    def _bearer(self, scope: Scope) -> Token:
        token = self._tokens.bearer(values_of(scope, b"authorization"))
        if token is None:
            message = "Give one valid token in one header, Authorization: Bearer TOKEN."
            raise RefusalError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return token


def _check_content_type(scope: Scope) -> None:
    """JSON alone: a web page elsewhere cannot send that without asking first, and is never allowed to."""
    kinds = values_of(scope, b"content-type")
    if len(kinds) != 1 or kinds[0].partition(b";")[0].strip().lower() != b"application/json":
        raise RefusalError(
            415, "The body must be JSON, with Content-Type: application/json.", code="wrong_content_type"
        )
    if values_of(scope, b"content-encoding"):
        raise RefusalError(415, "The body must not be compressed.", code="wrong_content_type")


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


class ServerMetrics:
    """The metrics of one server, in a registry of its own.

    Args:
        statistics: of the engine, at the moment of asking.
        num_requests: under way, at the moment of asking.
    """

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

"""Figures for Prometheus on this machine's own address: read every few seconds, and served as they were read last.

Neither a reader nor a source can hold anything up: a reader gets what is in memory, and a source that fails or hangs
has a thread of its own and is left out. Everyone with an account on the machine may read; so what a source gives must
be public, or paid for by a ledger, and must change at public times alone.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedpriv.errors import InputError

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# A page elsewhere that has its own name lead to this machine asks by that name, and gets nothing.
_LOCAL_NAMES = (_HOST, "localhost")

# As `generate_latest` writes it.
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MOST_READERS = 16
_READER_SECONDS = 10.0
# Reading takes at most this share of one core, unless it takes so long that figures would be older than a minute.
_SHARE = 0.1
_LONGEST_PAUSE_SECONDS = 60.0


def gauge(
    name: str, meaning: str, values: float | Mapping[tuple[str, ...], float], labels: Sequence[str] = ()
) -> Metric:
    """A figure that may go up and down.

    Args:
        name: `fedpriv_...`, with its unit last.
        meaning: one sentence.
        values: one, or {values of the labels: one}.
        labels: their names.
    """
    return _filled(GaugeMetricFamily(name, meaning, labels=labels), values)


def counter(
    name: str, meaning: str, values: float | Mapping[tuple[str, ...], float], labels: Sequence[str] = ()
) -> Metric:
    """A number that only grows; `_total` is added to its name. Arguments as for `gauge`."""
    return _filled(CounterMetricFamily(name, meaning, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: float | Mapping[tuple[str, ...], float]) -> Metric:
    for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric(labels, value)
    return family


@dataclass(frozen=True)
class Measured:
    """Figures that are read together.

    Attributes:
        name: what is read, for the log.
        read: returns them, or raises.
        seconds: between two readings, at least.
    """

    name: str
    read: Callable[[], Iterable[Metric]]
    seconds: float = 10.0


def serve(port: int, sources: Sequence[Measured]) -> None:
    """Serve the figures at http://127.0.0.1:PORT/metrics from threads of their own, as long as this process lives.

    Raises:
        InputError: nothing can listen on the port.
    """
    readings = [_Reading(source) for source in sources]
    try:
        server = _Server(port, _Registered(readings))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"metrics = {port}: cannot listen on {_HOST}:{port} ({reason}); name a free port") from None
    for thread in (*readings, threading.Thread(target=server.serve_forever, daemon=True)):
        thread.start()


class _Reading(threading.Thread):
    """Reads a source again and again; while it cannot be read, there are no figures."""

    def __init__(self, source: Measured) -> None:
        super().__init__(daemon=True)
        self._source = source
        self.figures: tuple[Metric, ...] = ()

    def run(self) -> None:
        last_reason = ""
        while True:
            started = time.monotonic()
            try:
                self.figures, reason = tuple(self._source.read()), ""
            except Exception as error:  # whatever it is, the node or the run goes on
                self.figures, reason = (), f"{type(error).__name__}: {error}"
            if reason and reason != last_reason:
                log.warning("no figures of the %s: %s", self._source.name, reason)
            last_reason = reason
            taken = time.monotonic() - started
            time.sleep(max(self._source.seconds, min(taken / _SHARE, _LONGEST_PAUSE_SECONDS)))


class _Registered(Collector):
    """All figures that were read last."""

    def __init__(self, readings: Sequence[_Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            yield from reading.figures


class _Server(ThreadingHTTPServer):
    """Answers few readers at a time: where there is one too many, the oldest, which must be slow, is cut off."""

    daemon_threads = True

    def __init__(self, port: int, figures: Collector) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(figures)
        self._readers: deque[Any] = deque()
        super().__init__((_HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._readers.append(request)
        if len(self._readers) > _MOST_READERS:
            with suppress(OSError, IndexError):
                self._readers.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with suppress(ValueError):
            self._readers.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a reader that goes away is its own affair."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics."""

    timeout = _READER_SECONDS
    server: _Server

    def do_GET(self) -> None:
        is_local = self.headers.get("Host", "").partition(":")[0] in _LOCAL_NAMES
        status = 404 if self.path.partition("?")[0] != "/metrics" else 200 if is_local else 403
        body = generate_latest(self.server.registry) if status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a line per question would drown out the others."""

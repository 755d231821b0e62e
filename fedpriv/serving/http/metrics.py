"""What the server tells Prometheus. Nothing here names a variant or a token: whoever may read it may know neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedpriv.serving.requests import Statistics

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


class Metrics:
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

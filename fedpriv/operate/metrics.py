"""Figures for Prometheus in a file that node_exporter's textfile collector reads, rewritten after each reading.

A source cannot hold anything up: one that fails or hangs has a thread of its own and is left out. The folder's owner
may let others read; so what a source gives must be public, or paid for by a ledger, and must change at public times.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedpriv.errors import InputError
from fedpriv.files import replace_file

log = logging.getLogger(__name__)

# In a kit's folder. The collector reads all of a folder, so this one has nothing else in it.
_FILE = Path("metrics") / "fedpriv.prom"

# Reading takes at most this share of one core, unless it takes so long that figures would be older than a minute.
_SHARE = 0.1
_LONGEST_PAUSE_SECONDS = 60.0


def gauge(
    name: str, meaning: str, values: float | Mapping[tuple[str, ...], float], labels: Sequence[str] = ()
) -> Metric:
    """A figure named `fedpriv_..._UNIT` that may go up and down: one value, or {values of the labels: one}."""
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
    """Figures that `read` returns together, or raises; so many seconds, at least, between two readings."""

    name: str
    read: Callable[[], Iterable[Metric]]
    seconds: float = 10.0


def path_in(folder: Path) -> Path:
    """The file with the metrics of a kit's folder."""
    return folder / _FILE


def write(folder: Path, sources: Sequence[Measured]) -> Path:
    """Keep the figures in `path_in(folder)`, from threads of their own, and return it; InputError if unwritable."""
    file = _MetricsFile(path_in(folder), sources)
    try:
        file.path.parent.mkdir(mode=0o700, exist_ok=True)  # its owner may open it
        file.put("", ())
    except OSError as error:
        raise InputError(f"{file.path}: cannot be written ({error.strerror}); make it writable") from None
    for source in sources:
        threading.Thread(target=_read, args=(source, file), daemon=True).start()
    return file.path


class _MetricsFile(Collector):
    """The file with all figures that were read last; whoever reads it sees a whole one."""

    def __init__(self, path: Path, sources: Sequence[Measured]) -> None:
        self.path, self._lock = path, threading.Lock()
        self._figures: dict[str, tuple[Metric, ...]] = {source.name: () for source in sources}

    def put(self, name: str, figures: Iterable[Metric]) -> None:
        """Replace the figures of a source; OSError if the file cannot be written."""
        with self._lock:
            self._figures[name] = tuple(figures)
            replace_file(self.path, generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        for figures in self._figures.values():
            yield from figures


def _read(source: Measured, file: _MetricsFile) -> None:
    """Read a source again and again; while it cannot be read, there are no figures."""
    last_reason = ""
    while True:
        started = time.monotonic()
        try:
            file.put(source.name, tuple(source.read()))
            reason = ""
        except Exception as error:  # whatever it is, the node or the run goes on
            reason = f"{type(error).__name__}: {error}"
            with suppress(OSError):
                file.put(source.name, ())
        if reason and reason != last_reason:
            log.warning("no figures of the %s: %s", source.name, reason)
        last_reason = reason
        taken = time.monotonic() - started
        time.sleep(max(source.seconds, min(taken / _SHARE, _LONGEST_PAUSE_SECONDS)))

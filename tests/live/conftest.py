"""A run's folder that grows, and a real server that watches one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedpriv.config import parse
from fedpriv.runs import files
from fedpriv.runs._writer import RunWriter, write_json
from fedpriv.runs.show._live_server import WatchedPages, WatchServer
from fedpriv.serving.http.server import Address
from tests.runs.written import client_row, registrations, round_row

ReadPage = Callable[[], Mapping[str, str]]


def begin(folder: Path, **config: Any) -> RunWriter:
    """A run of three clients before its first round."""
    writer = RunWriter.created(folder, parse({"rounds": 10, "target_epsilon": None, "budget_epsilon": [2], **config}))
    writer.write_registrations(registrations())
    writer.add(round_row(0, []), [])
    return writer


def grow(writer: RunWriter, round_: int, **changes: Any) -> None:
    """One more round."""
    rows = [client_row(round_, client, **changes) for client in (0, 1, 2)]
    writer.add(round_row(round_, rows), rows)


def end(folder: Path, **changes: Any) -> None:
    """The run is finished."""
    clients = [
        {"client": c, "num_records": 9, "epsilon_local": 0.1, "epsilon_rho": 0.2, "delta": 1e-5} for c in (0, 1, 2)
    ]
    values = {"epsilon_local_max": 0.1, "epsilon_rho_max": 0.2, "delta_max": 1e-5, "accuracy": 0.5, "seconds": 9.0}
    write_json(folder / files.SUMMARY, {**values, "clients": clients, "warnings": [], **changes})


def plan(folder: Path, *keys: str) -> None:
    """A sweep of runs that have not begun."""
    folder.mkdir(exist_ok=True)
    runs = [{"key": key, "varied": {"rank": number}} for number, key in enumerate(keys)]
    (folder / "sweep.json").write_text(json.dumps({"title": "ranks", "runs": runs}))


@dataclass
class Watched:
    """A server that listens."""

    url: str
    server: WatchServer

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)


@contextmanager
def watched(folder: Path, *, host: str = "127.0.0.1", **options: Any) -> Iterator[Watched]:
    """A server in a thread of the test; it has ended when the block does."""
    ready, found = threading.Event(), list[str]()

    def tell(url: str) -> None:
        found.append(url)
        ready.set()

    watch = WatchedPages(folder, **{"seconds": 0.05, **options})
    server = WatchServer(watch, Address(host=host, port=0), tell)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield Watched(found[0], server)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()

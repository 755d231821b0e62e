"""A real server on loopback, in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fedpriv.serving.http.app import create_app
from fedpriv.serving.http.limits import RequestLimits
from fedpriv.serving.http.server import Address, Server
from fedpriv.serving.http.tokens import Tokens
from tests.serving.fake import FakeCards


@dataclass
class Running:
    """A server that listens."""

    url: str
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)


@contextmanager
def running(
    serving: Any,
    *,
    tokens: Tokens | None = None,
    limits: RequestLimits | None = None,
    cards: Any = None,
    aliases: Mapping[str, str] | None = None,
    **address: Any,
) -> Iterator[Running]:
    """The server, which has drained when the block ends."""
    limits, tokens = limits or RequestLimits(drain_seconds=5), tokens or Tokens(None)
    ready, found = threading.Event(), list[str]()
    loop = asyncio.new_event_loop()
    app = create_app(serving, cards or FakeCards(), tokens, limits, aliases)

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    server = Server(app, serving, tokens, limits, Address(**{"host": "127.0.0.1", "port": 0, **address}), on_ready)

    def serve() -> None:
        # As `asyncio.run` does: tasks that were cancelled have their say.
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield Running(found[0], server, loop)
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended already
            loop.call_soon_threadsafe(server.begin_to_drain)
        thread.join(20)
        assert not thread.is_alive()

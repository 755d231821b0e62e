"""A real server on loopback, in a thread of the test, or in a process of its own."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from fedpriv.models.serving.http.app import create_app
from fedpriv.models.serving.http.limits import RequestLimits
from fedpriv.models.serving.http.server import Address, Server
from fedpriv.models.serving.http.tokens import Tokens
from tests.models.serving.fake import FakeCards, FakeServing


def client_of(
    serving: Any = None, tokens: Path | None = None, secret: str = "", cards: Any = None, **limits: Any
) -> TestClient:
    """A client of the application alone, which shows this token."""
    app = create_app(serving or FakeServing(), cards or FakeCards(), Tokens(tokens), RequestLimits(**limits))
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    return TestClient(app, base_url="http://localhost", headers=headers, raise_server_exceptions=False)


@dataclass
class Running:
    """A server that listens."""

    url: str
    server: Server

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
    address: Address | None = None,
) -> Iterator[Running]:
    """The server, which has drained when the block ends."""
    limits, tokens = limits or RequestLimits(drain_seconds=5), tokens or Tokens(None)
    ready, found = threading.Event(), list[str]()
    app = create_app(serving, cards or FakeCards(), tokens, limits, aliases)

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    server = Server(app, address or Address(), on_ready, limits.drain_seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield Running(found[0], server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


ROOT = Path(__file__).parents[3]
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="there is no nginx on this machine; apt-get install nginx-light")


@contextmanager
def served(
    folder: Path, *arguments: object, seconds: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process with the fake engine, and what it printed once clients can connect."""
    command = [sys.executable, "-m", "tests.models.serving.fake", seconds, folder, "--port", 0, "--json", *arguments]
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()

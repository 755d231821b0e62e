"""The server of `fedpriv watch`, and its addresses. It reads one folder and writes nothing.

A folder is read once for all who follow its page, however many they are and however slowly they read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpriv.errors import InputError
from fedpriv.runs.show._live_page import LivePage, script, whole_page
from fedpriv.serving.http.refusals import (
    RefusalError,
    check_local_name,
    named_host,
    values_of,
    with_headers,
)
from fedpriv.serving.http.server import Address, Server

# Streams that are open at once, of all pages together.
MOST_STREAMS = 64

# With those that every server here sends: no page of another site may hold any of this, in whatever way.
_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin"}
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; sandbox"


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """A folder that is watched."""

    page: LivePage
    feed: _Feed


class WatchedPages:
    """The pages of a run; or of a sweep and its runs.

    Args:
        folder: of the run or the sweep.
        seconds: between two readings of a folder, at least.
        most_streams: that may be open at once.
    """

    def __init__(self, folder: Path, *, seconds: float = 1.0, most_streams: int = MOST_STREAMS) -> None:
        self._folder, self._seconds, self._most_streams = folder, seconds, most_streams
        self._num_streams = 0
        self._watched = {"": self._watch(folder)}

    def application(self, host: str) -> ASGIApp:
        """The ASGI application, for a server that listens at this name or number."""
        routes = [
            Route("/health", self.health),
            *(
                Route(f"{prefix}{name}", endpoint)
                for prefix in ("/", "/runs/{key}/")
                for name, endpoint in (("", self.page), ("events", self.events), ("report", self.report))
            ),
        ]
        handlers = {RefusalError: _refused, HTTPException: _no_route, Exception: _failed}
        return _Gate(Starlette(routes=routes, exception_handlers=handlers), host)

    def close(self) -> None:
        """Let all streams end; on the event loop."""
        for watched in self._watched.values():
            watched.feed.close()

    async def health(self, request: Request) -> Response:
        """Answer that the server is here."""
        return JSONResponse({"status": "ok"})

    async def page(self, request: Request) -> Response:
        """The page, with all there is by now."""
        watched = self._of(request)
        pieces = await watched.feed.current()
        text = whole_page(title=watched.page.title, pieces=pieces, up="key" in request.path_params)
        return HTMLResponse(text, headers={"Content-Security-Policy": _page_policy()})

    async def events(self, request: Request) -> Response:
        """A stream of what changes on the page."""
        watched = self._of(request)
        if self._num_streams >= self._most_streams:
            message = f"{self._most_streams} pages are open, which is the limit; close some."
            raise RefusalError(503, message, code="too_many_pages", headers={"Retry-After": "5"})
        self._num_streams += 1
        return _Stream(_messages(watched.feed), self._one_less)

    async def report(self, request: Request) -> Response:
        """The report of a finished run."""
        watched = self._of(request)
        try:
            text = await asyncio.to_thread(watched.page.report)
        except (InputError, OSError):
            raise RefusalError(404, "There is no report: the run is not finished.", code="not_found") from None
        return HTMLResponse(text, headers={"Content-Security-Policy": _REPORT_POLICY})

    def _one_less(self) -> None:
        self._num_streams -= 1

    def _of(self, request: Request) -> _Watched:
        """The folder that an address is about."""
        key = request.path_params.get("key", "")
        if key and not self._watched[""].page.has_run(key):
            raise RefusalError(404, "There is no such run in this folder.", code="not_found")
        if key not in self._watched:
            self._watched[key] = self._watch(self._folder / key)
        return self._watched[key]

    def _watch(self, folder: Path) -> _Watched:
        found = LivePage(folder)
        return _Watched(page=found, feed=_Feed(found.read, seconds=self._seconds))


class _Stream(StreamingResponse):
    """A stream of events, which tells when it has ended, also if it never began."""

    def __init__(self, messages: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(messages, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _messages(feed: _Feed) -> AsyncIterator[str]:
    async for changed in feed.follow():
        yield f"data: {json.dumps(changed)}\n\n"


class _Gate:
    """Middleware around the application: who may ask at all, and what no answer lacks.

    Args:
        app: the application.
        host: the name or number that the server listens at.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = with_headers(sending, lambda status: None)
        try:
            if scope["method"] != "GET":
                raise RefusalError(405, "This server is read only.", code="wrong_method", headers={"Allow": "GET"})
            check_local_name(scope)
            self._check_name(scope)
            _check_site(scope)
        except RefusalError as refusal:
            await refusal.response()(scope, receive, answer)
            return
        await self._app(scope, receive, answer)

    def _check_name(self, scope: Scope) -> None:
        """Beyond loopback too, a page of another site must not reach this server through a browser by its own name."""
        name = named_host(scope)
        if name not in ("localhost", self._host) and not _is_number(name):
            raise RefusalError(421, "This server answers only to its own name or number.", code="wrong_host")


def _check_site(scope: Scope) -> None:
    """A page of another site may link here; it may not read, embed or follow anything."""
    sites, modes = values_of(scope, b"sec-fetch-site"), values_of(scope, b"sec-fetch-mode")
    is_link = modes == [b"navigate"] and not scope["path"].endswith("/events")  # a hidden frame could follow one
    if not {b"none", b"same-origin"}.issuperset(sites) and not is_link:
        raise RefusalError(403, "Pages of other sites get nothing here.", code="other_site")


def _is_number(host: str) -> bool:
    """Whether a host is an address; no site can be reached by one but that which has it."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


@cache
def _page_policy() -> str:
    """The Content-Security-Policy of a page: its own script, by digest, styles, and requests to this server."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    return RefusalError(404, "There is nothing at this address.", code="not_found").response()


async def _failed(request: Request, error: Exception) -> Response:
    return RefusalError(500, "The server failed; its log says why.", code="internal_error").response()


class _Feed:
    """The pieces of a page, as they change.

    Nothing is queued: a follower is sent the difference between what it last took and what there is now, so one that
    reads slowly misses what was between, and costs the memory of one message. Without followers, nobody reads.

    Args:
        read: the pieces; called in another thread, one call at a time.
        seconds: between two readings at least; more if reading takes long, so that it leaves the processor to the run.
        quiet_seconds: after which a follower is sent an empty change, so that one that has gone is noticed.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, str]], *, seconds: float = 1.0, quiet_seconds: float = 15.0
    ) -> None:
        self._read, self._seconds, self._quiet_seconds = read, seconds, quiet_seconds
        self._latest: Mapping[str, str] = {}
        self._due = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def current(self) -> Mapping[str, str]:
        """The pieces as they are now, or were a moment ago."""
        if self._reading is None and time.monotonic() >= self._due:
            self._reading = asyncio.get_running_loop().create_task(self._refresh())
        if self._reading is not None:
            # A follower that leaves must not break off a reading that others wait for.
            await asyncio.shield(self._reading)
        return self._latest

    async def follow(self) -> AsyncIterator[dict[str, str]]:
        """First all pieces, then those that have changed since; ends when the feed is closed."""
        taken: Mapping[str, str] = {}
        last = time.monotonic()
        while not self._closed.is_set():
            latest = await self.current()
            changed = {name: piece for name, piece in latest.items() if taken.get(name) != piece}
            if changed or time.monotonic() - last >= self._quiet_seconds:
                taken = latest
                yield changed
                last = time.monotonic()
            try:
                await asyncio.wait_for(self._closed.wait(), self._seconds)
            except TimeoutError:
                continue

    def close(self) -> None:
        """Let all followers end; on the event loop."""
        self._closed.set()

    async def _refresh(self) -> None:
        started = time.monotonic()
        try:
            self._latest = await asyncio.to_thread(self._read)
        finally:
            taken = time.monotonic() - started
            self._due, self._reading = time.monotonic() + max(self._seconds, 5 * taken), None


class WatchServer(Server):
    """Serves until SIGTERM or SIGINT, then lets the streams end, and ends with 0.

    Args:
        watch: the pages.
        address: where to listen.
        on_ready: is told the URL once clients can connect.
    """

    def __init__(self, watch: WatchedPages, address: Address, on_ready: Callable[[str], None]) -> None:
        super().__init__(watch.application(address.host), address, on_ready)
        self._watch = watch
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell where."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End. Unlike uvicorn's own, the signal is not raised again, so that the exit code is 0."""
        self.stop()

    def stop(self) -> None:
        """End all streams and then the server; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._watch.close)
        self.should_exit = True


def serve_folder(folder: Path, address: tuple[str, int], *, insecure: bool, on_ready: Callable[[str], None]) -> None:
    """Serve the page of a run or a sweep until SIGTERM or SIGINT.

    Args:
        folder: of it, which may not be there yet.
        address: host and port to listen on; port 0 takes a free one.
        insecure: whether other machines may read along.
        on_ready: is told the URL once clients can connect.

    Raises:
        InputError: the address is not of this machine alone, or the folder is neither there nor within one.
    """
    at = Address(host=address[0], port=address[1])
    check_host(at, insecure=insecure)
    if not folder.is_dir() and not folder.absolute().parent.is_dir():
        raise InputError(f"folder = {str(folder)!r}: must be the folder of a run or a sweep, or be in a folder")
    WatchServer(WatchedPages(folder), at, on_ready).run()


def check_host(address: Address, *, insecure: bool) -> None:
    """Refuse to be read by other machines, which are not asked who they are.

    Raises:
        InputError: the address is not of this machine alone.
    """
    if not address.is_local and not insecure:
        raise InputError(
            f"host = {address.host!r}: other machines could read along, and nobody is asked who it is; keep 127.0.0.1 "
            f"and come through ssh -L {address.port}:127.0.0.1:{address.port} MACHINE, or give --insecure if something "
            "else protects the way here"
        )

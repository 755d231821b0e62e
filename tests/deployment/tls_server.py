"""A small HTTPS server on loopback, whose certificate and clock a test chooses."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import time


@contextmanager
def serving(folder: Path | None, *, host: str = "127.0.0.1", clock_offset: timedelta = timedelta()) -> Iterator[int]:
    """The port of a server with server.crt and server.key of a folder, or without TLS."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def date_time_string(self, timestamp=None) -> str:
            return formatdate(time() + clock_offset.total_seconds(), usegmt=True)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer((host, 0), Handler)
    server.handle_error = lambda *_: None  # a handshake that a test breaks off
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""What tests with processes of their own share."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

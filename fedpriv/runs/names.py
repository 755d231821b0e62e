"""How a client is named to people."""

from __future__ import annotations


def titled(client: int, name: str) -> str:
    """The partition id and, where its holder chose one, the name: `client 0 (St. Anna)`."""
    plain = f"client {client}"
    return plain if name in ("", plain) else f"{plain} ({name})"

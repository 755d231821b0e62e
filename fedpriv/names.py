"""How the names of data holders are shown: each holder chose its own."""

from __future__ import annotations


def printable(text: object) -> str:
    """The text without control characters: names and reasons come from others, and must not control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def holder_label(client: int | str, name: str | None) -> str:
    """A data holder by its name with its partition id, such as `St. Anna (0)`; by its id alone if it has no name.

    The id stays, since another holder may have chosen the same name.
    """
    shown, plain = printable(name or ""), f"client {client}"
    return plain if shown in ("", plain, f"client-{client}") else f"{shown} ({client})"

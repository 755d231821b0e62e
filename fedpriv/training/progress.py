"""Who is told how far a long computation is; nobody, unless a process that owns all records asks to be.

What is told depends on which records were drawn, so it stays on the screen of whoever holds them: a simulation sets a
model's `tell`, a vault never does, and nothing writes it to a file or a message.
"""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str, float, float], None]
"""Takes what is being done, how much of it is done, and how much there is, in units of its own."""

TRAINING = "training"
"""In steps of a client."""
READING = "reading records"
"""In records whose states or features are computed once and kept."""
TESTING = "testing"
"""In records of the server's test set."""


def silent(what: str, done: float, total: float) -> None:
    """Tells nobody."""

"""Tell how far a long computation is, if a process that owns all records asks; nobody else is told.

Progress depends on which records were drawn, so it stays on the screen of the records' holder: a simulation sets a
model's `tell`, a vault never does, and nothing writes it to a file or a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

from fedpriv.files import trace_without_message

Told = ParamSpec("Told")
log = logging.getLogger(__name__)

Tell = Callable[[str, float, float], None]
"""Takes what is being done, how much of it is done, and how much there is, in units of its own."""

TRAINING = "training"
"""In steps of a client."""
READING = "reading records"
"""In records whose states below the first trained layer are computed once and kept."""
FEATURES = "computing features"
"""In records whose features, which a head reads, are computed."""
TESTING = "testing"
"""In records of the server's test set."""


def unfailing(tell: Callable[Told, None]) -> Callable[Told, None]:
    """The same, which is told no more once it raised: a failing display must not look like a failing record."""
    failed = False

    def told(*args: Told.args, **kwargs: Told.kwargs) -> None:
        nonlocal failed
        if failed:
            return
        try:
            tell(*args, **kwargs)
        except Exception as error:  # whatever it is: what is only shown decides nothing
            failed = True
            log.warning("progress is shown no more: %s", trace_without_message(error))

    return told


def silent(what: str, done: float, total: float) -> None:
    """Tells nobody."""

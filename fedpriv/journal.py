"""Structured logs: one JSON line for each event of a run, of plain public values alone."""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from pathlib import Path

log = logging.getLogger(__name__)

Value = str | int | float | bool | None

_LONGEST = 300


class Journal:
    """Appends events to a file, each with the time and with what all of them share.

    An event tells of a run, a round, a client, and of numbers that are public anyway; never of a record, a text, a
    gradient or an exception's message, which could hold one. A file that cannot be written costs the event alone.

    Args:
        path: of the file; None writes nothing.
        common: fields of every event, such as the run.
    """

    def __init__(self, path: Path | None, **common: Value) -> None:
        self._path = path
        self._common = common

    def of(self, **common: Value) -> Journal:
        """The journal with further fields in every event."""
        return Journal(self._path, **{**self._common, **common})

    def write(self, event: str, **fields: Value) -> None:
        """Append an event; a text is cut to 300 characters.

        Raises:
            TypeError: a field is no plain value.
        """
        if self._path is None:
            return
        values = {"time": datetime.now(UTC).isoformat(), "event": event, **self._common, **fields}
        for name, value in values.items():
            if value is not None and not isinstance(value, (str, int, float, bool)):
                raise TypeError(f"{name}: an event holds plain values, not {type(value).__name__}")
        cut = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in values.items()}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(cut)}\n")
        except OSError as error:
            log.warning("%s: an event could not be noted (%s)", self._path, error.strerror)


def where(error: BaseException) -> str:
    """The type of an error and the lines of code that it came through, without its message."""
    return f"{type(error).__name__} at\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()

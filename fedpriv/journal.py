"""Structured logs: one JSON line per event of a run, with plain, public values only."""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from pathlib import Path

log = logging.getLogger(__name__)

Value = str | int | float | bool | None

_MAX_TEXT_LENGTH = 300

# What no reader may find cut short: a receipt, whose own length is bounded.
_WHOLE = {"receipt"}


class Journal:
    """Appends events to a file, each with the time and the common fields.

    An event describes a run, a round, a client, and numbers that are public anyway; never a record, a text, a gradient,
    or the message of an exception, which could contain one. If the file cannot be written, only the event is lost.

    Args:
        path: of the file; None writes nothing.
        common: fields of every event, such as the run.
    """

    def __init__(self, path: Path | None, **common: Value) -> None:
        self._path = path
        self._common = common

    def with_fields(self, **common: Value) -> Journal:
        """This journal with further fields in every event."""
        return Journal(self._path, **{**self._common, **common})

    def write(self, event: str, **fields: Value) -> None:
        """Append an event; texts are truncated to 300 characters, but for a receipt.

        Raises:
            TypeError: a field is not a plain value.
        """
        if self._path is None:
            return
        values = {"time": datetime.now(UTC).isoformat(), "event": event, **self._common, **fields}
        for name, value in values.items():
            if value is not None and not isinstance(value, (str, int, float, bool)):
                raise TypeError(f"{name}: an event holds plain values, not {type(value).__name__}")
        truncated = {
            name: value[:_MAX_TEXT_LENGTH] if isinstance(value, str) and name not in _WHOLE else value
            for name, value in values.items()
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(truncated)}\n")
        except OSError as error:
            log.warning("%s: an event could not be written (%s)", self._path, error.strerror)


def trace_without_message(error: BaseException) -> str:
    """The type of an error and its traceback, without its message."""
    return f"{type(error).__name__} at\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()

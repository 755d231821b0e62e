"""The events in a run's journal, as another process reads them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MAX_EVENTS = 8


@dataclass(frozen=True, kw_only=True)
class Events:
    """What a journal holds.

    Attributes:
        last: the last events, at most MAX_EVENTS.
        num_events: how many there are in all.
        num_unreadable: lines that hold no event.
    """

    last: tuple[Mapping[str, Any], ...]
    num_events: int
    num_unreadable: int


def read_events(path: Path) -> Events:
    """The events of events.jsonl; none if the file is missing."""
    last: deque[Mapping[str, Any]] = deque(maxlen=MAX_EVENTS)
    num_events = num_unreadable = 0
    if not path.is_file():
        return Events(last=(), num_events=0, num_unreadable=0)
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):  # still being written, or cut off when the run died
                break
            event = _parse_event(line)
            if event is None:
                num_unreadable += 1
            else:
                num_events += 1
                last.append(event)
    return Events(last=tuple(last), num_events=num_events, num_unreadable=num_unreadable)


def _parse_event(line: bytes) -> dict[str, Any] | None:
    """The event on a line, which is an object of plain values with a time and a name; else None."""
    try:
        event = json.loads(line)
        datetime.fromisoformat(event["time"])
    except (ValueError, KeyError, TypeError):
        return None
    plain = isinstance(event.get("event"), str) and not any(isinstance(v, (list, dict)) for v in event.values())
    return event if plain else None

"""Privacy events by name: they describe what a release costs, convert to JSON, and unknown ones are refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from fedpriv.accounting.epsilon_delta import EpsilonDelta, PureEpsilon
from fedpriv.accounting.law import Event, Unit, short
from fedpriv.accounting.lmo.event import SubsampledLmo
from fedpriv.accounting.subsampled_gaussian import SubsampledGaussian

__all__ = [
    "EVENTS",
    "EpsilonDelta",
    "Event",
    "PureEpsilon",
    "SubsampledGaussian",
    "SubsampledLmo",
    "Unit",
    "check_known",
    "from_json",
    "group",
    "to_json",
]

VERSION = 1

# Every type of event, by its name in ledgers and messages. A new noise distribution adds a line here.
EVENTS: dict[str, type[Event]] = {
    "subsampled_gaussian": SubsampledGaussian,
    "pure_epsilon": PureEpsilon,
    "epsilon_delta": EpsilonDelta,
    "subsampled_lmo": SubsampledLmo,
}


def group(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same composition, with equal events merged into one event with the summed count.

    Composition does not depend on order, so the cost is unchanged; accountants then do their work once per distinct
    event instead of once per round.
    """
    counts: Counter[Event] = Counter()
    for event in events:
        counts[event.with_count(1)] += event.count
    return tuple(event.with_count(count) for event, count in counts.items())


def check_known(event: object) -> None:
    """Refuse an event of an unknown type, whose cost nobody can know."""
    if type(event) not in EVENTS.values():
        raise ValueError(f"event {event!r}: unknown, so its cost is unknown")


def to_json(event: Event) -> str:
    """The event as one line of JSON with its kind and the format's version.

    Raises:
        ValueError: the event is of an unknown type.
    """
    check_known(event)
    kind = next(name for name, event_type in EVENTS.items() if type(event) is event_type)
    return json.dumps({"version": VERSION, "kind": kind, **event.to_fields()}, sort_keys=True)


def from_json(text: str) -> Event:
    """The event that `to_json` wrote.

    Raises:
        ValueError: the text is not an event of this version and a known kind, or a value is out of range.
    """
    try:
        fields = json.loads(text)
        version, kind = fields.pop("version"), fields.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"event {text[:200]!r}: must be a JSON object with version and kind") from None
    if version != VERSION:
        raise ValueError(f"event version = {short(version)}: this fedpriv reads version {VERSION}")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ValueError(f"event kind = {short(kind)}: known are {', '.join(EVENTS)}")
    try:
        return EVENTS[kind].from_fields(fields)
    except TypeError as error:
        raise ValueError(f"event {text[:200]!r}: {error}") from None

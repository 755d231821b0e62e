"""Privacy events: what a release cost, in a vocabulary that serialises and refuses what it does not know."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from fedpriv.accounting.epsilon_delta import EpsilonDelta, PureEpsilon
from fedpriv.accounting.law import Event, Unit
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

# The vocabulary, by the name that an event has in ledgers and messages. A new law of noise is a line here.
EVENTS: dict[str, type[Event]] = {
    "subsampled_gaussian": SubsampledGaussian,
    "pure_epsilon": PureEpsilon,
    "epsilon_delta": EpsilonDelta,
    "subsampled_lmo": SubsampledLmo,
}


def group(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same composition with equal events merged into one with the summed count.

    Composition does not depend on order, so the cost is unchanged; accountants then work once for each
    distinct event instead of once for each round.
    """
    counts: Counter[Event] = Counter()
    for event in events:
        counts[event.with_count(1)] += event.count
    return tuple(event.with_count(count) for event, count in counts.items())


def check_known(event: object) -> None:
    """Refuse an event that is not of the vocabulary, whose cost nobody can know."""
    if type(event) not in EVENTS.values():
        raise ValueError(f"event {event!r}: unknown, so its cost is unknown")


def to_json(event: Event) -> str:
    """The event as one line of JSON with its kind and the format's version.

    Raises:
        ValueError: the event is not of the vocabulary.
    """
    check_known(event)
    kind = next(name for name, law in EVENTS.items() if type(event) is law)
    return json.dumps({"version": VERSION, "kind": kind, **event.to_fields()}, sort_keys=True)


def from_json(text: str) -> Event:
    """The event that `to_json` wrote.

    Raises:
        ValueError: the text is no event of this version and vocabulary, or a value is out of range.
    """
    try:
        fields = json.loads(text)
        version, kind = fields.pop("version"), fields.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"event {text[:200]!r}: must be a JSON object with version and kind") from None
    if version != VERSION:
        raise ValueError(f"event version = {version!r}: this fedpriv reads version {VERSION}")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ValueError(f"event kind = {kind!r}: known are {', '.join(EVENTS)}")
    try:
        return EVENTS[kind].from_fields(fields)
    except TypeError as error:
        raise ValueError(f"event {text[:200]!r}: {error}") from None

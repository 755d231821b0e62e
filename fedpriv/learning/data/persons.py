"""Persons: which records are about whom, and which of a person's records count.

Whatever is decided about a person depends on a key and on this person's name and records alone, so another person, or
another person's record, changes nothing of it. Names are compared as they are written: two persons whose names differ
by case alone are two, and a person in two spellings would be two as well, which `fedpriv data check` tells.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from fedpriv.learning.data._text import TextData


def by_person(names: Sequence[str]) -> dict[str, list[int]]:
    """{person: the places of the person's records, ascending}, in the order of the persons' first records.

    Args:
        names: [records] of the person that each is about.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return places


def some_of(name: str, places: Sequence[int], most: int, key: bytes) -> list[int]:
    """At most so many of a person's records, in their order; every choice of so many is equally likely over the keys.

    Args:
        name: of the person.
        places: of all of the person's records.
        most: >= 1.
        key: secret to all who must not know which records count.
    """
    if len(places) <= most:
        return list(places)
    drawn = [
        hmac.digest(key, f"{number} {name}".encode("utf-8", "surrogatepass"), "sha256") for number in range(len(places))
    ]
    order = sorted(range(len(places)), key=drawn.__getitem__)
    return [places[number] for number in sorted(order[:most])]


def at_most(data: TextData, most: int, key: bytes) -> TextData:
    """The data with at most so many records of each person, chosen by the key; unchanged where the unit is the record.

    Args:
        data: of one holder.
        most, key: as for `some_of`.
    """
    if data.persons is None:
        return data
    kept = [place for name, places in by_person(data.persons).items() for place in some_of(name, places, most, key)]
    return data if len(kept) == len(data) else data.part(sorted(kept))

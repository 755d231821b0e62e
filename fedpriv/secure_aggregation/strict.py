"""Reading of JSON from a party that is not trusted: bounded, without duplicates, and refused in one line."""

from __future__ import annotations

import json
from typing import Any

from fedpriv.secure_aggregation.errors import ProtocolError

MAX_TEXT = 2**20


def shown(value: object) -> str:
    """A value for an error message, on one line and cut to 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parsed_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object in a text.

    Args:
        name: of the text, for messages.
        text: of at most 2^20 characters.

    Raises:
        ProtocolError: the text is too long, is not one JSON object, or names a key twice.
    """
    if type(text) is not str or len(text) > MAX_TEXT:
        raise ProtocolError(f"{name}: must be a text of at most {MAX_TEXT} characters")
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except ProtocolError as error:
        raise ProtocolError(f"{name}: {error}") from None
    except (ValueError, RecursionError):  # ValueError also covers integers of too many digits
        raise ProtocolError(f"{name}: must be JSON") from None
    if type(value) is not dict:
        raise ProtocolError(f"{name}: must be a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ProtocolError(f"{shown(key)} is listed twice")
        found[key] = value
    return found


def _no_constant(constant: str) -> None:
    raise ProtocolError(f"{constant} is no JSON number")

"""Standard JSON: without the NaN and infinities that Python's `json` writes by default."""

from __future__ import annotations

import json
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """JSON text in which null stands for every NaN and infinity.

    Args:
        value: what `json.dumps` takes.
        indent: spaces per level; None writes a single line.

    Raises:
        TypeError: the value holds something that JSON cannot express.
    """
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent, allow_nan=False)

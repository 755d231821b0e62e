"""Sizes as people write them."""

from __future__ import annotations

import re

from fedpriv.errors import InputError

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 80GB or 24GiB.

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise InputError(f"memory = {text!r}: must be a size such as 80GB or 24GiB")
    return int(float(match[1]) * _UNITS[match[2]])

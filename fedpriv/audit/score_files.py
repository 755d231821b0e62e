"""Score files: CSV tables with one row for each canary or record."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedpriv.audit.bounds import Array
from fedpriv.errors import InputError


def read(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Array]:
    """{column: finite float64 values}, for the required columns and the optional ones that the file has.

    An optional name such as `shadow_*` stands for all columns that begin with `shadow_`.

    Raises:
        InputError: the file does not exist, a column is missing, a row has another length, or a value is not a finite
            number.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        raise InputError(f"scores = {str(path)!r}: no such file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"scores = {str(path)!r}: not a CSV file ({error})") from None
    if len(rows) < 2:
        raise InputError(f"scores = {str(path)!r}: has no rows; needs a header and one row for each canary or record")
    header = [name.strip() for name in rows[0]]
    if missing := [name for name in required if name not in header]:
        raise InputError(f"column {missing[0]!r}: {path} has {', '.join(header)}")
    stems = [name[:-1] for name in optional if name.endswith("*")]
    wanted = [n for n in header if n in required or n in optional or any(n.startswith(stem) for stem in stems)]
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise InputError(f"{path}, line {line}: {len(row)} values for {len(header)} columns")
    positions = {name: header.index(name) for name in wanted}
    return {
        name: np.array([_number(row[position], name, path, line) for line, row in enumerate(rows[1:], start=2)])
        for name, position in positions.items()
    }


def flags(values: Array, name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The values 0 and 1 as bool.

    Raises:
        InputError: there is another value.
    """
    if not np.isin(values, (0, 1)).all():
        raise InputError(f"{name} = {values[~np.isin(values, (0, 1))][0]:g}: must be 0 or 1")
    return np.asarray(values.astype(bool))


def _number(text: str, name: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{name} = {text.strip()[:40]!r} in {path}, line {line}: must be a finite number")
    return value

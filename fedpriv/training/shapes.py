"""Fixed shapes: the batch shape in which a record is computed depends on this record and on public numbers alone.

Matrix products round differently for different shapes, and some models mix padding into their results. So a record is
padded to a length of its own, in a pass with a constant number of rows that dummies fill. On a CPU, what else is in
the pass then changes no bit of the record's gradient; `admission.py` checks that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedpriv.data.records import BatchShape, Item, num_tokens

_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Records that are computed together.

    Attributes:
        positions: their positions among all records.
        shape: of the batch, with at least as many rows.
    """

    positions: list[int]
    shape: BatchShape


def padded_length(tokens: int, longest: int | None) -> tuple[int, bool]:
    """The length to which a record is padded, and whether it then has no padding at all.

    Multiples of 8 up to 64, of 16 up to 128, and so on: the last quarter of an octave at most is padding. There is
    always some, except for records of the longest length, which is where truncation puts many of them.

    Args:
        tokens: of the record, >= 1.
        longest: tokens of the longest record, which the model must take; None if there is no limit.
    """
    if longest is not None and tokens >= longest:
        return tokens, True
    multiple = max(_MULTIPLE, 2 ** (tokens.bit_length() - 3))
    length = (tokens // multiple + 1) * multiple
    return min(length, longest or length), False


def passes(items: Sequence[Item], longest: int | None, rows: Callable[[int], int], *, filled: bool) -> Iterator[Pass]:
    """The records by length, in passes of one shape each.

    Args:
        items: in any number and order.
        longest: as for `padded_length`.
        rows: the number of rows of a pass, by the length of its records, >= 1.
        filled: whether dummies fill a pass, or it has as many rows as there are records.
    """
    groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for position, item in enumerate(items):
        groups[padded_length(num_tokens(item), longest)].append(position)
    for (length, full), positions in sorted(groups.items()):
        # A row's place can change its rounding at lengths that are no multiple of 8.
        at_once = rows(length) if length % _MULTIPLE == 0 or not filled else 1
        for begin in range(0, len(positions), at_once):
            chosen = positions[begin : begin + at_once]
            num_rows = at_once if filled else len(chosen)
            yield Pass(positions=chosen, shape=BatchShape(rows=num_rows, tokens=length, full=full))


def lengths_up_to(max_length: int, longest: int | None) -> list[int]:
    """The largest number of tokens, at most `max_length`, of each shape; `longest` as for `padded_length`."""
    by_shape = {padded_length(tokens, longest): tokens for tokens in range(1, max_length + 1)}
    return sorted(by_shape.values())

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

# A row's place in a pass can change its rounding if its length is no multiple of this.
MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Records that are computed together.

    Attributes:
        positions: their positions among all records.
        shape: of the batch, with at least as many rows.
    """

    positions: list[int]
    shape: BatchShape


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """To which lengths records are padded.

    Multiples of `multiple` up to 8 times this; from there on, of the largest power of two that is at most a quarter of
    the length. There is always some padding, except for records of the longest length, which is where truncation puts
    many of them.

    Attributes:
        longest: tokens of the longest record, which the model must take; None if there is no limit.
        multiple: a power of two, >= 8.
    """

    longest: int | None
    multiple: int = MULTIPLE

    def padded(self, tokens: int) -> tuple[int, bool]:
        """The length to which a record of this many tokens, >= 1, is padded, and whether it then has no padding."""
        if self.longest is not None and tokens >= self.longest:
            return tokens, True
        multiple = max(self.multiple, 2 ** (tokens.bit_length() - 3))
        length = (tokens // multiple + 1) * multiple
        return min(length, self.longest or length), False

    def up_to(self, max_length: int) -> list[int]:
        """The largest number of tokens, at most `max_length`, of each shape."""
        by_shape = {self.padded(tokens): tokens for tokens in range(1, max_length + 1)}
        return sorted(by_shape.values())


def passes(items: Sequence[Item], lengths: Lengths, rows: Callable[[int], int], *, filled: bool) -> Iterator[Pass]:
    """The records by length, in passes of one shape each.

    Args:
        items: in any number and order.
        lengths: to which they are padded.
        rows: the number of rows of a pass, by the length of its records, >= 1.
        filled: whether dummies fill a pass, or it has as many rows as there are records.
    """
    groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for position, item in enumerate(items):
        groups[lengths.padded(num_tokens(item))].append(position)
    for (length, full), positions in sorted(groups.items()):
        at_once = rows(length)
        for begin in range(0, len(positions), at_once):
            chosen = positions[begin : begin + at_once]
            num_rows = at_once if filled else len(chosen)
            yield Pass(positions=chosen, shape=BatchShape(rows=num_rows, tokens=length, full=full))

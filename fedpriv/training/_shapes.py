"""Fixed shapes: the batch shape in which a record is computed depends on this record and on public numbers alone.

Matrix products round differently for different shapes, and some models mix padding into their results. So a record is
padded to a length of its own. On a CPU a pass has one of a few numbers of rows that give the same bits, as
`_pass_sizes.py` finds out, or else a constant number, and dummies fill it. What else is in the pass then changes no bit
of the record's gradient; `_admission.py` checks that.
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
    """The lengths to which records are padded.

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


# A larger pass with at most this share of dummies takes less time than two smaller ones.
_MOST_DUMMIES = 0.25


def split(num_records: int, sizes: Sequence[int]) -> list[int]:
    """Sizes of passes for so many records of one length: the largest that they fill, but for a few dummies.

    Args:
        num_records: >= 0.
        sizes: in ascending order; the last pass has the smallest one, however few records are left.
    """
    chosen = []
    while num_records > 0:
        fitting = [size for size in sizes if (1 - _MOST_DUMMIES) * size <= num_records]
        chosen.append(fitting[-1] if fitting else sizes[0])
        num_records -= chosen[-1]
    return chosen


def most_dummies(sizes: Sequence[int]) -> int:
    """The most dummies among the records of one length, however many these are; `sizes` as for `split`."""
    return max(sum(split(number, sizes)) - number for number in range(1, sizes[-1] + 1))


def most_small_passes(sizes: Sequence[int]) -> int:
    """The most passes of one length that are not the largest, however many records there are; `sizes` as for `split`.

    The smallest counts in any case: it may be slower for each record than the same in the largest, by what one pass
    takes without them.
    """
    return max(1, *(sum(size < sizes[-1] for size in split(number, sizes)) for number in range(1, sizes[-1] + 1)))


def passes(
    items: Sequence[Item], lengths: Lengths, sizes: Callable[[int], Sequence[int]], *, filled: bool
) -> Iterator[Pass]:
    """The records by length, in passes of one shape each.

    Args:
        items: in any number and order.
        lengths: to which they are padded.
        sizes: the numbers of rows that a pass may have, ascending, >= 1, by the length of its records.
        filled: whether dummies fill a pass, or it has as many rows as there are records.
    """
    groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for position, item in enumerate(items):
        groups[lengths.padded(num_tokens(item))].append(position)
    for (length, full), positions in sorted(groups.items()):
        begin = 0
        for size in split(len(positions), sizes(length)):
            chosen = positions[begin : begin + size]
            num_rows = size if filled else len(chosen)
            yield Pass(positions=chosen, shape=BatchShape(rows=num_rows, tokens=length, full=full))
            begin += size

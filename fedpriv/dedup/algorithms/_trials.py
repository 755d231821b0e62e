"""Common parts of all searches: counted validations, and the largest set of blocks that passed one."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from fedpriv.errors import InputError

Positions = frozenset[int]
Accept = Callable[[Positions], bool]


class BudgetSpent(Exception):  # noqa: N818 - not an error: the search ends with the result so far
    """Raised by `accept` instead of an answer: no further validation is allowed, so the search ends."""


@dataclass(frozen=True, kw_only=True)
class BlockSearchResult:
    """The result of a search.

    Attributes:
        replaced: positions in saliency order whose blocks are replaced; a set that passed validation, or empty.
        num_validations: calls of `accept` that returned an answer; a call that raised does not count.
    """

    replaced: Positions
    num_validations: int


class Trials:
    """The validations of one search: keeps only sets that passed, and counts every answer once."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept
        self._largest: Positions = frozenset()
        self._num_validations = 0

    @property
    def result(self) -> BlockSearchResult:
        """The largest set that passed so far, the earliest among equals; the last one if sets only grow."""
        return BlockSearchResult(replaced=self._largest, num_validations=self._num_validations)

    def passes(self, positions: Positions) -> bool:
        """Whether the model with exactly these positions replaced passes validation."""
        passed = self._accept(positions)
        self._num_validations += 1
        if passed and len(positions) > len(self._largest):
            self._largest = positions
        return passed

    def extend(self, positions: range | Positions) -> bool:
        """Replace these positions too, or roll them back if validation fails; whether it passed."""
        return self.passes(self._largest.union(positions))


def run_search(accept: Accept, walk: Callable[[Trials], None]) -> BlockSearchResult:
    """The result of `walk` when it returns or when the budget of validations is spent."""
    trials = Trials(accept)
    with suppress(BudgetSpent):
        walk(trials)
    return trials.result


def batches(num_blocks: int, batch: int) -> list[range]:
    """The positions in saliency order, `batch` at a time; the last batch may be shorter."""
    return [range(begin, min(begin + batch, num_blocks)) for begin in range(0, num_blocks, batch)]


def check_whole(name: str, value: int, minimum: int) -> None:
    """Refuse a value that is not a whole number of at least `minimum`.

    Raises:
        InputError: with the name, the value and the bound.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{name} = {value!r}: must be a whole number >= {minimum}")


def check_number(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Refuse a value that is not a finite number in [low, high].

    Raises:
        InputError: with the name, the value and the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or math.isinf(value):
        bounds = f"must lie in [{low:g}, {high:g}]" if high < math.inf else f"must be finite and >= {low:g}"
        raise InputError(f"{name} = {value!r}: {bounds}")

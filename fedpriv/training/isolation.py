"""A record that fails counts as nothing; it never decides whether others count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from fedpriv.journal import trace_without_message

Result = TypeVar("Result")
log = logging.getLogger(__name__)

_failures_are_raised: ContextVar[bool] = ContextVar("failures_are_raised", default=False)


@contextmanager
def raising_failures() -> Iterator[None]:
    """Within this context `isolated` raises: on synthetic records, no failure is a record's."""
    token = _failures_are_raised.set(True)
    try:
        yield
    finally:
        _failures_are_raised.reset(token)


def isolated(
    compute: Callable[[list[int]], Result], positions: Sequence[int]
) -> Iterator[tuple[list[int], Result | None]]:
    """The result for all positions together or, if that fails, for each alone; None for one that fails alone.

    Args:
        compute: of records at the given positions, in a shape that is the same for all and for one.
        positions: at least one.

    Yields:
        Positions, and their result.
    """
    try:
        results: list[tuple[list[int], Result | None]] = [(list(positions), compute(list(positions)))]
    except Exception as error:  # whatever it is: if a record can cause it, nothing but its own gradient may show it
        if _failures_are_raised.get():
            raise
        if len(positions) > 1:
            results = [one for position in positions for one in isolated(compute, [position])]
        else:
            log.warning("a record could not be computed and counts as zero: %s", trace_without_message(error))
            results = [(list(positions), None)]
    yield from results

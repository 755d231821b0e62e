"""A bound on the time that showing a run takes from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.02


class Share:
    """Says when something may be done again, such that it takes at most a fiftieth of all time.

    Args:
        expected: seconds that it takes at first.
        clock: by which it is timed.

    Attributes:
        expected: seconds that it took last.
    """

    def __init__(self, expected: float = 0.0, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._began = time.monotonic()
        self._spent, self.expected = 0.0, expected

    @property
    def is_due(self) -> bool:
        """Whether there is time for it."""
        return self._spent + self.expected <= SHARE * (time.monotonic() - self._began)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the block."""
        started = self._clock()
        try:
            yield
        finally:
            self.expected = self._clock() - started
            self._spent += self.expected

"""Variants in bounded memory: those that were asked for longest ago make room for others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

Held = TypeVar("Held")


@dataclass(frozen=True, kw_only=True)
class CacheStatistics:
    """Counts of a cache's work so far.

    Attributes:
        hits: requests for variants that were in memory.
        misses: requests for which something was read.
        bytes_read: from files or stores.
        bytes_in_memory: of the variants in memory; what several have in common counts once.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_in_memory: int = 0


class NoRoomError(RuntimeError):
    """Variants in use leave no room now; there will be some when they are given back."""


class BoundedCache(Generic[Held]):
    """Variants in memory, by the time of their last use. Not thread-safe, but `statistics` may be read from any thread.

    Args:
        num_bytes: of all that is held together.

    Attributes:
        statistics: of its work so far.
    """

    def __init__(self, num_bytes: Callable[[Collection[Held]], int]) -> None:
        self._num_bytes = num_bytes
        self._held: OrderedDict[str, Held] = OrderedDict()
        self.statistics = CacheStatistics()

    @property
    def names(self) -> list[str]:
        """The variants in memory, least recently used first."""
        return list(self._held)

    @property
    def held(self) -> Collection[Held]:
        """The memory of each of them."""
        return self._held.values()

    def get(self, name: str) -> Held | None:
        """The memory of a variant; None if it is not held."""
        return self._held.get(name)

    def keep(self, name: str, held: Held, *, bytes_read: int, again: bool = False) -> None:
        """Hold a variant as the one that was used last, and count the request for it.

        Args:
            name: of the variant.
            held: its memory.
            bytes_read: for this request; 0 is a hit.
            again: whether the request has had the variant before, and is counted already.
        """
        before, is_new = self.statistics, self._held.get(name) is not held
        self._held[name] = held
        self._held.move_to_end(name)
        self.statistics = CacheStatistics(
            hits=before.hits + (not bytes_read and not again),
            misses=before.misses + (bool(bytes_read) and not again),
            bytes_read=before.bytes_read + bytes_read,
            bytes_in_memory=self._num_bytes(self._held.values()) if is_new else before.bytes_in_memory,
        )

    def make_room(self, attempt: Callable[[], Held | None], *, in_use: Iterable[str]) -> Held:
        """The first result of the attempt that is not None; after each other, the variant used longest ago is given up.

        Args:
            attempt: to find memory for a variant.
            in_use: variants that stay.

        Raises:
            NoRoomError: all variants that are left are in use.
        """
        kept = set(in_use)
        while (found := attempt()) is None:
            oldest = next((name for name in self._held if name not in kept), None)
            if oldest is None:
                raise NoRoomError
            del self._held[oldest]
        return found

    def forget(self, name: str) -> None:
        """Give up a variant, if it is held."""
        self._held.pop(name, None)
        self.statistics = replace(self.statistics, bytes_in_memory=self._num_bytes(self._held.values()))

    def clear(self) -> None:
        """Give up all variants."""
        self._held.clear()
        self.statistics = replace(self.statistics, bytes_in_memory=0)

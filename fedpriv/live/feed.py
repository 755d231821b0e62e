"""One reading of a folder for everybody who follows its page, however many they are and however slowly they read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping


class Feed:
    """The pieces of a page, as they change.

    Nothing is queued: a follower is sent the difference between what it last took and what there is now, so one that
    reads slowly misses what was between, and costs the memory of one message. Without followers, nobody reads.

    Args:
        read: the pieces; called in another thread, one call at a time.
        seconds: between two readings at least; more if reading takes long, so that it leaves the processor to the run.
        quiet_seconds: after which a follower is sent an empty change, so that one that has gone is noticed.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, str]], *, seconds: float = 1.0, quiet_seconds: float = 15.0
    ) -> None:
        self._read, self._seconds, self._quiet_seconds = read, seconds, quiet_seconds
        self._latest: Mapping[str, str] = {}
        self._due = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def current(self) -> Mapping[str, str]:
        """The pieces as they are now, or were a moment ago."""
        if self._reading is None and time.monotonic() >= self._due:
            self._reading = asyncio.get_running_loop().create_task(self._refresh())
        if self._reading is not None:
            # A follower that leaves must not break off a reading that others wait for.
            await asyncio.shield(self._reading)
        return self._latest

    async def follow(self) -> AsyncIterator[dict[str, str]]:
        """First all pieces, then those that have changed since; ends when the feed is closed."""
        taken: Mapping[str, str] = {}
        last = time.monotonic()
        while not self._closed.is_set():
            latest = await self.current()
            changed = {name: piece for name, piece in latest.items() if taken.get(name) != piece}
            if changed or time.monotonic() - last >= self._quiet_seconds:
                taken = latest
                yield changed
                last = time.monotonic()
            try:
                await asyncio.wait_for(self._closed.wait(), self._seconds)
            except TimeoutError:
                continue

    def close(self) -> None:
        """Let all followers end; on the event loop."""
        self._closed.set()

    async def _refresh(self) -> None:
        started = time.monotonic()
        try:
            self._latest = await asyncio.to_thread(self._read)
        finally:
            taken = time.monotonic() - started
            self._due, self._reading = time.monotonic() + max(self._seconds, 5 * taken), None
